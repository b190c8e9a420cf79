"""The driver's ear: tails the metrics that a worker writes, and turns them into MLflow points."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from lwray.tracking.journal import Line
from lwray.tracking.rundir import Attempt

NAMES = {
    "loss": "train/loss",
    "lr": "optim/lr",
    "grad_norm": "optim/grad_norm",
    "tokens_per_second": "perf/tokens_per_second",
    "samples_per_second": "perf/samples_per_second",
    "mfu": "perf/mfu",
    "step_seconds": "perf/step_seconds",
    "data_wait_share": "perf/data_wait_share",
    "memory_allocated_gb": "perf/memory_allocated_gb",
    "memory_reserved_gb": "perf/memory_reserved_gb",
}


class Point(NamedTuple):
    """One value of one MLflow metric."""

    name: str
    value: float
    step: int
    timestamp_ms: int


class Follower:
    """A thread that hands each new line of an attempt's metrics to `on_metrics`.

    Give each sink a Follower of its own: a tracking server that hangs must not freeze the terminal.
    """

    def __init__(self, attempt: Attempt, on_metrics: Callable[[list[Line]], None], interval: float = 0.5) -> None:
        self._path = attempt.metrics
        self._on_metrics = on_metrics
        self._interval = interval
        self._read_to = 0
        self._stopped = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"follow {self._path.name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Hand over what is left, and end the thread. Raises what `on_metrics` raised."""
        self._stopped.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._stopped.wait(self._interval):
                self._hand_over()
            self._hand_over()
        except Exception as error:
            self._error = error

    def _hand_over(self) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read_to)
            fresh = file.read()
        whole = fresh[: fresh.rfind(b"\n") + 1]
        if whole:
            self._on_metrics([json.loads(text) for text in whole.splitlines()])
            self._read_to += len(whole)


class NewPoints:
    """The points that are not recorded yet: a step that a restart repeats is not recorded again."""

    def __init__(self, last_step: Callable[[str], int]) -> None:
        """`last_step(metric)` is the largest step recorded by earlier attempts, -1 if none."""
        self._last_step = last_step
        self._last: dict[str, int] = {}

    def __call__(self, lines: Iterable[Line]) -> list[Point]:
        return [point for point in to_points(lines) if self._is_new(point)]

    def _is_new(self, point: Point) -> bool:
        if point.name not in self._last:
            self._last[point.name] = self._last_step(point.name)
        new = point.step > self._last[point.name]
        if new:
            self._last[point.name] = point.step
        return new


def to_points(lines: Iterable[Line]) -> Iterator[Point]:
    """Every field of `lines` that MLflow has a name for, as a point."""
    for line in lines:
        timestamp_ms = int(1000 * line.get("time", time.time()))
        for field, value in line.items():
            name = _metric_name(field)
            if name is not None and value is not None:
                yield Point(name, float(value), line["step"], timestamp_ms)


def _metric_name(field: str) -> str | None:
    if field.startswith("val_"):
        return _allowed("val/" + field.removeprefix("val_"))
    if field.startswith("loss/"):
        return _allowed("train/" + field.removeprefix("loss/"))
    return NAMES.get(field)


def _allowed(name: str) -> str:
    # a task may call its loss terms what it likes; MLflow would refuse the whole batch for one of them
    return re.sub(r"[^\w\-./ ]", "_", name)
