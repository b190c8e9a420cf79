"""A directory on a disk or a shared file system."""

import errno
import os
import secrets
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from lwray.store.store import Store

WITHOUT_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)
"""How file systems that know no hard links say so."""


class LocalStore(Store):
    """Files below a directory; every write is synced before it gets its name, and the name after it."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.url = str(root)

    def put(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        target = self.root / path
        make_directory(target.parent)
        draft = self._draft(target, chunks)
        draft.replace(target)
        sync_directory(target.parent)

    def create(self, path: str, data: bytes) -> bool:
        target = self.root / path
        draft = self._draft(target, [data])
        try:
            _give_name(draft, target)
        except FileExistsError:
            # NFS may say so of a link that it made itself, when its answer was lost
            return draft.stat().st_nlink == 2
        finally:
            draft.unlink(missing_ok=True)
        sync_directory(target.parent)
        return True

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        with (self.root / path).open("rb") as file:
            file.seek(start)
            if stop is None:
                return file.read()
            data = file.read(stop - start)
        if len(data) != stop - start:
            raise OSError(f"{path} ends at byte {start + len(data)}, {stop} were expected")
        return data

    def size(self, path: str) -> int | None:
        try:
            return (self.root / path).stat().st_size
        except FileNotFoundError:
            return None

    def names(self, directory: str = "") -> list[str]:
        try:
            return sorted(path.name for path in (self.root / directory).iterdir())
        except FileNotFoundError:
            return []

    def remove(self, path: str) -> None:
        target = self.root / path
        if target.is_dir():
            # another process may be removing it too
            with suppress(FileNotFoundError):
                shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)

    def _draft(self, target: Path, chunks: Iterable[bytes | memoryview]) -> Path:
        """The bytes on disk under a name of their own; nothing is left of them where that fails."""
        # drawn, because on a shared file system a process number is not this process's alone
        draft = target.with_name(f"{target.name}.{secrets.token_hex(8)}.tmp")
        try:
            with draft.open("wb") as file:
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
                _forget(file.fileno())
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        return draft


def _forget(descriptor: int) -> None:
    """Drop the pages that are on disk now, so that a later read tells what the disk has."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _give_name(draft: Path, target: Path) -> None:
    """Raises FileExistsError where `target` is there already."""
    try:
        # a link, because a rename would replace what is there
        os.link(draft, target)
    except OSError as error:
        if error.errno not in WITHOUT_LINKS:
            raise
        # only one process can make it; if that one dies now, its sum tells that it is torn
        with target.open("xb") as file:
            try:
                file.write(draft.read_bytes())
                file.flush()
                os.fsync(file.fileno())
            except BaseException:
                target.unlink(missing_ok=True)
                raise


def make_directory(directory: Path) -> None:
    """Make it and what is missing above it, each name synced."""
    missing = [path for path in (directory, *directory.parents) if not path.is_dir()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make new names inside `directory` survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
