"""What talks to one kind of object store, by whole keys; one in each process."""

import io
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from lwray.store.retry import Retry


@dataclass(frozen=True, slots=True)
class Limits:
    """How much at once, and how long."""

    part_bytes: int = 16 * 2**20
    """Larger files travel in parts of this size; S3 takes 5 MiB or more."""
    parallel_parts: int = 4
    """Requests of one call under way at once; a `put` holds up to two parts more than this in memory."""
    connect_seconds: float = 5.0
    read_seconds: float = 20.0
    """Longest silence of the store once it has the request."""
    request_seconds: float = 120.0
    """Longest whole request: what ends a part that the store has stopped taking."""
    retry: Retry = field(default_factory=Retry)


class Client(ABC):
    """The methods of `Store` on keys from the bucket's root. Errors are OSError, with the reason alone as text."""

    @abstractmethod
    def put(self, key: str, chunks: Iterable[bytes | memoryview]) -> None: ...

    @abstractmethod
    def create(self, key: str, data: bytes) -> bool: ...

    @abstractmethod
    def read(self, key: str, start: int, stop: int | None) -> bytes: ...

    @abstractmethod
    def size(self, key: str) -> int | None: ...

    @abstractmethod
    def names(self, key: str) -> list[str]: ...

    @abstractmethod
    def remove(self, key: str) -> None: ...


def in_parts(chunks: Iterable[bytes | memoryview], part_bytes: int) -> Iterator[bytes]:
    """The same bytes in parts of exactly `part_bytes`, and a last one of 1 byte or more; none for no bytes.

    After each 1000 parts they grow by `part_bytes`, because S3 takes 10,000 parts at most.
    """
    number, part = 0, io.BytesIO()
    for chunk in chunks:
        # copied at once: the giver may fill the same memory again
        rest = memoryview(chunk).cast("B")
        while rest:
            room = part_bytes * (1 + number // 1000) - part.tell()
            part.write(rest[:room])
            if len(rest) < room:
                break
            rest = rest[room:]
            yield part.getvalue()
            number, part = number + 1, io.BytesIO()
    if part.tell():
        yield part.getvalue()
