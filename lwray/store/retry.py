"""Another try where a failure may pass, for a bounded time."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event
from typing import TypeVar

from lwray.store.failures import Failure, Passing

T = TypeVar("T")

# not the module's generator: a retry must not move the random numbers of training
DICE = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class Retry:
    """Exponential back-off with jitter. All in seconds."""

    patience: float = 60.0
    """How long after the first failure another try is still begun; so there are always two."""
    first_wait: float = 0.5
    longest_wait: float = 10.0

    def __call__(self, call: Callable[[], T], stop: Event | None = None) -> T:
        """The result of `call`, called again while it raises Passing; other errors pass through at once.

        Raises Failure with the last reason when patience is at its end, or when `stop` is set meanwhile.
        """
        stop = stop or Event()
        begun = time.monotonic()
        first_failure = None
        wait, tries = self.first_wait, 0
        while True:
            tries += 1
            try:
                return call()
            except Passing as failure:
                now = time.monotonic()
                first_failure = first_failure or now
                if (tries > 1 and now - first_failure >= self.patience) or stop.wait(DICE.uniform(wait / 2, wait)):
                    raise Failure(f"{failure} ({tries} tries in {now - begun:.0f} s)") from None
            wait = min(2 * wait, self.longest_wait)
