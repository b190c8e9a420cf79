"""Parameters that no term of the loss can reach are frozen before any backend sees them, and named."""

import numpy as np
import torch
from torch import Tensor, nn

from lwray.data.deal import Deal
from lwray.data.order import rows_of_step
from lwray.data.rows import Rows
from lwray.engine.feed import check_terms, cut_rows, passes
from lwray.engine.module import LossModule
from lwray.engine.objective import Objective
from lwray.engine.world import World
from lwray.errors import RunFailed
from lwray.tasks.task import Task


def freeze_unreachable(module: LossModule, task: Task, rows: Rows, world: World, seed: int) -> list[str]:
    """One backward from the run's first row group finds them; the same rows, hence the same answer, on every rank.

    Raises RunFailed where the loss draws from a generator: its history is not a function of (seed, step, row).
    """
    deal = Deal(task.row_group, task.row_group, 1, task.row_group)
    first: np.ndarray[tuple[int], np.dtype[np.int64]] = rows_of_step(0, task.row_group, len(rows), seed)
    step_rows = cut_rows(task, rows, first, deal, 0, seed, 0)
    before = generator_states()
    objective = Objective(task, step_rows.weights, world.device)
    seen: set[str] = set()
    for micro, part, last in passes(step_rows, task.parts, world.device):
        sums = module(micro.batch, micro.keys, part)
        seen |= set(sums)
        if last or seen - set(task.terms):
            check_terms("losses", seen, task)
        objective.share(sums, micro).backward()  # type: ignore[no-untyped-call]
    if any(not a.equal(b) for a, b in zip(before, generator_states(), strict=True)):
        raise RunFailed(
            "The loss draws from torch's random generator, whose history depends on workers and restarts (law 3). Use "
            "nn.Dropout instead of F.dropout, and lwray.models.draws.uniform(keys, place, shape) for draws of your own."
        )
    unreachable = [n for n, p in module.network.named_parameters() if p.requires_grad and p.grad is None]
    _freeze(module.network, unreachable)
    module.zero_grad(set_to_none=True)
    return unreachable


def generator_states() -> list[Tensor]:
    """States of torch's global generators, on the CPU and on the devices in use."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *devices]


def _freeze(network: nn.Module, names: list[str]) -> None:
    named = dict(network.named_parameters())
    for name in names:
        named[name].requires_grad_(False)
