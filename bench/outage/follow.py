"""A run that is watched from outside: its groups of workers, its steps, and what a fault costs it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lwray.tracking.journal import Line, read_lines
from lwray.tracking.rundir import RunDir

LONG_S = 200.0
"""Whatever takes longer is given up."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a fault cost."""

    pause_s: float
    """Without a step: from the fault, or from the last step after it, to the first one of the next group."""
    after_s: float
    """From the fault to that step."""
    again: int
    """Recorded steps that were done again."""
    workers: int
    """Of the next group."""


class GivenUp(Exception):
    """What was waited for did not come."""


class Watched:
    """The first attempt of a run, as its files tell it."""

    def __init__(self, run: Path) -> None:
        self._run = RunDir(run)

    def groups(self) -> list[Line]:
        """Where the ranks of each group are."""
        return [event for event in self._lines("ledger.jsonl") if event["event"] == "group"]

    def steps(self) -> list[Line]:
        """Each step as it was recorded, also those that were done again."""
        return [line for line in self._lines("metrics.jsonl") if "time" in line]

    def trains(self, groups: int, more: int) -> None:
        """Wait for a number of groups, and until the last one has recorded some steps."""
        await_(lambda: len(self.groups()) >= groups, f"group {groups}")
        began = self.groups()[-1]["time"]
        await_(lambda: len([s for s in self.steps() if s["time"] > began]) >= more, f"{more} steps of group {groups}")

    def cost(self, fault: float, groups: int) -> Cost:
        """Of a fault at that time (Unix s), before which there were so many groups; waits for the next one's steps."""
        self.trains(groups + 1, 1)
        group = self.groups()[groups]
        before = [line for line in self.steps() if line["time"] < group["time"]]
        first = next(line for line in self.steps() if line["time"] > group["time"])
        last = max(fault, before[-1]["time"])
        again = max(0, max(line["step"] for line in before) + 1 - first["step"])
        return Cost(first["time"] - last, first["time"] - fault, again, group["workers"])

    def _lines(self, name: str) -> list[Line]:
        return read_lines(self._run.attempts / "0001" / name)


def await_(condition: Callable[[], bool], what: str) -> None:
    """Raises GivenUp."""
    deadline = time.monotonic() + LONG_S
    while not condition():
        if time.monotonic() > deadline:
            raise GivenUp(f"{what} did not come within {LONG_S:.0f} s")
        time.sleep(0.1)
