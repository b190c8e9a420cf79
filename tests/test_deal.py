"""Law 1: any number of workers computes the same global batch, dealt in whole row groups."""

from itertools import chain
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lwray.data.deal import Deal, deal_batch
from lwray.errors import UserError


@st.composite
def deals(draw: st.DrawFn) -> Deal:
    group = draw(st.integers(1, 6))
    groups = draw(st.integers(1, 40))
    workers = draw(st.integers(1, groups))
    micro: int | Literal["auto"] = draw(st.one_of(st.just("auto"), st.integers(1, groups).map(lambda n: n * group)))
    bound = draw(st.integers(1, 60))
    return deal_batch(groups * group, group, workers, micro, "auto", bound)


def check(deal: Deal) -> None:
    shares = [deal.share(rank) for rank in range(deal.workers)]
    assert list(chain(*shares)) == list(range(deal.rows))
    assert max(map(len, shares)) - min(map(len, shares)) in (0, deal.group)
    for rank, share in enumerate(shares):
        micro_batches = deal.micro_batches(rank)
        assert len(micro_batches) == deal.micro_steps
        assert list(chain(*micro_batches)) == list(share)
        assert max(map(len, micro_batches)) <= deal.micro_rows
        assert all(len(each) % deal.group == 0 for each in micro_batches)
        assert all(each.start % deal.group == 0 for each in micro_batches if each)


@given(deals())
def test_groups_are_dealt_whole_and_evenly_and_every_rank_runs_as_many_micro_steps(deal: Deal) -> None:
    check(deal)
    busiest = deal.micro_batches(0)
    assert all(busiest), "a micro-step in which no rank has rows is wasted"


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("group", [1, 2])
def test_twelve_rows_are_shared_by_any_number_of_workers(workers: int, group: int) -> None:
    deal = deal_batch(12, group, workers, "auto", "auto", 100)
    check(deal)
    assert deal.micro_steps == 1
    sizes = [len(deal.share(rank)) // group for rank in range(workers)]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) == 12 // group


def test_five_workers_on_twelve_rows_have_three_three_two_two_two() -> None:
    deal = deal_batch(12, 1, 5, 2, "auto", 100)
    assert [len(deal.share(rank)) for rank in range(5)] == [3, 3, 2, 2, 2]
    assert deal.micro_batches(0) == [range(0, 2), range(2, 3)]
    assert [len(each) for each in deal.micro_batches(4)] == [2, 0]


@given(groups=st.integers(1, 60), group=st.integers(1, 4), workers=st.integers(1, 8), bound=st.integers(1, 100))
def test_an_automatic_micro_batch_keeps_to_the_bound_in_as_few_micro_steps_as_it_allows(
    groups: int, group: int, workers: int, bound: int
) -> None:
    workers = min(workers, groups)
    deal = deal_batch(groups * group, group, workers, "auto", "auto", bound)
    assert deal.micro_rows <= max(bound, group)
    largest = max(group, bound // group * group)
    assert deal.micro_steps == -(-len(deal.share(0)) // largest)


def test_a_micro_batch_larger_than_a_worker_share_is_that_share() -> None:
    assert deal_batch(12, 1, 4, 64, "auto", 1).micro_rows == 3


@given(workers=st.integers(1, 6), micro=st.integers(1, 6), accumulation=st.integers(1, 6))
def test_given_accumulation_is_the_number_of_micro_steps(workers: int, micro: int, accumulation: int) -> None:
    rows = workers * micro * accumulation
    for micro_size in (micro, "auto"):
        deal = deal_batch(rows, 1, workers, micro_size, accumulation, 1)
        assert (deal.micro_rows, deal.micro_steps) == (micro, accumulation)


def test_an_accumulation_that_does_not_make_the_batch_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(UserError, match=r"micro_size 2 x accumulation 3 x workers 4 = 24, but batch\.global_size = 12"):
        deal_batch(12, 1, 4, 2, 3, 100)
    with pytest.raises(UserError, match=r"12 rows / 5 workers / 2 micro-steps is no whole number"):
        deal_batch(12, 1, 5, "auto", 2, 100)


def test_more_workers_than_groups_are_refused_with_the_most_there_can_be() -> None:
    with pytest.raises(UserError, match=r"7 workers cannot share 6 row groups .*at most 6 workers"):
        deal_batch(12, 2, 7, "auto", "auto", 100)


def test_a_batch_that_splits_a_group_is_refused() -> None:
    with pytest.raises(UserError, match=r"batch\.global_size = 12 is not a multiple of the task's row group of 5"):
        deal_batch(12, 5, 1, "auto", "auto", 100)


@pytest.mark.parametrize("workers", [1, 2, 3, 6])
def test_a_micro_batch_that_splits_a_group_is_refused_at_any_number_of_workers(workers: int) -> None:
    with pytest.raises(UserError, match=r"batch\.micro_size = 7 must be a positive multiple of the row group, 2"):
        deal_batch(12, 2, workers, 7, "auto", 100)


def test_an_accumulation_that_splits_a_group_is_refused_by_its_own_name() -> None:
    with pytest.raises(UserError, match=r"batch\.accumulation = 4 .*no whole number of row groups of 2"):
        deal_batch(12, 2, 1, "auto", 4, 100)


@pytest.mark.parametrize(("micro_size", "accumulation"), [(0, "auto"), (-2, "auto"), ("auto", 0), ("auto", -1)])
def test_no_rows_or_no_micro_steps_are_refused(micro_size: int | str, accumulation: int | str) -> None:
    with pytest.raises(UserError, match=r"batch\.(micro_size|accumulation) = "):
        deal_batch(12, 1, 1, micro_size, accumulation, 100)  # type: ignore[arg-type]
