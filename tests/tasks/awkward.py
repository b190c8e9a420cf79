"""A task with what breaks naive loops: groups of rows, two passes, a layer no loss reaches, batches without target."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lwray.data.rows import Batch
from lwray.tasks.task import Split, Task


class Rows:
    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(count)
        self.x = torch.randn(count, 6, generator=generator)
        # only two rows of all have a target for `rare`: most global batches, and most ranks, have none
        self.rare = torch.zeros(count)
        self.rare[[3, 7]] = 1.0

    def __len__(self) -> int:
        return len(self.x)

    def fetch(self, ids: NDArray[np.int64]) -> Batch:
        return {"x": self.x[ids], "rare": self.rare[ids]}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(6, 12)
        self.left = nn.Linear(12, 3)
        self.right = nn.Linear(12, 5)
        self.rare = nn.Linear(12, 1)
        self.unreached = nn.Linear(12, 4)


class Awkward(Task):
    terms = {"left": 1.0, "right": 0.7, "rare": 0.3, "pairs": 0.1}
    parts = ("first", "second")
    row_group = 2

    def rows(self, split: Split) -> Any:
        return Rows(40) if split == "train" else Rows(13)

    def model(self) -> nn.Module:
        torch.manual_seed(self.config.run.seed)
        return Network()

    def weights(self, batch: Batch) -> dict[str, Tensor]:
        rows = torch.ones(len(batch["x"]), dtype=torch.float64)
        return {"left": rows, "right": rows, "rare": batch["rare"].double(), "pairs": rows[::2]}

    def losses(self, model: nn.Module, batch: Batch, keys: Tensor, part: str) -> dict[str, Tensor]:
        assert isinstance(model, Network)
        hidden = torch.tanh(model.shared(batch["x"]))
        if part == "first":
            left = model.left(hidden).float()
            pairs = nn.functional.cosine_similarity(left[::2], left[1::2])
            return {"left": (left - batch["x"][:, :3]).square().sum(1), "pairs": pairs}
        right = model.right(hidden).float()
        rare = model.rare(hidden).float().squeeze(1)
        return {"right": (right - batch["x"][:, 1:]).square().sum(1), "rare": rare.square() * batch["rare"]}
