"""Rows of a step on their way to the model: fetched ahead in threads, dealt to micro-batches, padded to one shape."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lwray.data.deal import Deal
from lwray.data.order import rows_of_step
from lwray.data.rows import Batch, Rows
from lwray.errors import RunFailed
from lwray.models.draws import row_keys
from lwray.tasks.task import Task

AHEAD = 3
"""Steps in flight: the one that trains, the one whose weights are being agreed on, one more being read."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one forward pass, always `micro_rows` of them; where `valid` (bool [rows]) is false a row only pads."""

    batch: Batch
    keys: Tensor
    valid: Tensor

    def to(self, device: torch.device) -> "MicroBatch":
        batch = {name: tensor.to(device, non_blocking=True) for name, tensor in self.batch.items()}
        return MicroBatch(batch, self.keys.to(device), self.valid.to(device))

    def masked_sum(self, by_row: Tensor, row_group: int, what: str) -> Tensor:
        """Sum of a term over the rows that count; `by_row` is [rows], or [rows / row_group].

        Raises RunFailed, naming `what`, for any other shape: it would broadcast to another sum.
        """
        rows = len(self.valid)
        if by_row.shape == (rows,):
            return torch.where(self.valid, by_row, 0.0).sum()
        if by_row.shape == (rows // row_group,):
            return torch.where(self.valid[::row_group], by_row, 0.0).sum()
        groups = f" or [{rows // row_group}] (by group)" if row_group > 1 else ""
        raise RunFailed(f"The task's {what} has shape {list(by_row.shape)}; it must be [{rows}] (by row){groups}.")


@dataclass(frozen=True, slots=True)
class StepRows:
    """What one rank trains on in one step: micro-batches, the ids of the rows that count, their weight by term."""

    micro_batches: tuple[MicroBatch, ...]
    ids: tuple[int, ...]
    weights: dict[str, float]


def cut_rows(task: Task, rows: Rows, ids: NDArray[np.int64], deal: Deal, rank: int, seed: int, step: int) -> StepRows:
    """This rank's micro-batches of the rows `ids` (int64 [deal.rows], in the order of positions)."""
    micro_batches = []
    weights = dict.fromkeys(task.terms, 0.0)
    for positions in deal.micro_batches(rank):
        # a micro-batch that is short is filled up with the step's first row: one shape, and no rank without a forward
        padded = np.zeros(deal.micro_rows, dtype=np.int64)
        padded[: len(positions)] = positions
        batch = rows.fetch(ids[padded])
        valid = torch.arange(deal.micro_rows) < len(positions)
        micro = MicroBatch(batch, row_keys(seed, step, torch.from_numpy(padded)), valid)
        by_term = task.weights(batch)
        check_terms("weights", by_term, task)
        for term, by_row in by_term.items():
            weights[term] += float(micro.masked_sum(by_row, task.row_group, f"weights()[{term!r}]"))
        micro_batches.append(micro)
    share = deal.share(rank)
    return StepRows(tuple(micro_batches), tuple(ids[share.start : share.stop].tolist()), weights)


def check_terms(method: str, given: Iterable[str], task: Task) -> None:
    """Raises RunFailed where a method of the task gives other terms than `terms` names."""
    if differing := sorted(set(given) ^ set(task.terms)):
        raise RunFailed(
            f"The task's terms are {', '.join(task.terms)}, and {method}() differs in {', '.join(differing)}: "
            "every term of `terms` needs a weight and a loss, and no other."
        )


class Feed:
    """Steps of training rows, read ahead of the loop by threads."""

    def __init__(
        self, task: Task, rows: Rows, deal: Deal, rank: int, seed: int, first_step: int, total_steps: int
    ) -> None:
        self.task, self.rows, self.deal, self.rank = task, rows, deal, rank
        self.seed, self.total_steps = seed, total_steps
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="feed")
        self._ahead: dict[int, Future[StepRows]] = {}
        self._next = first_step

    def take(self, step: int) -> StepRows:
        """The rows of `step`; waits if they are not there yet. Steps are taken once, in order."""
        self._read_up_to(step + AHEAD)
        return self._ahead.pop(step).result()

    def peek(self, step: int) -> StepRows:
        """The rows of `step`, which stay to be taken."""
        self._read_up_to(step + 1)
        return self._ahead[step].result()

    def weights(self, step: int) -> dict[str, float]:
        """This rank's weights by term of a step that has not been taken; none past the last step."""
        if step >= self.total_steps:
            return dict.fromkeys(self.task.terms, 0.0)
        return self.peek(step).weights

    def close(self) -> None:
        """Drop what was read ahead and end the threads."""
        self._pool.shutdown(cancel_futures=True)

    def _read_up_to(self, stop: int) -> None:
        while self._next < min(stop, self.total_steps):
            self._ahead[self._next] = self._pool.submit(self._make, self._next)
            self._next += 1

    def _make(self, step: int) -> StepRows:
        ids = rows_of_step(step, self.deal.rows, len(self.rows), self.seed)
        return cut_rows(self.task, self.rows, ids, self.deal, self.rank, self.seed, step)


def held_out(task: Task, rows: Rows, deal: Deal, rank: int) -> Iterator[StepRows]:
    """The held-out rows in order, each once, in chunks dealt like a training step; the last chunk may be smaller."""
    chunk = deal.micro_rows * deal.workers
    for start in range(0, len(rows), chunk):
        ids = np.arange(start, min(start + chunk, len(rows)), dtype=np.int64)
        ids = ids[: len(ids) // task.row_group * task.row_group]
        if len(ids):
            yield cut_rows(task, rows, ids, Deal(len(ids), deal.group, deal.workers, deal.micro_rows), rank, 0, 0)


def passes(step_rows: StepRows, parts: Sequence[str], device: torch.device) -> Iterator[tuple[MicroBatch, str, bool]]:
    """(micro-batch on the device, part, whether it is the step's last forward and backward)."""
    last_index = len(step_rows.micro_batches) - 1
    for index, micro in enumerate(step_rows.micro_batches):
        on_device = micro.to(device)
        for part in parts:
            yield on_device, part, index == last_index and part == parts[-1]
