"""Law 2: the rows of a step are a pure function of (seed, step), and no row is lost between epochs."""

import tracemalloc
from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lwray.data.order import permute, rows_of_step

seeds = st.integers(0, 2**63 - 1)


def order_of(rows: int, seed: int, epoch: int) -> list[int]:
    return [int(each) for each in permute(np.arange(rows), rows, seed, epoch)]


@given(rows=st.integers(1, 3000), seed=seeds, epoch=st.integers(0, 10**6))
def test_an_epoch_holds_every_row_exactly_once(rows: int, seed: int, epoch: int) -> None:
    assert sorted(order_of(rows, seed, epoch)) == list(range(rows))


@given(rows=st.integers(20, 3000), seed=seeds, epoch=st.integers(0, 10**6))
def test_another_epoch_or_another_seed_is_another_order(rows: int, seed: int, epoch: int) -> None:
    first = order_of(rows, seed, epoch)
    assert first != list(range(rows))
    assert first != order_of(rows, seed, epoch + 1)
    assert first != order_of(rows, seed + 1, epoch)
    assert order_of(rows, seed, epoch + 1) != order_of(rows, seed + 1, epoch)


@given(rows=st.integers(1, 60), batch=st.integers(1, 150), seed=seeds, epochs=st.integers(1, 4))
def test_steps_in_a_row_make_each_epoch_once_in_its_order(rows: int, batch: int, seed: int, epochs: int) -> None:
    steps = -(-epochs * rows // batch)
    line = np.concatenate([rows_of_step(step, batch, rows, seed) for step in range(steps)])
    assert all(len(rows_of_step(step, batch, rows, seed)) == batch for step in range(steps))
    for epoch in range(epochs):
        assert line[epoch * rows : (epoch + 1) * rows].tolist() == order_of(rows, seed, epoch)


@given(step=st.integers(0, 10**6), batch=st.integers(1, 64), rows=st.integers(1, 3000), seed=seeds)
def test_the_rows_of_a_step_are_known_without_the_steps_before(step: int, batch: int, rows: int, seed: int) -> None:
    first = rows_of_step(step, batch, rows, seed)
    rows_of_step(step + 1, batch, rows, seed)
    assert first.dtype == np.int64
    assert rows_of_step(step, batch, rows, seed).tolist() == first.tolist()
    epoch, at = divmod(step * batch, rows)
    assert first[0] == permute(np.array([at]), rows, seed, epoch)[0]


def test_a_batch_larger_than_the_data_takes_whole_epochs_and_the_start_of_the_next() -> None:
    ids = rows_of_step(0, 25, 10, 3).tolist()
    assert ids == order_of(10, 3, 0) + order_of(10, 3, 1) + order_of(10, 3, 2)[:5]


def test_a_million_million_rows_take_no_more_memory_than_a_thousand() -> None:
    def peak_bytes(rows: int) -> int:
        tracemalloc.start()
        ids = rows_of_step(rows // 256 * 7, 256, rows, 1)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert ids.min() >= 0
        assert ids.max() < rows
        return peak

    peak_bytes(1000)
    assert peak_bytes(10**12) < peak_bytes(1000) + 20_000 < 100_000


@pytest.mark.parametrize("rows", [997, 1024, 1025])
def test_rows_land_evenly_over_the_epoch(rows: int) -> None:
    """Chi-square of where a stretch of neighbours lands, over 60 epochs: 16 bins, within 5 sigma of its mean."""
    stretch, bins, epochs = 64, 16, 60
    width = rows / bins
    landed = np.concatenate([permute(np.arange(stretch) + 100, rows, 5, epoch) for epoch in range(epochs)])
    seen = np.histogram(landed, bins=bins, range=(0, rows))[0]
    sizes = np.histogram(np.arange(rows), bins=bins, range=(0, rows))[0]
    expected = sizes * (stretch * epochs / rows)
    chi_square = ((seen - expected) ** 2 / expected).sum()
    assert width > 60
    assert chi_square < (bins - 1) + 5 * sqrt(2 * (bins - 1))


def test_neighbours_do_not_stay_neighbours_and_one_place_sees_all_rows() -> None:
    orders = np.array([order_of(1000, 11, epoch) for epoch in range(50)])
    # two independent places are next to each other once in 500 times
    assert (np.abs(np.diff(orders, axis=1)) == 1).mean() == pytest.approx(1 / 500, rel=0.3)
    # the row at one place: uniform over 0…999 has mean 499.5 and deviation 289 / sqrt(epochs)
    assert np.abs(orders.mean(axis=0) - 499.5).max() < 5.5 * 289 / sqrt(50)
    correlation = np.corrcoef(orders)
    assert np.abs(correlation - np.eye(50)).max() < 5.5 / sqrt(1000)
