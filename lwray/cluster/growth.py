"""Whether a larger group of workers is worth the pause that it costs."""

from collections.abc import Callable
from dataclasses import dataclass

SETTLED_S = 5.0
"""Seconds for which more room must be there: nodes come in groups, and some leave again at once."""
WORTH = 2.0
"""A resize must save this many times the work that its pause costs."""


@dataclass(slots=True)
class Growth:
    """Watches how many workers are possible. Times are seconds of one monotonic clock."""

    current: int
    _seen: int = 0
    _since: float = 0.0

    def decide(self, now: float, possible: int, remaining: Callable[[], float], pause: float) -> int | None:
        """The size to grow to now, or None.

        `remaining` gives the seconds of training left at the current size. m workers do the same steps in n / m of the
        time that n take, so growing saves remaining x (1 - current / possible) and costs `pause`.
        """
        if possible != self._seen:
            self._seen, self._since = possible, now
        if possible <= self.current or now - self._since < SETTLED_S:
            return None
        saved = remaining() * (1 - self.current / possible)
        return possible if saved >= WORTH * pause else None
