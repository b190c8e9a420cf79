"""A request to stop: set by a signal or by a file, looked at by the loop at the step boundary."""

import json
import math
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
USER = ("INT", "TERM")
TWICE_S = 1.0
"""Some launchers send one signal to a process and its parent, which hands it on: that is no second Ctrl-C."""


@dataclass(frozen=True, slots=True)
class Notice:
    """What asks an attempt to end, and by when its machines are gone."""

    cause: str
    """`INT` and `TERM`: the user; `preempted` and `time_limit`: the machines go; `drain` and `resize`: some of them."""
    deadline: float | None = None
    """Unix seconds; None where nobody said: then at once."""

    def text(self) -> str:
        return json.dumps({"cause": self.cause, "deadline": self.deadline})

    @classmethod
    def of_text(cls, text: str) -> "Notice":
        """Raises ValueError where not all of it is there yet."""
        return cls(**json.loads(text))


def by_name(signal_name: str) -> Notice:
    """Where nobody knows more than the signal."""
    return Notice("preempted" if signal_name == "USR1" else signal_name)


class StopRequest:
    """Holds what asked the run to stop, if anything did; a later word takes an earlier one's place, but not the user's.

    `explain` says what a signal means (`INT`, `TERM`, `USR1`). It may ask another program, so a handler never calls it.
    """

    def __init__(self, explain: Callable[[str], Notice] = by_name) -> None:
        self._explain = explain
        self._signal: str | None = None
        self._notice: Notice | None = None
        self._done = threading.Event()

    @property
    def notice(self) -> Notice | None:
        if self._signal is not None:
            name, self._signal = self._signal, None
            self._take(self._explain(name))
        return self._notice

    @property
    def asked(self) -> bool:
        """Whether anything did; unlike `notice` it asks no other program what that means, in any thread."""
        return self._signal is not None or self._notice is not None

    @property
    def cause(self) -> str | None:
        return self.notice.cause if self.notice else None

    def trap_signals(self) -> None:
        """Take SIGINT, SIGTERM and SIGUSR1 as requests; a second SIGINT leaves at once. Main thread only."""
        interrupted = math.inf

        def on_signal(number: int, frame: FrameType | None) -> None:
            nonlocal interrupted
            if number == signal.SIGINT and time.monotonic() > interrupted + TWICE_S:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                raise KeyboardInterrupt
            if number == signal.SIGINT:
                interrupted = min(interrupted, time.monotonic())
            self._signal = signal.Signals(number).name.removeprefix("SIG")

        for number in SIGNALS:
            signal.signal(number, on_signal)

    def watch(self, path: Path, interval: float = 0.2) -> None:
        """Look into a file `path` every `interval` seconds, in a thread: it holds a Notice's text, or will."""

        def look() -> None:
            heard: Notice | None = None
            while not self._done.wait(interval):
                if path.exists():
                    try:
                        said = Notice.of_text(path.read_text(encoding="utf-8"))
                    except ValueError:
                        # a shared file system may show a file before all of it is there
                        continue
                    if said != heard:
                        heard = said
                        self._take(said)

        threading.Thread(target=look, name="stop-watch", daemon=True).start()

    def _take(self, notice: Notice) -> None:
        # what the user wants stands, whatever befalls the machines after it
        if self._notice is None or self._notice.cause not in USER or notice.cause in USER:
            self._notice = notice

    def close(self) -> None:
        """End the watching thread."""
        self._done.set()
