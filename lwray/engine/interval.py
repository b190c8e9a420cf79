"""When the next checkpoint is due by the clock."""

import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

from lwray.config.schema import CheckpointSection

OVERHEAD = 0.02
"""Largest share of training time that saves may take with `checkpoint.every = "auto"`."""
FIRST_S = 60.0
"""With auto, seconds to the first save: it measures what one costs."""
PRIOR_S = 4 * 3600.0
"""Before a run has seen a loss, one is expected in so many seconds: machines are preemptible."""
RETRY_S = 60.0
"""Seconds after a save that failed until the next try."""


def auto_seconds(blocked: float, total: float, between_losses: float) -> float:
    """Seconds between saves that stall training for `blocked` seconds and are under way for `total`.

    The interval that loses least to stalls and to work done twice is sqrt(2 x stall x time between losses) (Young,
    1974); stalls stay below OVERHEAD of the time, and no save is due while one is under way.
    """
    return max(math.sqrt(2 * blocked * between_losses), blocked / OVERHEAD, total)


def count_losses(ledger: Iterable[Mapping[str, Any]]) -> int:
    """Times that workers were lost, by the run's events in order: it went on from what was no last save."""
    losses, saved_last = 0, False
    for event in ledger:
        if event["event"] == "resumed" and not saved_last:
            losses += 1
        elif event["event"] == "checkpoint":
            saved_last = event["cause"] == "final"
    return losses


class Interval:
    """Rank 0's clock: seconds since the last save, against the interval given or found."""

    def __init__(self, section: CheckpointSection, losses: int, seconds: float) -> None:
        """`losses` of workers in `seconds` of training, so far."""
        self.auto = section.every == "auto"
        self.seconds = FIRST_S if self.auto else section.every_seconds
        self.between_losses = (seconds + PRIOR_S) / (losses + 1)
        self._next = self._after(self.seconds)

    def is_due(self) -> bool:
        return time.monotonic() >= self._next

    def begun(self) -> None:
        """A save has begun: the next one is due an interval later."""
        self._next = self._after(self.seconds)

    def measured(self, blocked: float, total: float) -> None:
        """A save has ended; with auto, the interval follows its cost."""
        if self.auto:
            begun = self._next - self.seconds
            self.seconds = auto_seconds(blocked, total, self.between_losses)
            self._next = begun + self.seconds

    def failed(self) -> None:
        """A save has failed: try again soon, also where none is due by time."""
        self._next = self._after(RETRY_S)

    def _after(self, seconds: float) -> float:
        return time.monotonic() + seconds if seconds > 0 else math.inf
