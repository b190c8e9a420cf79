"""What a task trains on: rows that are fetched by id, in any order, by any worker."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from lwray.data.shards import Shard, TokenStream

Batch = dict[str, torch.Tensor]
"""Tensors by name on the CPU; the first dimension of each is the row."""


class Rows(Protocol):
    """A finite data set whose rows have the ids 0…len-1. `fetch` is called from loader threads."""

    def __len__(self) -> int: ...

    def fetch(self, ids: NDArray[np.int64]) -> Batch:
        """The rows of `ids`, in that order."""
        ...


class TokenWindows:
    """Windows of `context` tokens, each with the token after it: every token but the first is predicted once."""

    def __init__(self, shards: Sequence[Shard], context: int, limit: int = 0) -> None:
        self.stream = TokenStream(shards)
        self.context = context
        windows = self.stream.count_windows(context)
        self._len = min(limit, windows) if limit else windows

    def __len__(self) -> int:
        return self._len

    def fetch(self, ids: NDArray[np.int64]) -> Batch:
        """`tokens` and `targets`, int64 [rows, context]."""
        windows = torch.from_numpy(self.stream.windows(ids, self.context))
        return {"tokens": windows[:, :-1].contiguous(), "targets": windows[:, 1:].contiguous()}
