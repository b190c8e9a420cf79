"""Prepared data on an object store: put there once, and brought to each machine that lacks it.

`.data/<name>/` holds the files, `.data/<name>.json` their sizes and checksums. The latter is written last, there and on
each machine: without it the data are not there.
"""

import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from lwray.data.prepared import is_prepared
from lwray.data.shards import replacing
from lwray.store import Store

BLOCK = 1 << 24


def kept_name(fingerprint: str) -> str:
    """The directory that `lwray.data.prepare` names after what went in."""
    return fingerprint[:16]


def publish(store: Store, directory: Path) -> None:
    """Put what a task prepared in `directory` into `store`, unless it is there. Raises OSError."""
    record = f"{directory.name}.json"
    if store.size(record) is None:
        files = sorted(path for path in directory.rglob("*") if path.is_file() and path.suffix != ".tmp")
        listed = {path.relative_to(directory).as_posix(): _put(store, directory, path) for path in files}
        # of several that publish the same data, one says so
        store.create(record, json.dumps(listed, indent=1).encode())
    with replacing(directory.with_name(record)) as file:
        file.write(store.read(record))


def fetch(store: Store, directory: Path) -> bool:
    """Have on this machine what was published as `directory.name`; False where nothing was.

    One process of a machine brings it, others wait. Raises OSError where the store fails or gives other bytes.
    """
    record = directory.with_name(f"{directory.name}.json")
    if record.exists() and directory.is_dir():
        return True
    record.parent.mkdir(parents=True, exist_ok=True)
    with alone(record.with_suffix(".lock")):
        if record.exists() and directory.is_dir():
            return True
        try:
            listed = store.read(record.name)
        except FileNotFoundError:
            return False
        if not is_prepared(directory):
            _bring(store, directory, json.loads(listed))
        with replacing(record) as file:
            file.write(listed)
    return True


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """One process of this machine at a time; the system lets go of the lock of one that dies."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _put(store: Store, directory: Path, path: Path) -> list[int | str]:
    """Size and xxh3-64 (hex) of what was put."""
    digest, size = xxhash.xxh3_64(), 0

    def blocks() -> Iterator[bytes]:
        nonlocal size
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
                size += len(block)
                yield block

    store.put(f"{directory.name}/{path.relative_to(directory).as_posix()}", blocks())
    return [size, digest.hexdigest()]


def _bring(store: Store, directory: Path, listed: dict[str, list[int | str]]) -> None:
    """Whole or absent: it gets its name once all of it is here."""
    draft = directory.with_name(f"{directory.name}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    for name, (size, checksum) in listed.items():
        digest, path = xxhash.xxh3_64(), draft / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for start in range(0, int(size), BLOCK):
                block = store.read(f"{directory.name}/{name}", start, min(start + BLOCK, int(size)))
                digest.update(block)
                file.write(block)
        if digest.hexdigest() != checksum:
            raise OSError(f"{store.url}/{directory.name}/{name} is corrupt: its checksum differs")
    # a preparation that was killed on this machine
    shutil.rmtree(directory, ignore_errors=True)
    draft.replace(directory)
