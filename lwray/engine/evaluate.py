"""The loss over the held-out rows: each once, exact at any number of workers."""

import math
from collections.abc import Callable

import torch

from lwray.data.deal import Deal
from lwray.data.rows import Rows
from lwray.engine.backends import Backend
from lwray.engine.feed import held_out, passes
from lwray.engine.world import World
from lwray.errors import Diverged, RunFailed
from lwray.tasks.task import Task


@torch.no_grad()
def evaluate(backend: Backend, task: Task, rows: Rows, deal: Deal, world: World, passed: Callable[[], None]) -> float:
    """Coefficient x (sum over the held-out rows) / (their weight), summed over the terms; the same on every rank.

    `passed` is called after each pass over some rows.
    Raises Diverged where it is not a number, RunFailed where no row counts.
    """
    backend.module.eval()
    terms = list(task.terms)
    # sums in float64, so that the order in which ranks add up is not seen
    sums = torch.zeros(2, len(terms), dtype=torch.float64, device=world.device)
    for step_rows in held_out(task, rows, deal, world.rank):
        sums[1] += torch.tensor([step_rows.weights[t] for t in terms], dtype=torch.float64).to(world.device)
        for micro, part, _ in passes(step_rows, task.parts, world.device):
            for term, by_row in backend(micro.batch, micro.keys, part).items():
                sums[0, terms.index(term)] += micro.masked_sum(by_row.double(), task.row_group, f"losses()[{term!r}]")
            passed()
    backend.module.train()
    totals, weights = world.sum(sums).tolist()
    if not any(weights):
        raise RunFailed("The held-out rows have no weight in any term of the loss: hold out rows that have a target.")
    by_term = zip(task.terms.values(), totals, weights, strict=True)
    loss = float(sum(c * s / (w or 1.0) for c, s, w in by_term))
    if not math.isfinite(loss):
        raise Diverged(f"The validation loss is {loss}: training has diverged. Lower optim.lr, under another run.name.")
    return loss
