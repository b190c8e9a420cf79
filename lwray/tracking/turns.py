"""A thread that keeps a run's small files the same here and on an object store, while others write them."""

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from lwray.tracking.mirror import Mirror

TURN_S = 2.0
"""Seconds between two turns: what a machine that is lost has not told yet, and how long a request to stop travels."""

log = logging.getLogger(__name__)


class Turns:
    """Pushes and pulls files every TURN_S seconds. A turn that fails is said once and made good by the next."""

    def __init__(self, mirror: Mirror, *, push: Sequence[Path] = (), pull: Sequence[Path] = ()) -> None:
        self._mirror, self._push, self._pull = mirror, push, pull
        self._one_at_a_time = threading.Lock()
        self._wake, self._ended = threading.Event(), False
        self._asked = self._done = 0
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
        self._thread.start()

    def ask(self) -> int:
        """Have a turn begun at once. Returns what `reached` is asked with."""
        self._asked += 1
        self._wake.set()
        return self._asked

    def reached(self, asked: int) -> bool:
        """Whether all that had been written when `ask` returned this is in the storage."""
        return self._done >= asked

    def settle(self) -> None:
        """Make a turn now. Raises OSError."""
        with self._one_at_a_time:
            asked = self._asked
            self._mirror.push(*self._push)
            self._mirror.pull(*self._pull)
            self._done = asked

    def close(self) -> None:
        """Make the last turn; where it fails, say what is missing in the storage."""
        self._ended = True
        self._wake.set()
        self._thread.join()
        if self._failing:
            names = ", ".join(path.name for path in (*self._push, *self._pull))
            log.warning("The last lines of %s are on this machine alone, not in %s.", names, self._mirror.store.url)

    def _run(self) -> None:
        while not self._ended:
            self._wake.wait(TURN_S)
            self._wake.clear()
            if not self._ended:
                self._try()
        self._try()

    def _try(self) -> None:
        try:
            self.settle()
        except OSError as error:
            if not self._failing:
                log.warning("%s; the run goes on, and it is tried again every %.0f s.", error, TURN_S)
            self._failing = True
        else:
            if self._failing:
                log.warning("The storage %s answers again.", self._mirror.store.url)
            self._failing = False
