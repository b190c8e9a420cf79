"""Law 1: the loss and the gradients of a global batch do not depend on how it is dealt."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from lwray.config import Config
from lwray.data.deal import Deal, deal_batch
from lwray.data.order import rows_of_step
from lwray.data.rows import Batch
from lwray.engine.feed import cut_rows, passes
from lwray.engine.module import LossModule
from lwray.engine.objective import Objective
from lwray.models.draws import uniform, use_row_dropout
from lwray.tasks.find import find_task
from lwray.tasks.task import Split, Task

torch.set_num_threads(1)
CPU = torch.device("cpu")
ROWS = 12
STEP = 3
Toy = find_task(f"{Path(__file__).parent / 'tasks' / 'toy.py'}:Toy")


class Unseen(Toy):  # type: ignore[misc, valid-type]
    """The second term has no target in the whole batch."""

    def rows(self, split: Split) -> Any:
        rows = super().rows(split)
        rows.seen.zero_()
        return rows


class PairRows:
    def __len__(self) -> int:
        return 40

    def fetch(self, ids: NDArray[np.int64]) -> Batch:
        at = torch.from_numpy(ids).double()[:, None]
        return {"x": (at * torch.arange(1, 9)).sin().float()}


class Pairs(Task):
    """A loss over groups of two rows and one over single rows with a draw of its own, each in a pass of its own."""

    terms = {"apart": 1.0, "noise": 0.3}
    row_group = 2
    parts = ("groups", "rows")

    def rows(self, split: Split) -> PairRows:
        return PairRows()

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 5), nn.Dropout(0.25), nn.Tanh(), nn.Linear(5, 3))

    def weights(self, batch: Batch) -> dict[str, Tensor]:
        rows = len(batch["x"])
        by_row = 1.0 + (batch["x"][:, 0] > 0).double()
        return {"apart": torch.ones(rows // 2, dtype=torch.float64), "noise": by_row}

    def losses(self, model: nn.Module, batch: Batch, keys: Tensor, part: str) -> dict[str, Tensor]:
        out = model(batch["x"])
        if part == "groups":
            return {"apart": (out[::2] - out[1::2]).square().sum(dim=1)}
        by_row = 1.0 + (batch["x"][:, 0] > 0).float()
        return {"noise": (out - uniform(keys, 99, (3,))).square().sum(dim=1) * by_row}


TASKS: dict[str, type[Task]] = {"toy": Toy, "unseen": Unseen, "pairs": Pairs}


def step_of(task_type: type[Task], deal: Deal) -> tuple[Tensor, Tensor, list[int]]:
    """All ranks' shares of one step, added up: the terms (float64), the gradient of all parameters, the row ids."""
    config = Config.model_validate({"task": {"options": {"dropout": 0.3}}, "run": {"seed": 2}})
    task = task_type(config, None)
    network = task.model()
    module = LossModule(task, network, use_row_dropout(network), None).train()
    rows = task.rows("train")
    row_ids = rows_of_step(STEP, deal.rows, len(rows), 2)
    ranks = [cut_rows(task, rows, row_ids, deal, rank, 2, STEP) for rank in range(deal.workers)]
    weights = {term: sum(rank.weights[term] for rank in ranks) for term in task.terms}
    terms = torch.zeros(len(task.terms), dtype=torch.float64)
    for rank in ranks:
        objective = Objective(task, weights, CPU)
        shares = []
        for micro, part, _ in passes(rank, task.parts, CPU):
            assert all(len(tensor) == deal.micro_rows for tensor in micro.batch.values())
            share = objective.share(module(micro.batch, micro.keys, part), micro)
            share.backward()  # type: ignore[no-untyped-call]
            shares.append(float(share.detach()))
        assert sum(shares) == pytest.approx(float(objective.total.sum()), rel=1e-5, abs=1e-9)
        terms += objective.total.double()
    gradients = [parameter.grad for parameter in network.parameters()]
    assert all(gradient is not None for gradient in gradients), "padding must not keep a parameter from a gradient"
    gradient = torch.cat([each.flatten() for each in gradients if each is not None])
    return terms, gradient, [row for rank in ranks for row in rank.ids]


def alone(task_type: type[Task]) -> tuple[Tensor, Tensor, list[int]]:
    return step_of(task_type, Deal(ROWS, task_type.row_group, 1, ROWS))


