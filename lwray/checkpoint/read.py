"""Read any range of any tensor of a checkpoint."""

import torch
from torch import Tensor

from lwray.checkpoint.manifest import read_manifest
from lwray.store import Store


class Reader:
    """Tensors of one checkpoint; only what is asked for is read. Raises ValueError as read_manifest does."""

    def __init__(self, store: Store, name: str) -> None:
        self.store, self.name = store, name
        self.manifest = read_manifest(store, name)

    def keys(self, kind: str) -> list[str]:
        """The plain names of the tensors of a kind (`param`, `exp_avg`, …)."""
        return [key.partition("/")[2] for key in self.manifest.tensors if key.partition("/")[0] == kind]

    def whole(self, key: str) -> Tensor:
        """The tensor `kind/name` in its own shape."""
        entry = self.manifest.tensors[key]
        return self.range(key, 0, torch.Size(entry.shape).numel()).view(entry.shape)

    def range(self, key: str, start: int, length: int) -> Tensor:
        """Elements [start, start + length) of the flattened tensor. Raises KeyError for an unknown tensor."""
        entry = self.manifest.tensors[key]
        out = torch.empty(length, dtype=getattr(torch, entry.dtype))
        for piece in entry.pieces:
            low, high = max(start, piece.start), min(start + length, piece.start + piece.length)
            if low < high:
                first = piece.offset + (low - piece.start) * out.itemsize
                data = self.store.read(f"{self.name}/{piece.file}", first, first + (high - low) * out.itemsize)
                out[low - start : high - start] = torch.frombuffer(bytearray(data), dtype=out.dtype)
        return out
