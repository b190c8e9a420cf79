"""What a place for checkpoints must do: whole writes, one exclusive create, reads of ranges."""

from abc import ABC, abstractmethod
from collections.abc import Iterable


class Store(ABC):
    """Files by relative path (`step-00000100-0001/manifest.json`) below one place. Picklable: workers are handed it.

    All methods raise OSError where the place fails (FileNotFoundError for a file that is not there).
    """

    url: str
    """Where it is: a path or an fsspec URL, without credentials."""

    @abstractmethod
    def put(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write a file in one pass, over an older one of this name; it is whole and durable, or absent."""

    @abstractmethod
    def create(self, path: str, data: bytes) -> bool:
        """Like `put`, but False, with nothing written, where the file is there already: of several callers one wins.

        Where places have directories, the file's must be there: FileNotFoundError, once it has been removed.
        """

    @abstractmethod
    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes [start, stop) of a file, all from `start` where `stop` is None. Raises OSError where it is shorter."""

    @abstractmethod
    def size(self, path: str) -> int | None:
        """Bytes of a file; None where there is none."""

    @abstractmethod
    def names(self, directory: str = "") -> list[str]:
        """Names of the files and directories right below `directory`, sorted; none where it is not there.

        A directory whose last file was removed is still there or not, as the place has it.
        """

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove a file, or a directory with all below it; nothing happens where it is not there."""


def open_store(place: str) -> Store:
    """The store at a local path or an fsspec URL (`s3://bucket/runs`)."""
    if "://" in place:
        from lwray.store.objects import ObjectStore

        return ObjectStore(place)
    from lwray.store.local import LocalStore

    return LocalStore(place)
