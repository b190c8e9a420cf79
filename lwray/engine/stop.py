"""A request to stop: set by a signal or by a file, looked at by the loop at the step boundary."""

import signal
import threading
from pathlib import Path
from types import FrameType


class StopRequest:
    """Holds the name of what asked the run to stop (`INT`, `TERM`), or None."""

    def __init__(self) -> None:
        self.cause: str | None = None
        self._done = threading.Event()

    def trap_signals(self) -> None:
        """Take SIGINT and SIGTERM as requests; a second SIGINT leaves at once. Main thread only."""

        def on_signal(number: int, frame: FrameType | None) -> None:
            name = signal.Signals(number).name.removeprefix("SIG")
            if name == "INT" and self.cause == "INT":
                signal.signal(signal.SIGINT, signal.default_int_handler)
                raise KeyboardInterrupt
            self.cause = name

        signal.signal(signal.SIGINT, on_signal)
        signal.signal(signal.SIGTERM, on_signal)

    def watch(self, path: Path, interval: float = 0.2) -> None:
        """Look for a file `path` every `interval` seconds, in a thread; its text is the cause."""

        def look() -> None:
            while not self._done.wait(interval):
                if path.exists():
                    self.cause = path.read_text(encoding="utf-8").strip() or "TERM"
                    return

        threading.Thread(target=look, name="stop-watch", daemon=True).start()

    def close(self) -> None:
        """End the watching thread."""
        self._done.set()
