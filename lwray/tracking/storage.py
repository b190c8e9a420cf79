"""Where runs are kept: a directory, or an object store and on each machine a spool for what is small."""

import json
import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from lwray.errors import UserError
from lwray.store import open_store
from lwray.tracking.mirror import Mirror, write_whole
from lwray.tracking.rundir import Identity, RunDir

SPOOL = "~/.cache/lwray/spool"
NOT_PULLED = ("logs", "ray", "claim")
"""What of an earlier attempt no start and no command needs here."""


@dataclass(frozen=True, slots=True)
class Storage:
    """A place of runs. Of an object store, `root` is the spool of this machine."""

    root: Path
    url: str = ""

    @classmethod
    def at(cls, place: str) -> "Storage":
        """By path or URL. Raises UserError for a URL that cannot hold runs."""
        if "://" not in place:
            return cls(Path(place).expanduser().absolute())
        if place.startswith("memory://"):
            raise UserError(
                "memory:// lives in one process and cannot hold runs. Use s3://, gs://, az:// or a directory."
            )
        url = open_store(place).url
        return cls(spool_of(url), url)

    @property
    def data(self) -> Path:
        """What tasks prepare, by fingerprint."""
        return self.root / ".data"

    @property
    def data_place(self) -> str:
        """Where it is published, for `open_store`."""
        return f"{self}/.data"

    def run(self, name: str) -> RunDir:
        """The run of this name, whether there is one or not."""
        return RunDir(self.root / name, f"{self.url}/{name}" if self.url else "")

    def __str__(self) -> str:
        return self.url or str(self.root)


def storage_of(run: RunDir) -> Storage:
    """Where a run is kept."""
    return Storage(run.root.parent, run.url.rpartition("/")[0])


def spool_of(url: str) -> Path:
    """A directory of this machine for the small files of one storage: in LWRAY_SPOOL, else in the user's cache."""
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", url)[:60]
    base = Path(os.environ.get("LWRAY_SPOOL") or SPOOL).expanduser().absolute()
    return base / f"{readable}-{xxhash.xxh3_64_hexdigest(url.encode())[:8]}"


def run_names(storage: Storage) -> list[str]:
    """The runs that there are."""
    if not storage.url:
        return sorted(path.parent.name for path in storage.root.glob("*/run.json"))
    store = open_store(storage.url)
    with storage_answers(storage.url):
        return [name for name in store.names() if store.size(f"{name}/run.json") is not None]


def find_run_at(place: str, *, ids: bool = False) -> RunDir | None:
    """The run at a URL, its small files brought here as by `pull_run`; None where there is none. Raises UserError."""
    base, _, name = open_store(place).url.rpartition("/")
    if base.endswith("/"):
        # a bucket alone
        return None
    run = Storage.at(base).run(name)
    return run if pull_run(run, ids=ids) else None


def pull_run(run: RunDir, *, ids: bool = False) -> bool:
    """Make the spool of a run tell what its storage does; False, and nothing is in it, where there is no such run.

    The rows of each step, which may be many, are brought with `ids` alone. Raises UserError where the storage does not
    answer. A run in a directory is there as it is.
    """
    if not run.url:
        return True
    with storage_answers(run.url):
        return _pull_run(run, Mirror(run), NOT_PULLED if ids else (*NOT_PULLED, "sample_ids.jsonl"))


@contextmanager
def storage_answers(url: str) -> Iterator[None]:
    """Before a run has started, an object store (where there is a `url`) that fails is a UserError."""
    try:
        yield
    except OSError as error:
        if not url:
            raise
        raise UserError(f"{error}. Check the storage, its endpoint and the credentials.") from None


def _pull_run(run: RunDir, mirror: Mirror, left_out: Collection[str]) -> bool:
    known = Identity.read(run.identity) if run.identity.exists() else None
    identity = mirror.read(run.identity)
    if known is not None and (identity is None or json.loads(identity)["created"] != known.created):
        # what lies here is of a run that was removed from the storage
        shutil.rmtree(run.root)
    if identity is None:
        return False
    write_whole(run.identity, identity)
    if (summary := mirror.read(run.summary)) is not None:
        write_whole(run.summary, summary)
    else:
        run.summary.unlink(missing_ok=True)
    attempts = [name for name in mirror.names(run.attempts) if name.isdigit()]
    for name in attempts:
        (run.attempts / name / "logs").mkdir(parents=True, exist_ok=True)
        files = [file for file in mirror.names(run.attempts / name) if file not in left_out]
        mirror.pull(*(run.attempts / name / file for file in files))
    for attempt in run.attempts_in_order():
        if attempt.path.name not in attempts:
            shutil.rmtree(attempt.path)
    return True


def pull_logs(run: RunDir, logs: Path) -> None:
    """Bring the logs of an attempt's ranks here. Raises OSError."""
    mirror = Mirror(run)
    mirror.pull(*(logs / name for name in mirror.names(logs)))


def pull_ledgers(run: RunDir) -> None:
    """Bring what happened in all attempts here. Raises OSError."""
    mirror = Mirror(run)
    for name in mirror.names(run.attempts):
        mirror.pull(run.attempts / name / "ledger.jsonl")
