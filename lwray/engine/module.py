"""The module that a backend wraps: a task's losses around its network, in the run's precision."""

import torch
from torch import Tensor, nn

from lwray.data.rows import Batch
from lwray.models.draws import RowKeys
from lwray.tasks.task import Task


class LossModule(nn.Module):
    """(batch, keys, part) to the sums of the part's terms by row. Its only child is the task's network."""

    def __init__(self, task: Task, network: nn.Module, dropout: RowKeys, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.network = network
        self._task = task
        self._dropout = dropout
        self._autocast = autocast

    def forward(self, batch: Batch, keys: Tensor, part: str) -> dict[str, Tensor]:
        self._dropout.current = keys
        with torch.autocast(keys.device.type, self._autocast, enabled=self._autocast is not None):
            return self._task.losses(self.network, batch, keys, part)
