"""64-bit hashes of integers, for orders and draws that must be pure functions."""

import numpy as np
from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The splitmix64 finaliser (Steele, Lea & Flood, 2014): a bijection on 64-bit integers, elementwise."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hash_words(*words: int) -> int:
    """One 64-bit hash of several integers, dependent on their order."""
    state = np.array([_GAMMA])
    for word in words:
        state = mix64(state ^ np.uint64(word & 0xFFFFFFFFFFFFFFFF)) + _GAMMA
    return int(mix64(state)[0])