def assert_same(task_type: type[Task], deal: Deal) -> None:
    terms, gradient, ids = step_of(task_type, deal)
    whole_terms, whole_gradient, whole_ids = alone(task_type)
    assert ids == whole_ids
    torch.testing.assert_close(terms, whole_terms, rtol=1e-6, atol=0)
    assert float((gradient - whole_gradient).norm() / whole_gradient.norm()) < 1e-6


@pytest.mark.parametrize("micro_rows", [1, 2, 3, 5, 12])
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", ["toy", "unseen"])
def test_loss_and_gradient_of_twelve_rows_are_the_same_on_any_workers_and_micro_batches(
    name: str, workers: int, micro_rows: int
) -> None:
    # not through deal_batch: a micro-batch larger than the share is all padding behind it
    assert_same(TASKS[name], Deal(ROWS, 1, workers, micro_rows))


@pytest.mark.parametrize("micro_rows", [2, 4, 6, 8, 12])
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
def test_they_are_with_row_groups_several_passes_and_draws_of_the_task(workers: int, micro_rows: int) -> None:
    assert_same(Pairs, Deal(ROWS, 2, workers, micro_rows))


@settings(max_examples=30)
@given(rows=st.integers(1, 30), workers=st.integers(1, 7), micro=st.integers(1, 9))
def test_they_are_for_any_global_batch(rows: int, workers: int, micro: int) -> None:
    deal = deal_batch(rows, 1, min(workers, rows), micro, "auto", 1)
    terms, gradient, ids = step_of(Toy, deal)
    whole_terms, whole_gradient, whole_ids = step_of(Toy, Deal(rows, 1, 1, rows))
    assert ids == whole_ids
    torch.testing.assert_close(terms, whole_terms, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(gradient, whole_gradient, rtol=1e-5, atol=1e-6)


def test_the_loss_is_a_weighted_mean_over_the_batch_and_no_mean_of_means() -> None:
    """Against the definition, written out: coefficient x sum / weight, over the rows that count."""
    config = Config.model_validate({"run": {"seed": 2}})
    task = Toy(config, None)
    rows = task.rows("train")
    batch = rows.fetch(rows_of_step(STEP, ROWS, len(rows), 2))
    with torch.no_grad():
        sums = task.losses(task.model(), batch, torch.zeros(ROWS, dtype=torch.int64), "all")
    seen = float(batch["seen"].sum())
    assert 0 < seen < ROWS
    expected = float(sums["fit"].sum()) / ROWS + 0.5 * float(sums["sign"].sum()) / seen

    network = task.model()
    module = LossModule(task, network, use_row_dropout(network), None)
    total = 0.0
    deal = Deal(ROWS, 1, 5, 2)
    for rank in range(5):
        step_rows = cut_rows(task, rows, rows_of_step(STEP, ROWS, len(rows), 2), deal, rank, 2, STEP)
        objective = Objective(task, {"fit": ROWS, "sign": seen}, CPU)
        for micro, part, _ in passes(step_rows, task.parts, CPU):
            objective.share(module(micro.batch, micro.keys, part), micro)
        total += float(objective.total.sum())
    assert total == pytest.approx(expected, rel=1e-6)


def test_a_term_without_any_weight_is_zero_loss_and_a_finite_zero_gradient() -> None:
    terms, gradient, _ = alone(Unseen)
    assert float(terms[0]) > 0
    assert float(terms[1]) == 0
    assert bool(gradient.isfinite().all())
    # the last layer's second output serves that term alone
    assert gradient[-1] == 0
    assert gradient[-2] != 0
    assert bool((gradient[-2 - 7 : -2] == 0).all())


def test_weights_add_up_over_ranks_to_those_of_the_batch_without_padding() -> None:
    task = Toy(Config(), None)
    rows: Any = task.rows("train")
    ids = np.arange(ROWS)
    deal = Deal(ROWS, 1, 5, 2)
    parts: Sequence[dict[str, float]] = [cut_rows(task, rows, ids, deal, rank, 0, 0).weights for rank in range(5)]
    assert sum(each["fit"] for each in parts) == ROWS
    assert sum(each["sign"] for each in parts) == float(rows.seen[:ROWS].sum()) == 8
