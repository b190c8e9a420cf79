"""A task whose rows are all the same, so that a step depends on the state alone and not on which rows it sees."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lwray.data.rows import Batch
from lwray.tasks.task import Split, Task


class SameRows:
    def __len__(self) -> int:
        return 16

    def fetch(self, ids: NDArray[np.int64]) -> Batch:
        return {"x": torch.linspace(-1, 1, 4).expand(len(ids), 4)}


class Network(nn.Module):
    """A frozen base, what is trained, a buffer that is saved, and a layer that no loss reaches."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.up = nn.Linear(4, width)
        self.down = nn.Linear(width, 2)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("scale", torch.tensor([1.5]))


class Constant(Task):
    def rows(self, split: Split) -> Any:
        return SameRows()

    def model(self) -> nn.Module:
        torch.manual_seed(self.config.run.seed)
        return Network(int(self.config.task.options.get("width", 5)))

    def losses(self, model: nn.Module, batch: Batch, keys: Tensor, part: str) -> dict[str, Tensor]:
        assert isinstance(model, Network)
        out = model.down(torch.tanh(model.up(model.base(batch["x"])))) * model.scale
        return {"loss": (out.float() - torch.tensor([0.7, -0.3])).square().sum(1)}
