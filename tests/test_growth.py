"""When a run grows: what nodes can hold, and whether it pays."""

from hypothesis import given
from hypothesis import strategies as st

from lwray.cluster.capacity import NodeView, fits, possible_workers
from lwray.cluster.growth import SETTLED_S, WORTH, Growth

GPU_WORKER = {"CPU": 4.0, "GPU": 1.0}


def node(free: dict[str, float], held: int = 0, leaves_at: float | None = None) -> NodeView:
    return NodeView("id", "10.0.0.1", free, leaves_at, held)


def test_nodes_that_leave_and_room_that_others_have_do_not_count() -> None:
    there = [
        node({"CPU": 16.0, "GPU": 4.0}),
        node({"CPU": 3.0, "GPU": 4.0}),  # its cores belong to somebody else
        node({"CPU": 8.0, "GPU": 2.0}, held=2),
        node({"CPU": 16.0, "GPU": 4.0}, held=1, leaves_at=0.0),
    ]
    assert possible_workers(there, GPU_WORKER) == 4 + 0 + (2 + 2)


def test_fractions_of_a_core_fit_as_often_as_they_go() -> None:
    assert fits({"CPU": 1.0}, {"CPU": 0.1}) == 10
    assert fits({"CPU": 1.0}, {"CPU": 0.34, "GPU": 0.0}) == 2
    assert fits({}, {"CPU": 1.0}) == 0


def test_more_room_must_stay_for_a_while_before_the_run_grows_into_it() -> None:
    growth = Growth(current=2)
    assert growth.decide(100.0, 3, lambda: 1e6, 10.0) is None
    assert growth.decide(100.0 + SETTLED_S - 0.1, 3, lambda: 1e6, 10.0) is None
    # another node comes: the clock starts again, so that there is one pause for both
    assert growth.decide(100.0 + SETTLED_S, 4, lambda: 1e6, 10.0) is None
    assert growth.decide(100.0 + 2 * SETTLED_S, 4, lambda: 1e6, 10.0) == 4


def test_room_that_comes_and_goes_is_not_taken() -> None:
    growth = Growth(current=2)
    for second in range(60):
        assert growth.decide(float(second), 3 + second % 2, lambda: 1e6, 10.0) is None


@given(st.integers(1, 64), st.integers(1, 64), st.floats(0, 1e6), st.floats(0.1, 600))
def test_a_resize_pays_for_its_pause_and_never_shrinks(
    current: int, possible: int, remaining: float, pause: float
) -> None:
    growth = Growth(current)
    growth.decide(0.0, possible, lambda: remaining, pause)
    size = growth.decide(SETTLED_S, possible, lambda: remaining, pause)
    if size is not None:
        assert size > current
        assert remaining - remaining * current / size >= WORTH * pause
