"""Put a rank's file into the store in one pass, summed on the way, and read it back."""

from collections.abc import Iterable, Iterator
from mmap import mmap

import xxhash

from lwray.checkpoint.find import BLOCK, checksum
from lwray.checkpoint.manifest import FileEntry
from lwray.faults import reach
from lwray.store import Store

Chunk = bytes | memoryview | mmap


def part_name(rank: int, save: str) -> str:
    """`rank-00003-5f0a1c2d.safetensors`: no save ever writes over what another one may write or remove."""
    return f"rank-{rank:05d}-{save}.safetensors"


def write_part(store: Store, path: str, chunks: Iterable[Chunk], *, read_back: bool) -> FileEntry:
    """Write one file; it is whole, durable and summed (xxh3-64) when this returns.

    With `read_back` it is read again, so that an older checkpoint may be deleted for it. Raises OSError where the
    store fails or gives other bytes back.
    """
    digest, size = xxhash.xxh3_64(), 0

    def summed() -> Iterator[memoryview]:
        nonlocal size
        for block in in_blocks(chunks):
            digest.update(block)
            size += len(block)
            yield block

    store.put(path, summed())
    entry = FileEntry(size, digest.hexdigest())
    if read_back and checksum(store, path, size) != entry:
        raise OSError(f"{path} reads back other than it was written")
    return entry


def in_blocks(chunks: Iterable[Chunk]) -> Iterator[memoryview]:
    """The same bytes, at most 16 MiB at a time."""
    for chunk in chunks:
        view = memoryview(chunk)
        for start in range(0, len(view), BLOCK):
            yield view[start : start + BLOCK]


def struck(chunks: Iterable[Chunk], step: int, rank: int) -> Iterator[Chunk]:
    """The same chunks; a fault strikes when the first of them is written, in the middle of the file."""
    for chunk in chunks:
        yield chunk
        reach("checkpoint.write", step, rank)
