"""Tasks that break a law, each in its own way."""

from typing import Any

import torch
import torch.nn.functional as F
from tests_toy import Toy
from torch import Tensor, nn

from lwray.data.rows import Batch
from lwray.tasks.task import Task


class DrawsByHistory(Toy):
    def losses(self, model: nn.Module, batch: Batch, keys: Tensor, part: str) -> dict[str, Tensor]:
        return super().losses(model, {**batch, "x": F.dropout(batch["x"], 0.1)}, keys, part)


class BatchStatistics(Toy):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


class InfiniteGradient(Toy):
    """The loss stays finite while its gradient is not, from the third step on."""

    def losses(self, model: nn.Module, batch: Batch, keys: Tensor, part: str) -> dict[str, Tensor]:
        sums = super().losses(model, batch, keys, part)
        late = getattr(self, "calls", 0) >= 3
        self.calls: int = getattr(self, "calls", 0) + 1
        return {**sums, "fit": sums["fit"] + (sums["fit"] * 0.0).abs().sqrt()} if late else sums


class NothingHeldOutCounts(Toy):
    def weights(self, batch: Batch) -> dict[str, Tensor]:
        weights = super().weights(batch)
        held_out = len(batch["x"]) and not torch.is_grad_enabled()
        return {term: w * 0.0 for term, w in weights.items()} if held_out else weights


class NoRows(Toy):
    def rows(self, split: Any) -> Any:
        return super().rows(split) if split == "val" else []


class Squeezed(Toy):
    """Forgets a squeeze: [rows, 1] would broadcast against the mask of the rows."""

    def losses(self, model: nn.Module, batch: Batch, keys: Tensor, part: str) -> dict[str, Tensor]:
        sums = super().losses(model, batch, keys, part)
        return {**sums, "fit": sums["fit"][:, None]}


class LosesATerm(Toy):
    def losses(self, model: nn.Module, batch: Batch, keys: Tensor, part: str) -> dict[str, Tensor]:
        return {"fit": super().losses(model, batch, keys, part)["fit"]}


class WeighsAnotherTerm(Toy):
    def weights(self, batch: Batch) -> dict[str, Tensor]:
        return {**super().weights(batch), "cee": super().weights(batch)["fit"]}


class Unfinished(Task):
    def rows(self, split: Any) -> Any:
        return []
