"""Tailing an attempt's metrics, and the points that come of them."""

import time
from pathlib import Path

import pytest

from lwray.tracking.follow import Follower, NewPoints, Point, to_points
from lwray.tracking.journal import Journal, Line
from lwray.tracking.rundir import RunDir


def _wait_for(seen: list[Line], count: int) -> None:
    deadline = time.monotonic() + 5
    while len(seen) < count and time.monotonic() < deadline:
        time.sleep(0.005)


def test_lines_are_handed_on_as_they_come_and_the_rest_at_the_end(tmp_path: Path) -> None:
    attempt = RunDir(tmp_path).new_attempt()
    seen: list[Line] = []
    follower = Follower(attempt, seen.extend, interval=0.01)
    journal = Journal(attempt)
    journal.metrics(step=0, loss=1.0)
    _wait_for(seen, 1)
    assert seen == [{"step": 0, "loss": 1.0}]
    with attempt.metrics.open("a") as file:
        file.write('{"step": 1, ')
        file.flush()
        time.sleep(0.05)
        assert len(seen) == 1
        file.write('"loss": 2.0}\n')
    journal.metrics(step=2, loss=3.0)
    follower.stop()
    assert [line["step"] for line in seen] == [0, 1, 2]
    journal.close()


def test_a_sink_that_fails_is_heard_of_at_the_end(tmp_path: Path) -> None:
    attempt = RunDir(tmp_path).new_attempt()

    def sink(lines: list[Line]) -> None:
        raise RuntimeError("full")

    follower = Follower(attempt, sink, interval=0.01)
    journal = Journal(attempt)
    journal.metrics(step=0)
    journal.close()
    with pytest.raises(RuntimeError, match="full"):
        follower.stop()


def test_fields_are_recorded_under_their_mlflow_names() -> None:
    line = {
        "time": 2.0,
        "step": 7,
        "loss": 1.0,
        "lr": 0.1,
        "mfu": None,
        "tokens": 512,
        "val_loss": 3.0,
        "loss/aux(1)": 4.0,
    }
    assert list(to_points([line])) == [
        Point("train/loss", 1.0, 7, 2000),
        Point("optim/lr", 0.1, 7, 2000),
        Point("val/loss", 3.0, 7, 2000),
        Point("train/aux_1_", 4.0, 7, 2000),
    ]


def test_a_repeated_step_is_one_point() -> None:
    new = NewPoints(lambda metric: {"train/loss": 4}.get(metric, -1))
    steps = [3, 4, 5, 6, 5, 6, 7]
    points = new({"step": step, "loss": 1.0, "val_loss": 1.0} for step in steps)
    assert [point.step for point in points if point.name == "train/loss"] == [5, 6, 7]
    assert [point.step for point in points if point.name == "val/loss"] == [3, 4, 5, 6, 7]
    assert new([{"step": 7, "loss": 1.0}]) == []
