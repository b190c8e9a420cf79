"""Rank 0's sign of life: a small file, in which it also says how long it may now be silent.

Files of the attempt are what a driver and its workers share on every storage, so this is one of them: in a directory it
is read as it is written, on an object store it travels with the journal. metrics.jsonl would not do: its next line may
be many steps away.
"""

import json
import statistics
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

from lwray.config import Config

OFTEN_S = 1.0
"""At most one sign in so many seconds, unless something else is being done now."""
STEPS = 100
"""Last steps of which the median is taken."""
TIMES = 10.0
"""A step that takes so many times the median is slow; only then may it hang."""
SAVES = 3
"""A save that training waits for is tried so often, and may be given `checkpoint.deadline` each time."""


@dataclass(frozen=True, slots=True)
class Sign:
    """What rank 0 was at, the `count`-th time that it said so."""

    count: int
    step: int
    """Updates done."""
    doing: str
    """`train`, `evaluate` or `save`."""
    patience_s: float
    """Seconds of silence after this sign that are no hang."""

    @classmethod
    def of(cls, data: bytes) -> "Sign | None":
        """None where not all of it is there yet, as a shared file system may show it."""
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError):
            return None


class Life:
    """Signs of one rank. `path` is None for all but rank 0: ranks take every step together, so one speaks for all."""

    def __init__(self, path: Path | None, config: Config) -> None:
        self._path = path if config.cluster.hang_s else None
        self._least, self._deadline = config.cluster.hang_s, config.checkpoint.deadline
        self._seconds: deque[float] = deque(maxlen=STEPS)
        self._last = Sign(0, 0, "", 0.0)
        self._signed = 0.0

    def took(self, seconds: float) -> None:
        """How long a step took."""
        self._seconds.append(seconds)

    def trains(self, step: int) -> None:
        """`step` updates are done."""
        self._sign(step, "train", self._patience())

    def evaluates(self, step: int) -> None:
        """A pass over held-out rows is done."""
        self._sign(step, "evaluate", self._patience())

    def saves(self, step: int) -> None:
        """Training waits for a save, or may: there is no sign before its end."""
        self._sign(step, "save", self._patience() + SAVES * self._deadline)

    def _patience(self) -> float:
        return max(self._least, TIMES * statistics.median(self._seconds)) if self._seconds else TIMES * self._least

    def _sign(self, step: int, doing: str, patience: float) -> None:
        now = time.monotonic()
        if self._path is None or (doing == self._last.doing and now - self._signed < OFTEN_S):
            return
        self._last, self._signed = Sign(self._last.count + 1, step, doing, patience), now
        # not synced: a machine that stops dead gives no more signs anyway
        draft = self._path.with_name(self._path.name + ".tmp")
        draft.write_text(json.dumps(asdict(self._last)), encoding="utf-8")
        draft.replace(self._path)
