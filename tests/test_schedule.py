"""Law 3: the learning rate is a pure function of the step."""

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from lwray.config.schema import OptimSection
from lwray.engine.schedule import make_schedule

SHAPES = ["cosine", "linear", "wsd", "onecycle", "constant"]


def optim(**keys: object) -> OptimSection:
    return OptimSection.model_validate({"lr": 0.01, "warmup_steps": 0, **keys})


def rates(total: int, **keys: object) -> list[float]:
    schedule = make_schedule(optim(**keys), total)
    return [schedule(step) for step in range(total)]


@pytest.mark.parametrize("total", [20, 51, 333])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5, 1.0])
@pytest.mark.parametrize(("div", "final_div"), [(25.0, 1e4), (10.0, 100.0)])
def test_one_cycle_is_torchs_at_every_step(total: int, share: float, div: float, final_div: float) -> None:
    warmup = round(share * total)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.01)
    torchs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.01, total_steps=total, pct_start=warmup / total, div_factor=div, final_div_factor=final_div
    )
    expected = torchs.get_last_lr()
    for _ in range(total - 1):
        optimizer.step()
        torchs.step()
        expected += torchs.get_last_lr()
    ours = rates(total, schedule="onecycle", warmup_steps=warmup, onecycle_div=div, onecycle_final_div=final_div)
    assert ours == pytest.approx(expected, rel=1e-9, abs=1e-15)


def test_one_cycle_goes_from_a_25th_over_the_peak_to_a_250000th() -> None:
    got = rates(100, schedule="onecycle", warmup_steps="30%")
    assert got[0] == pytest.approx(0.01 / 25)
    assert got[29] == pytest.approx(0.01)
    assert got[-1] == pytest.approx(0.01 / 25 / 1e4)


def test_one_cycle_with_one_step_of_warm_up_starts_at_the_peak_where_torch_divides_by_zero() -> None:
    got = rates(10, schedule="onecycle", warmup_steps=1)
    assert got[0] == pytest.approx(0.01)
    assert got[-1] == pytest.approx(0.01 / 25 / 1e4)


@pytest.mark.parametrize("shape", ["cosine", "linear", "wsd"])
@given(total=st.integers(3, 400), warmup=st.integers(0, 100), final=st.floats(0.0, 1.0))
def test_a_decay_ends_at_its_final_rate_at_the_last_step(shape: str, total: int, warmup: int, final: float) -> None:
    warmup = min(warmup, total - 2)
    got = rates(total, schedule=shape, warmup_steps=warmup, final_lr=final, decay_steps="30%" if total > 3 else 1)
    assert got[-1] == pytest.approx(0.01 * final, abs=1e-12)
    assert max(got) <= 0.01 * (1 + 1e-12)
    if shape != "wsd":
        assert got[warmup] == pytest.approx(0.01)


@given(
    shape=st.sampled_from(SHAPES),
    total=st.integers(1, 300),
    warmup=st.one_of(st.integers(0, 400), st.floats(0.001, 0.999)),
    decay=st.one_of(st.integers(0, 400), st.floats(0.001, 0.999)),
    final=st.floats(0.0, 1.0),
)
def test_a_rate_is_never_negative_nor_above_the_peak_and_order_of_calls_is_not_seen(
    shape: str, total: int, warmup: int | float, decay: int | float, final: float
) -> None:
    keys = optim(schedule=shape, warmup_steps=warmup, decay_steps=decay, final_lr=final)
    schedule = make_schedule(keys, total)
    steps = list(range(total))
    in_order = {step: schedule(step) for step in steps}
    random.Random(total).shuffle(steps)
    assert {step: make_schedule(keys, total)(step) for step in steps[:20]}.items() <= in_order.items()
    assert {step: schedule(step) for step in steps} == in_order
    assert all(0.0 <= rate <= 0.01 * (1 + 1e-12) for rate in in_order.values())


@pytest.mark.parametrize("shape", ["cosine", "linear", "wsd", "constant"])
def test_warm_up_is_a_straight_line_to_the_peak(shape: str) -> None:
    got = rates(100, schedule=shape, warmup_steps=9)
    assert got[:10] == pytest.approx([0.001 * k for k in range(1, 11)])


@pytest.mark.parametrize("shape", SHAPES)
def test_warm_up_in_per_cent_is_that_share_of_the_run(shape: str) -> None:
    assert rates(200, schedule=shape, warmup_steps="5%") == rates(200, schedule=shape, warmup_steps=10)


def test_constant_stays_at_the_peak() -> None:
    assert rates(30, schedule="constant", warmup_steps=10)[10:] == [0.01] * 20


def test_cosine_is_half_way_down_in_the_middle() -> None:
    got = rates(101, schedule="cosine", final_lr=0.2)
    assert got[0] == pytest.approx(0.01)
    assert got[50] == pytest.approx(0.006)
    assert got[25] > 0.008 > 0.004 > got[75]


def test_linear_falls_by_the_same_each_step() -> None:
    got = rates(11, schedule="linear", final_lr=0.0)
    assert got == pytest.approx([0.001 * k for k in range(10, -1, -1)])


def test_wsd_stays_at_the_peak_until_its_decay() -> None:
    got = rates(100, schedule="wsd", warmup_steps=10, decay_steps="20%", final_lr=0.1)
    assert got[10:80] == [0.01] * 70
    assert got[80] < 0.01
    assert got[-1] == pytest.approx(0.001)
    falls = [a - b for a, b in pairwise(got[79:])]
    assert falls == pytest.approx([falls[0]] * 20)


@pytest.mark.parametrize("key", ["warmup_steps", "decay_steps"])
def test_a_stretch_of_the_schedule_in_epochs_is_refused_not_taken_for_none(key: str) -> None:
    with pytest.raises(ValidationError, match=r"steps .* or a share"):
        optim(**{key: "1ep"})
