"""A run's small files on an object store and on this machine: copies there, copies back.

Each file has one writing machine. A file that grows by lines (`.jsonl`, logs) is there in segments,
`metrics.jsonl/000000131072` being its bytes from 131072 on: only the last one is ever written again, until it is full.
Segments follow each other without a gap, so whoever knows the last one finds the next without a listing.
"""

import secrets
from collections.abc import Iterator
from pathlib import Path

from lwray.store import Store, open_store
from lwray.tracking.rundir import RunDir

SEGMENT_BYTES = 128 * 2**10
"""A segment of this size or more is full: it is never written again."""


class Mirror:
    """Copies of the files of one run, named by their paths on this machine. A file is one thread's.

    All methods raise OSError where the storage fails.
    """

    def __init__(self, run: RunDir, store: Store | None = None) -> None:
        self.store = store or open_store(run.url)
        self._root = run.root
        self._last: dict[str, tuple[int, int]] = {}
        """Begin and size of the last segment that is known to be there, by name of the file."""
        self._sent: dict[str, bytes] = {}

    def push(self, *paths: Path) -> None:
        """Bring what is new here into the storage: whole lines of files that grow, all of others, nothing of none."""
        for path in paths:
            if not path.exists():
                continue
            if grows(path):
                self._push_lines(path)
            elif (data := path.read_bytes()) != self._sent.get(name := self._name(path)):
                self.store.put(name, [data])
                self._sent[name] = data

    def put(self, path: Path, text: str) -> None:
        """Write a file to the storage that is not here yet."""
        self.store.put(self._name(path), [text.encode()])

    def pull(self, *paths: Path) -> None:
        """Bring what is new in the storage here; a file that is not there is left as it is."""
        for path in paths:
            if grows(path):
                self._pull_lines(path, compare=False)
            elif (data := self.read(path)) is not None and not (path.exists() and path.read_bytes() == data):
                write_whole(path, data)

    def take_over(self, *paths: Path) -> None:
        """Make growing files here what they are in the storage, or longer: called before this machine writes them on.

        Another machine may have written them since, or this one have been cut off before its last lines were sent.
        """
        for path in paths:
            self._last.pop(self._name(path), None)
            self._pull_lines(path, compare=True)

    def read(self, path: Path) -> bytes | None:
        """What the storage has of a file that does not grow; None where it has none."""
        try:
            return self.store.read(self._name(path))
        except FileNotFoundError:
            return None

    def names(self, directory: Path) -> list[str]:
        """What is below a directory in the storage."""
        return self.store.names(self._name(directory))

    def _name(self, path: Path) -> str:
        return path.relative_to(self._root).as_posix()

    def _push_lines(self, path: Path) -> None:
        name = self._name(path)
        if name not in self._last:
            self._last[name] = list(self._segments(name))[-1]
        start, size = self._last[name]
        data = tail(path, start)
        data = data[: data.rfind(b"\n") + 1]
        if len(data) > size:
            self.store.put(segment(name, start), [data])
            self._last[name] = (start, len(data)) if len(data) < SEGMENT_BYTES else (start + len(data), 0)

    def _pull_lines(self, path: Path, *, compare: bool) -> None:
        """Bring segments that are longer than what is here; with `compare`, all that are other."""
        name = self._name(path)
        for start, size in self._segments(name):
            self._last[name] = (start, size)
            # looked at after the storage was asked: where its writer is on this machine, it has more here by now
            if not size or (not compare and path.exists() and path.stat().st_size >= start + size):
                continue
            there = self.store.read(segment(name, start))
            here = tail(path, start)
            if here[: len(there)] != there:
                same = len(here) if there.startswith(here) else 0
                write_from(path, start + same, there[same:])

    def _segments(self, name: str) -> Iterator[tuple[int, int]]:
        """Begin and size of each segment from the last known one on; at the end one that may grow, of size 0 if new."""
        start, _ = self._last.get(name, (0, 0))
        while True:
            size = self.store.size(segment(name, start)) or 0
            yield start, size
            if size < SEGMENT_BYTES:
                return
            start += size


def grows(path: Path) -> bool:
    """Whether a file is only ever appended to."""
    return path.suffix == ".jsonl" or path.parent.name == "logs"


def segment(name: str, start: int) -> str:
    """The object that holds a file's bytes from `start` on."""
    return f"{name}/{start:012d}"


def tail(path: Path, start: int) -> bytes:
    """A file's bytes from `start` on; none where there is no file."""
    if not path.exists():
        return b""
    with path.open("rb") as file:
        file.seek(start)
        return file.read()


def write_from(path: Path, start: int, data: bytes) -> None:
    """Make `data` what a file holds from `start` on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("r+b" if path.exists() else "xb") as file:
        file.truncate(start)
        file.seek(start)
        file.write(data)


def write_whole(path: Path, data: bytes) -> None:
    """By a name that is this call's alone, because other processes of this machine may bring the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    draft.write_bytes(data)
    draft.replace(path)
