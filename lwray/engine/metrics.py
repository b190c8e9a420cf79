"""One metrics line a logged step, written one step late so that no device is waited for."""

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lwray.engine.objective import Objective
from lwray.engine.world import World
from lwray.errors import Diverged
from lwray.tasks.task import Task
from lwray.tracking.journal import Journal


@dataclass(frozen=True, slots=True)
class _Pending:
    step: int
    lr: float
    losses: Tensor
    norm: Tensor
    timing: dict[str, float]


class StepMetrics:
    """Collects what a step was; rank 0 writes it. `loss` is the last loss read."""

    def __init__(self, task: Task, world: World, journal: Journal | None, batch_rows: int) -> None:
        self.task, self.world, self.journal = task, world, journal
        self.batch_rows = batch_rows
        self.loss: float | None = None
        self._pending: _Pending | None = None
        self._since = time.perf_counter()
        self._steps = 0
        self._waited = 0.0

    def waited(self, seconds: float) -> None:
        """Time that the loop spent waiting for data."""
        self._waited += seconds

    def paused(self, seconds: float) -> None:
        """Time that was not training (an evaluation, a checkpoint) leaves the throughput alone."""
        self._since += seconds

    def step(self, step: int, lr: float, objective: Objective, norm: Tensor, *, logged: bool) -> None:
        """After the update of `step`: reduce its loss over the ranks, write the line of the one before."""
        self._steps += 1
        self.flush()
        if logged:
            self._pending = _Pending(step, lr, self.world.sum(objective.total.clone()), norm, self._timing())

    def flush(self) -> None:
        """Write the line that is waiting. Raises Diverged where loss or gradient are not finite."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        terms = dict(zip(self.task.terms, pending.losses.tolist(), strict=True))
        self.loss, norm = sum(terms.values()), float(pending.norm)
        if self.journal is not None:
            by_term = {f"loss/{term}": value for term, value in terms.items()} if len(terms) > 1 else {}
            line: dict[str, Any] = {"step": pending.step, "loss": self.loss, "lr": pending.lr}
            self.journal.metrics(**line, grad_norm=norm, **pending.timing, **by_term)
        if not (math.isfinite(self.loss) and math.isfinite(norm)):
            raise Diverged(
                f"The loss of step {pending.step} is {self.loss}, its gradient norm {norm}: training has diverged, "
                "and it was not committed. "
                "Lower optim.lr or lengthen optim.warmup_steps, under another run.name or with --fresh."
            )

    def _timing(self) -> dict[str, float]:
        now = time.perf_counter()
        seconds = max(1e-9, now - self._since)
        rows = self.batch_rows * self._steps / seconds
        timing = {
            "time": time.time(),
            "samples_per_second": rows,
            "step_seconds": seconds / self._steps,
            "data_wait_share": self._waited / seconds,
        }
        if self.task.unit == "tokens":
            timing["tokens_per_second"] = rows * self.task.units_per_row()
        if self.world.device.type == "cuda":
            timing["memory_allocated_gb"] = torch.cuda.memory_allocated() / 1e9
            timing["memory_reserved_gb"] = torch.cuda.memory_reserved() / 1e9
        self._since, self._steps, self._waited = now, 0, 0.0
        return timing
