"""Token shards: files of token ids that are memory-mapped, and several of them read as one line of tokens."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from lwray.errors import UserError

HEADER_INTS = 256
HEADER_BYTES = HEADER_INTS * 4
# magic number -> (version, dtype), as llm.c writes them
LAYOUTS: dict[int, tuple[int, np.dtype[Any]]] = {
    20240520: (1, np.dtype("<u2")),
    20240801: (7, np.dtype("<u4")),
}
SCAN_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True)
class Shard:
    """Tokens [start, stop) of a `.bin` or `.npy` file."""

    path: Path
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes `path`'s place when the block ends without an error, and not before."""
    # the process id: two runs that share a cache may prepare the same data at the same time
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with draft.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """uint16 where every id fits, else uint32."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def write_shard(path: Path, tokens: NDArray[Any], vocab_size: int) -> None:
    """Writes 1-D integer `tokens` under llm.c's header. Raises ValueError from 2**31 tokens on."""
    if len(tokens) >= 1 << 31:
        raise ValueError(f"{path}: {len(tokens)} tokens do not fit the header's count; write several shards")
    dtype = token_dtype(vocab_size)
    magic, version = next((magic, version) for magic, (version, kind) in LAYOUTS.items() if kind == dtype)
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = magic, version, len(tokens)
    with replacing(path) as file:
        file.write(header.tobytes())
        file.write(tokens.astype(dtype, copy=False).tobytes())


def map_tokens(path: Path) -> NDArray[Any]:
    """The tokens of a shard file, memory-mapped: 1-D, integers. Raises UserError on any other file."""
    if not path.is_file():
        raise UserError(f"{path}: this token shard is missing; give data.source a place where it exists")
    tokens = _map_npy(path) if path.suffix == ".npy" else _map_bin(path)
    if len(tokens) == 0:
        raise UserError(f"{path} holds no tokens; remove it from data.source")
    return tokens


def _map_npy(path: Path) -> NDArray[Any]:
    try:
        tokens: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise UserError(f"{path} is not a NumPy array that can be memory-mapped: {error}") from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise UserError(
            f"{path} holds {tokens.dtype} of shape {tokens.shape}; a token shard is one-dimensional and of integers"
        )
    return tokens


def _map_bin(path: Path) -> NDArray[Any]:
    with path.open("rb") as file:
        header = np.frombuffer(file.read(HEADER_BYTES), dtype=np.uint8)
    fields = header.view("<i4")[:3].tolist() if len(header) == HEADER_BYTES else [0, 0, 0]
    magic, version, count = fields
    if magic not in LAYOUTS or LAYOUTS[magic][0] != version:
        raise UserError(
            f"{path} has no token header, so the width of its tokens is unknown; "
            "write it with llm.c's header of 256 int32, or as a .npy array"
        )
    dtype = LAYOUTS[magic][1]
    there = path.stat().st_size - HEADER_BYTES
    if there != count * dtype.itemsize:
        raise UserError(
            f"{path}: the header says {count} tokens of {dtype.itemsize} bytes, but {there} bytes follow it; "
            "the file is cut short or damaged"
        )
    return np.memmap(path, dtype=dtype, mode="r", offset=HEADER_BYTES, shape=(count,)) if count else np.empty(0, dtype)


def whole_shard(path: Path) -> Shard:
    """All tokens of a file. Raises UserError as `map_tokens` does."""
    return Shard(path, 0, len(map_tokens(path)))


def id_range(shard: Shard) -> tuple[int, int]:
    """The smallest and the largest token id, read in chunks."""
    tokens = map_tokens(shard.path)
    chunks = [tokens[at : min(at + SCAN_TOKENS, shard.stop)] for at in range(shard.start, shard.stop, SCAN_TOKENS)]
    return min(int(chunk.min()) for chunk in chunks), max(int(chunk.max()) for chunk in chunks)


class TokenStream:
    """Several shards as one line of tokens. Files are mapped on first use, so a stream pickles small."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = tuple(shard for shard in shards if len(shard))
        self._ends = np.cumsum([len(shard) for shard in self.shards], dtype=np.int64)
        self._maps: dict[Path, NDArray[Any]] = {}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}}

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens [start, stop) of the line, int64. Raises IndexError outside [0, len]."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start} to {stop} of a line of {len(self)}")
        out = np.empty(stop - start, dtype=np.int64)
        at = start
        index = int(np.searchsorted(self._ends, start, side="right"))
        while at < stop:
            shard, end = self.shards[index], int(self._ends[index])
            upto = min(stop, end)
            # positions counted from the shard's end, because only ends are kept
            out[at - start : upto - start] = self._mapped(shard)[shard.stop - end + at : shard.stop - end + upto]
            at, index = upto, index + 1
        return out

    def count_windows(self, context: int) -> int:
        """Windows of `context` targets that fit; a shorter rest at the end is left out."""
        return max(0, (len(self) - 1) // context)

    def windows(self, ids: NDArray[np.int64], context: int) -> NDArray[np.int64]:
        """Windows [len(ids), context + 1], int64: row i is tokens [i * context, i * context + context].

        Neighbours share one token, so every token but the line's first is a target exactly once.
        """
        out = np.empty((len(ids), context + 1), dtype=np.int64)
        for row, start in enumerate((ids * context).tolist()):
            out[row] = self.read(start, start + context + 1)
        return out

    def _mapped(self, shard: Shard) -> NDArray[Any]:
        # two threads may both map a file: the later map wins and both are right
        if shard.path not in self._maps:
            self._maps[shard.path] = map_tokens(shard.path)
        return self._maps[shard.path]
