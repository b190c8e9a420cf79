"""Law 5: ranks decide together, by one small reduction a step on the CPU group.

It is started at the beginning of a step and read at its end, so that no device is waited for.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from lwray.engine.world import World


class Agreement:
    """Sums of named numbers over all ranks: float64, so that counts are exact."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._names: list[str] = []
        self._values = torch.empty(0)
        self._work: Any = None

    def begin(self, values: Mapping[str, float]) -> None:
        """Start summing; every rank names the same values in the same order."""
        self._names = list(values)
        self._values = torch.tensor(list(values.values()), dtype=torch.float64)
        if self.world.size > 1:
            self._work = dist.all_reduce(self._values, group=self.world.cpu_group, async_op=True)

    def end(self) -> dict[str, float]:
        """The sums, the same on every rank."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return dict(zip(self._names, self._values.tolist(), strict=True))
