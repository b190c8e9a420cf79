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
        """`ends_at` is the end of the allocation in Unix seconds; `save_seconds()` is what the latest save took."""
        self._stop, self._ends_at, self._save_seconds = stop, ends_at, save_seconds
        self._step_seconds = 0.0
        self._heeded: Notice | None = None

    @property
    def notice(self) -> Notice | None:
        """What asks for the end now: what was said, or the end of the allocation once it is near."""
        said = self._stop.notice
        if said is not None or self._ends_at is None:
            return said
        near = self._ends_at - time.time() <= max(LEAD_S, LEAD * self._needed())
        return Notice("time_limit", self._ends_at) if near else None

    def flags(self) -> dict[str, float]:
        """`stop`: end with this step; `notice`: save now, and go on."""
        notice = self.notice
        if notice is None:
            return {"stop": 0.0, "notice": 0.0}
        stops = notice.deadline is None or notice.deadline - time.time() <= self._needed()
        return {"stop": float(stops), "notice": float(not stops and notice != self._heeded)}

    def heed(self) -> Notice | None:
        """The notice is being saved for."""
        self._heeded = self.notice
        return self._heeded

    def stepped(self, seconds: float) -> None:
        """How long the step before this boundary took."""
        self._step_seconds = seconds

    def _needed(self) -> float:
        """Seconds that one more step and the last save may take."""
        return SAFETY * (self._step_seconds + self._save_seconds()) + SPARE_S
