"""What one rank holds of the state, and how it lies in that rank's safetensors file."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lwray.checkpoint.manifest import DTYPES, FileEntry, Piece, TensorEntry
from lwray.errors import RunFailed

CODES = {getattr(torch, name): code for name, (code, _) in DTYPES.items()}
"""What a checkpoint can hold, and the safetensors format's name for it."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements [start, start + len(data)) of the flattened tensor `key` (`kind/name`); `data` is a 1-D view."""

    key: str
    start: int
    data: Tensor
    shape: tuple[int, ...]
    """Shape of the whole tensor."""

    @classmethod
    def whole(cls, key: str, tensor: Tensor) -> "Fragment":
        """All of a tensor, written by one rank alone."""
        return cls(key, 0, tensor.detach().reshape(-1), tuple(tensor.shape))


def shares(sizes: Sequence[int], rank: int, ranks: int) -> Iterator[tuple[int, int, int]]:
    """What `rank` writes of tensors that all `ranks` hold: (index, start, stop), an equal range of their elements.

    A tensor without elements has none to miss, but its name belongs to the state: rank 0 writes it.
    """
    total = sum(sizes)
    low, high = total * rank // ranks, total * (rank + 1) // ranks
    before = 0
    for index, size in enumerate(sizes):
        start, stop = max(low, before) - before, min(high, before + size) - before
        if start < stop or (size == 0 and rank == 0):
            yield index, start if size else 0, stop if size else 0
        before += size


@dataclass(frozen=True, slots=True)
class Layout:
    """A rank's file: `prefix` (the safetensors header), then the data of `fragments`, one behind the other."""

    prefix: bytes
    fragments: tuple[Fragment, ...]
    offsets: tuple[int, ...]
    """The byte of the file where each fragment's data begins."""
    size: int
    """Bytes of the file."""

    @property
    def pieces(self) -> tuple["WrittenPiece", ...]:
        return tuple(
            WrittenPiece(f.key, f.shape, str(f.data.dtype).removeprefix("torch."), f.start, f.data.numel(), offset)
            for f, offset in zip(self.fragments, self.offsets, strict=True)
        )

    def chunks(self) -> Iterator[bytes | memoryview]:
        """The file's bytes, straight from the tensors (by way of host memory for those on a device)."""
        yield self.prefix
        for fragment in self.fragments:
            if fragment.data.numel():
                yield fragment.data.cpu().contiguous().view(torch.uint8).numpy().data


def lay_out(fragments: Iterable[Fragment]) -> Layout:
    """Wide dtypes first and the header padded to 8 bytes, so that every fragment begins at a multiple of its width.

    Raises RunFailed, by name, for a dtype that the format does not have.
    """
    held = tuple(sorted((f for f in fragments if f.data.numel() or 0 in f.shape), key=lambda f: -f.data.itemsize))
    header, ends = {}, 0
    begins = []
    for fragment in held:
        if fragment.data.dtype not in CODES:
            raise RunFailed(f"{fragment.key} is of {fragment.data.dtype}, which a checkpoint cannot hold.")
        begins.append(ends)
        ends += fragment.data.numel() * fragment.data.itemsize
        header[fragment.key] = {
            "dtype": CODES[fragment.data.dtype],
            "shape": [fragment.data.numel()],
            "data_offsets": [begins[-1], ends],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    prefix = len(text).to_bytes(8, "little") + text
    return Layout(prefix, held, tuple(len(prefix) + begin for begin in begins), len(prefix) + ends)


@dataclass(frozen=True, slots=True)
class WrittenPiece:
    """A fragment as the manifest will name it; `length` in elements, `offset` in bytes of the file."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    length: int
    offset: int


@dataclass(frozen=True, slots=True)
class Part:
    """What a writer tells the one that commits: its file, and where its fragments lie."""

    file: str
    entry: FileEntry
    pieces: tuple[WrittenPiece, ...]


def tensor_index(parts: Sequence[Part]) -> dict[str, TensorEntry]:
    """Where each tensor lies over all parts. Raises ValueError where the pieces do not make the whole."""
    found: dict[str, list[Piece]] = {}
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    for part in parts:
        for piece in part.pieces:
            found.setdefault(piece.key, []).append(Piece(part.file, piece.start, piece.length, piece.offset))
            shapes[piece.key] = (piece.shape, piece.dtype)
    index = {}
    for key, pieces in found.items():
        shape, dtype = shapes[key]
        pieces.sort(key=lambda each: each.start)
        end = 0
        for held in pieces:
            if held.start != end:
                raise ValueError(f"{key}: elements {end} to {held.start} were written by nobody, or twice")
            end += held.length
        if end != torch.Size(shape).numel():
            raise ValueError(f"{key}: {end} of {torch.Size(shape).numel()} elements were written")
        index[key] = TensorEntry(shape, dtype, tuple(pieces))
    return index
