"""Law 2: which rows a step trains on, as a pure function of (seed, step), in O(1) memory.

Row k·B+i of an endless line of epochs is position i of step k; every epoch has its own permutation. The permutation is
a Feistel network over the smallest power of four that holds the rows, walked until it lands inside them
(cycle-walking: Black & Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
"""

import numpy as np
from numpy.typing import NDArray

from lwray.hashing import hash_words, mix64

ROUNDS = 8


def permute(index: NDArray[np.int64], rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Where each of `index` (values in 0…rows-1) goes in the permutation of (seed, epoch); int64, same shape."""
    half = np.uint64(max(1, ((rows - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = [np.uint64(hash_words(seed, epoch, rows, round_)) for round_ in range(ROUNDS)]

    def encipher(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = x >> half, x & mask
        for key in keys:
            left, right = right, left ^ (mix64(right ^ key) & mask)
        return (left << half) | right

    out = encipher(index.astype(np.uint64))
    while (outside := out >= np.uint64(rows)).any():
        out[outside] = encipher(out[outside])
    return out.astype(np.int64)


def rows_of_step(step: int, batch_rows: int, rows: int, seed: int) -> NDArray[np.int64]:
    """The row ids of a step in the order of their positions: int64, shape [batch_rows].

    A step that straddles an epoch takes the rest from the next epoch's order; nothing is dropped.
    """
    position = step * batch_rows + np.arange(batch_rows, dtype=np.int64)
    epochs = position // rows
    ids = np.empty_like(position)
    for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
        inside = epochs == epoch
        ids[inside] = permute(position[inside] % rows, rows, seed, epoch)
    return ids
