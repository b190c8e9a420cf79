"""Law 1: the loss of a step is a weighted sum over the global batch, never a mean of means."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lwray.engine.feed import MicroBatch
from lwray.tasks.task import Task


class Objective:
    """Sums of the terms over a step's micro-steps, divided by the weights of the global batch."""

    def __init__(self, task: Task, weights: Mapping[str, float], device: torch.device) -> None:
        self.task = task
        # a term whose weight is zero has no rows: its sum is zero whatever it is divided by
        self.factors = {term: c / (weights[term] or 1.0) for term, c in task.terms.items()}
        self.total = torch.zeros(len(task.terms), device=device)

    def share(self, sums: Mapping[str, Tensor], micro: MicroBatch) -> Tensor:
        """This micro-step's share of the loss, to go backward from; also added to `total`."""
        group = self.task.row_group
        shares = {
            term: self.factors[term] * micro.masked_sum(by_row, group, f"losses()[{term!r}]")
            for term, by_row in sums.items()
        }
        with torch.no_grad():
            for index, term in enumerate(self.task.terms):
                if term in shares:
                    self.total[index] += shares[term]
        return torch.stack(list(shares.values())).sum()
