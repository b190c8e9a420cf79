"""A task that trains in seconds: a small network on made numbers, with dropout and two weighted terms.

Options: `dropout`; `pause`, seconds a forward pass takes longer; `teacher`, to have a frozen network beside it, whose
weights TEACHER_SEED decides, as if its file had been replaced.
"""

import os
import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lwray.data.rows import Batch
from lwray.tasks.task import Split, Task


class MadeRows:
    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 8, generator=generator)
        self.y = (self.x[:, :4].sin() + self.x[:, 4:].cos()).sum(dim=1, keepdim=True)
        # some rows have no target for the second term
        self.seen = (torch.arange(count) % 3 > 0).float()

    def __len__(self) -> int:
        return len(self.x)

    def fetch(self, ids: NDArray[np.int64]) -> Batch:
        return {"x": self.x[ids], "y": self.y[ids], "seen": self.seen[ids]}


class Toy(Task):
    terms = {"fit": 1.0, "sign": 0.5}

    def rows(self, split: Split) -> Any:
        return MadeRows(50, 1) if split == "train" else MadeRows(17, 2)

    def model(self) -> nn.Module:
        torch.manual_seed(self.config.run.seed)
        p = float(self.config.task.options.get("dropout", 0.0))
        return nn.Sequential(nn.Linear(8, 31), nn.Tanh(), nn.Dropout(p), nn.Linear(31, 7), nn.Tanh(), nn.Linear(7, 2))

    def frozen(self) -> dict[str, nn.Module]:
        if not self.config.task.options.get("teacher"):
            return {}
        torch.manual_seed(int(os.environ.get("TEACHER_SEED", "1")))
        return {"teacher": nn.Linear(4, 4)}

    def weights(self, batch: Batch) -> dict[str, Tensor]:
        return {"fit": torch.ones(len(batch["x"]), dtype=torch.float64), "sign": batch["seen"].double()}

    def losses(self, model: nn.Module, batch: Batch, keys: Tensor, part: str) -> dict[str, Tensor]:
        time.sleep(float(self.config.task.options.get("pause", 0.0)))
        fit, sign = model(batch["x"]).float().split(1, dim=1)
        target = (batch["y"] > 0).float()
        return {
            "fit": (fit - batch["y"]).square().squeeze(1),
            "sign": nn.functional.binary_cross_entropy_with_logits(sign, target, reduction="none").squeeze(1)
            * batch["seen"],
        }
