"""A running training on the terminal: a bar where there is a terminal, plain lines where there is none."""

import time
from collections.abc import Iterable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Column

from lwray.tracking.journal import Line

SECONDS_BETWEEN_LINES = 10.0
ROOM_FOR_ALL = 100
"""Columns that a bar with all values needs; below, the learning rate is left out."""


class Progress:
    """Shows metric lines as they come. A context manager: the bar is drawn while it is open."""

    def __init__(self, total_steps: int, start_step: int, name: str, console: Console | None = None) -> None:
        """`start_step` is the next step to run (0 for a new run)."""
        self.console = console or Console()
        self._total = total_steps
        self._done = start_step
        self._latest: Line = {}
        self._meter = _Meter()
        self._printed = -SECONDS_BETWEEN_LINES
        self._unprinted = False
        self._bar = self._new_bar() if self.console.is_terminal else None
        if self._bar:
            self._task = self._bar.add_task(name, total=total_steps, completed=start_step, values="")

    def __enter__(self) -> "Progress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()
        elif self._unprinted:
            self._print_line()

    def metrics(self, lines: Iterable[Line]) -> None:
        """Take in metric lines: training (`loss`, `lr`, …) and evaluation (`val_loss`)."""
        for line in lines:
            self._done = line["step"] + 1
            self._latest.update(line)
            if self._bar is None:
                self._maybe_print("val_loss" in line)
        if self._bar:
            self._bar.update(self._task, completed=self._done, values=self._values())

    def note(self, text: str) -> None:
        """One line above the bar."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _new_bar(self) -> Bar:
        return Bar(
            TextColumn("[bold]{task.description}", table_column=Column(no_wrap=True, max_width=20)),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[values]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self.console,
            expand=True,
        )

    def _maybe_print(self, evaluation: bool) -> None:
        self._unprinted = True
        if evaluation or time.monotonic() - self._printed >= SECONDS_BETWEEN_LINES:
            self._print_line()

    def _print_line(self) -> None:
        left = self._meter.seconds_left(self._done, self._total)
        eta = f"  ETA {_clock(left)}" if left else ""
        self.note(f"step {self._done}/{self._total}  {self._values()}{eta}")
        self._printed = time.monotonic()
        self._unprinted = False

    def _values(self) -> str:
        line = self._latest
        if self._bar and self.console.width < ROOM_FOR_ALL:
            line = {field: value for field, value in line.items() if field != "lr"}
        return "  ".join(_values(line))


class _Meter:
    """The time left, from the pace since the first step seen: workers take a while to start."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def seconds_left(self, done: int, total: int) -> float:
        """0 where it is not known yet."""
        now = time.monotonic()
        if self._first is None:
            self._first = done, now
        ran, seconds = done - self._first[0], now - self._first[1]
        return seconds / ran * (total - done) if ran > 0 else 0.0


def _values(line: Line) -> Iterable[str]:
    if "loss" in line:
        yield f"loss {line['loss']:.4f}"
    if "val_loss" in line:
        yield f"val {line['val_loss']:.4f}"
    if "lr" in line:
        yield f"lr {line['lr']:.2e}"
    for unit in ("tokens", "samples"):
        if f"{unit}_per_second" in line:
            yield f"{_rounded(line[f'{unit}_per_second'])} {unit}/s"
            return


def _rounded(number: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
