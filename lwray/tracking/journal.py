"""An attempt's append-only files (metrics, ledger, sample ids), and a run's attempts read as one."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from lwray.errors import UserError
from lwray.tracking.rundir import Attempt, RunDir

Line = dict[str, Any]
TAIL_BYTES = 1 << 16


class Journal:
    """Appends to an attempt's files, one `write` a line: several processes may append to the same ledger."""

    def __init__(self, attempt: Attempt, ledger: Path | None = None) -> None:
        """`ledger` is where events go, by default the attempt's ledger.jsonl."""
        self.attempt = attempt
        self._ledger = ledger or attempt.ledger
        self._files: dict[Path, FileIO] = {}

    def metrics(self, **fields: Any) -> None:
        """One object of metrics.jsonl; `step` counts from 0."""
        self._append(self.attempt.metrics, fields)

    @classmethod
    def of_driver(cls, run: RunDir, attempt: Attempt) -> "Journal":
        """The driver's: on an object store a file has one writing machine, so its events have their own."""
        return cls(attempt, attempt.driver_ledger if run.url else None)

    def event(self, name: str, **fields: Any) -> None:
        """One object of the ledger: `time` (Unix seconds), `event`, and the fields."""
        self._append(self._ledger, {"time": time.time(), "event": name, **fields})

    def ids(self, step: int, ids: list[int]) -> None:
        """The rows of one step, sorted."""
        self._append(self.attempt.ids, {"step": step, "ids": ids})

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _append(self, path: Path, line: Line) -> None:
        if path not in self._files:
            _cut_torn_end(path)
            self._files[path] = FileIO(path, "a")
        self._files[path].write(json.dumps(line).encode() + b"\n")


def _cut_torn_end(path: Path) -> None:
    """A process killed within a write leaves a part of a line; the next line must not be glued to it."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return
        file.seek(size - 1)
        if file.read(1) != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)


def read_lines(path: Path) -> list[Line]:
    """The objects of a .jsonl file, none if it does not exist; a torn last line is left out.

    Raises UserError for a line elsewhere that is not JSON.
    """
    if not path.exists():
        return []
    texts = path.read_bytes().splitlines()
    lines = []
    for number, text in enumerate(texts, start=1):
        try:
            lines.append(json.loads(text))
        except ValueError:
            if number < len(texts):
                raise UserError(f"{path}, line {number} is not JSON: the file is damaged; remove that line.") from None
    return lines


def last_lines(path: Path) -> list[Line]:
    """Some of the last objects of a .jsonl file, however long it is; none if it does not exist."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        texts = file.read().splitlines()
    lines = []
    for text in texts:
        # the first may be cut, and the last not be whole yet
        with suppress(ValueError):
            lines.append(json.loads(text))
    return [line for line in lines if isinstance(line, dict)]


def events_of(attempt: Attempt) -> list[Line]:
    """What happened in an attempt, in order: rank 0's events, and the driver's where they have a file of their own."""
    events = read_lines(attempt.ledger)
    if attempt.driver_ledger.exists():
        events = sorted(events + read_lines(attempt.driver_ledger), key=lambda event: float(event["time"]))
    return events


def merged_metrics(run: RunDir) -> list[Line]:
    """All attempts as one, each step once, by step: what ran later wins.

    An attempt's lines of one step (training, evaluation) are joined. A step that a later attempt ran again
    replaces the earlier one; a later evaluation alone is added to it.
    """
    merged: dict[int, Line] = {}
    for attempt in run.attempts_in_order():
        for step, line in _by_step(read_lines(attempt.metrics)).items():
            earlier = {} if "loss" in line else merged.get(step, {})
            merged[step] = {**earlier, **line}
    return [merged[step] for step in sorted(merged)]


def merged_ids(run: RunDir) -> list[Line]:
    """`{"step", "ids"}` of all attempts, each step once, by step; the later line wins."""
    merged: dict[int, Line] = {}
    for attempt in run.attempts_in_order():
        merged.update(_by_step(read_lines(attempt.ids)))
    return [merged[step] for step in sorted(merged)]


def merged_ledger(run: RunDir) -> list[Line]:
    """The events of all attempts in order of time, each with its attempt's number."""
    events = [{**event, "attempt": attempt.number} for attempt, event in _events(run)]
    return sorted(events, key=lambda event: event["time"])


@dataclass(frozen=True, slots=True)
class Span:
    """The logged steps of one attempt: from the first to the last, both included."""

    attempt: int
    first: int
    last: int


def spans(run: RunDir) -> list[Span]:
    """The steps of every attempt that trained at least one."""
    found = []
    for attempt in run.attempts_in_order():
        steps = [line["step"] for line in read_lines(attempt.metrics) if "loss" in line]
        if steps:
            found.append(Span(attempt.number, min(steps), max(steps)))
    return found


def _by_step(lines: list[Line]) -> dict[int, Line]:
    joined: dict[int, Line] = {}
    for line in lines:
        joined[line["step"]] = {**joined.get(line["step"], {}), **line}
    return joined


def _events(run: RunDir) -> Iterator[tuple[Attempt, Line]]:
    for attempt in run.attempts_in_order():
        for event in events_of(attempt):
            yield attempt, event
