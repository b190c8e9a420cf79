"""When an attempt that was given notice ends: at once, or as late as its last save allows."""

import time
from collections.abc import Callable

from lwray.engine.stop import Notice, StopRequest

SAFETY, SPARE_S = 2.0, 2.0
"""Before a deadline, so many times what a step and a save have taken, and seconds more."""
LEAD_S, LEAD = 60.0, 3.0
"""The end of an allocation is taken for a notice so many seconds before, or so many times what the end needs."""


class Leaving:
    """A look at notices: a save as soon as one comes, training on, and one more save just before the deadline."""

    def __init__(self, stop: StopRequest, ends_at: float | None, save_seconds: Callable[[], float]) -> None:
        """`ends_at` is the end of the allocation in Unix seconds, for rank 0 alone: its clock is the clock.

        `save_seconds()` is what the latest save took.
        """
        self._stop, self._ends_at, self._save_seconds = stop, ends_at, save_seconds
        self._step_seconds = self._evaluation_seconds = 0.0
        self._near = False
        self._heeded: Notice | None = None
        self.notice: Notice | None = None
        """What the last `flags` spoke of."""

    def flags(self, *, evaluates: bool) -> dict[str, float]:
        """`stop`: end with this step; `notice`: save now, and go on. An evaluation, if one is due, must still fit."""
        self.notice = notice = self._look()
        if notice is None:
            return {"stop": 0.0, "notice": 0.0}
        stops = notice.deadline is None or notice.deadline - time.time() <= self._needed(evaluates)
        return {"stop": float(stops), "notice": float(not stops and notice != self._heeded)}

    def heed(self) -> Notice | None:
        """The notice is being saved for."""
        self._heeded = self.notice
        return self._heeded

    def stepped(self, seconds: float) -> None:
        """How long the step before this boundary took."""
        self._step_seconds = seconds

    def evaluated(self, seconds: float) -> None:
        """How long an evaluation took."""
        self._evaluation_seconds = seconds

    def _look(self) -> Notice | None:
        """What asks for the end now: what was said, or the end of the allocation once it is near and comes first."""
        said, end = self._stop.notice, self._ends_at
        if end is None or (said is not None and (said.deadline is None or said.deadline <= end)):
            return said
        self._near |= end - time.time() <= max(LEAD_S, LEAD * self._needed(True))
        return Notice("time_limit", end) if self._near else said

    def _needed(self, evaluates: bool) -> float:
        """Seconds that this step, its evaluation and the last save may take."""
        evaluation = self._evaluation_seconds if evaluates else 0.0
        return SAFETY * (self._step_seconds + evaluation + self._save_seconds()) + SPARE_S
