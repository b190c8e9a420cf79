"""Which files a path, a directory, a glob or python:stdlib stands for, in an order no file system decides."""

import glob
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from lwray.errors import UserError

STDLIB = "python:stdlib"

PROSE = {".txt", ".text", ".md", ".rst", ".tex", ".org"}
CODE = {
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".js", ".ts", ".rb"),
    *(".lua", ".sh", ".sql", ".html", ".css", ".toml", ".yaml", ".yml"),
}
TEXT = PROSE | CODE
JSONL = {".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz"}
PARQUET = {".parquet"}
TOKENS = {".bin", ".npy"}
OF_FORMAT = {
    "auto": TEXT | JSONL | PARQUET,
    "text": TEXT,
    "jsonl": JSONL,
    "parquet": PARQUET,
    "tokens": TOKENS,
}
# tests are left out because many of their files are fixtures, some of them broken on purpose
NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "idlelib"}


def find_files(name: str, form: str) -> list[Path]:
    """The files that a path or glob stands for, sorted, as absolute paths.

    Files of a directory are chosen by the suffixes of `form`, a value of data.format. Raises UserError where
    there is none, or nothing in them.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return _inside(path.resolve(), OF_FORMAT[form], name)
    if path.is_file():
        if not path.stat().st_size:
            raise UserError(f"{path} is empty; remove it from the source or fill it")
        return [path.resolve()]
    # an absolute pattern, which Path.glob does not take
    matches = glob.glob(str(path), recursive=True)  # noqa: PTH207
    found = sorted(Path(each).resolve() for each in matches if Path(each).is_file())
    if not found:
        raise UserError(f"no file matches {name!r} (from {Path.cwd()}); correct data.source or data.val_source")
    return _not_empty(found, name)


def _inside(directory: Path, suffixes: set[str], name: str) -> list[Path]:
    found = [path for path in walk(directory, set()) if suffix_of(path) in suffixes]
    if not found:
        raise UserError(
            f"no file under {name!r} has a known suffix ({', '.join(sorted(suffixes))}); "
            f"name the files by a glob such as {name}/**/*.log"
        )
    return _not_empty(found, name)


def _not_empty(found: list[Path], name: str) -> list[Path]:
    full = [path for path in found if path.stat().st_size]
    if not full:
        raise UserError(f"every file of {name!r} is empty ({len(found)} of them)")
    return full


def walk(directory: Path, left_out: set[str]) -> Iterator[Path]:
    """Files below a directory without hidden ones, in an order that does not depend on the file system."""
    for at, below, names in os.walk(directory):
        below[:] = sorted(name for name in below if name not in left_out and not name.startswith("."))
        yield from (Path(at) / name for name in sorted(names) if not name.startswith("."))


def stdlib_files() -> list[Path]:
    """The modules of this Python's standard library."""
    library = Path(sysconfig.get_path("stdlib"))
    return [path for path in walk(library, NOT_STDLIB) if path.suffix == ".py"]


def names_tokens(name: str) -> bool:
    """Whether a name stands for token shards: by its suffix, or a directory that holds them and no text."""
    path = Path(name).expanduser()
    if name == STDLIB or name.startswith("hf://"):
        return False
    if path.is_dir():
        there = {suffix_of(each) for each in walk(path, set())}
        return bool(there & TOKENS) and not there & OF_FORMAT["auto"]
    return path.suffix in TOKENS


def suffix_of(path: Path) -> str:
    """The suffix, with what stands before `.gz`."""
    return "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
