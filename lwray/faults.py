"""Faults on purpose: a rank fails, hangs, freezes or runs out of disk at a named point of a step.

`LWRAY_FAULTS` in a worker's environment holds a JSON list of them; without it nothing happens. Tests and
`lwray chaos` use it; the points are where `reach` is called.
"""

import errno
import json
import os
import signal
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

POINTS = (
    "step.data",
    "step.backward",
    "step.update",
    "evaluate",
    "checkpoint.copy",
    "checkpoint.write",
    "checkpoint.manifest",
)
VARIABLE = "LWRAY_FAULTS"


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens when `rank` reaches `point` in `step`; None is any. With `once`, only the first time ever."""

    point: str
    do: Literal["fail", "kill", "freeze", "hang", "delay", "no-space"]
    step: int | None = None
    rank: int | None = None
    seconds: float = 0.0
    """How long a `delay` takes."""
    once: str | None = None
    """A file that is created when the fault happens; while it exists, it does not happen again."""

    def __post_init__(self) -> None:
        if self.point not in POINTS:
            raise ValueError(f"{self.point!r} is no point of a step; there are {', '.join(POINTS)}")

    def strike(self) -> None:
        """`freeze` stops this process until a SIGCONT; `hang` sleeps for good."""
        match self.do:
            case "fail":
                raise RuntimeError(f"injected failure at {self.point}")
            case "no-space":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hang":
                while True:
                    time.sleep(3600)
            case "delay":
                time.sleep(self.seconds)


def reach(point: str, step: int, rank: int) -> None:
    """Say that `rank` is at `point` of `step`; what LWRAY_FAULTS has for it happens now."""
    for fault in _faults(os.environ.get(VARIABLE, "")):
        if fault.point == point and fault.step in (None, step) and fault.rank in (None, rank) and _is_first(fault):
            fault.strike()


def _is_first(fault: Fault) -> bool:
    if fault.once is None:
        return True
    try:
        with Path(fault.once).open("x"):
            return True
    except FileExistsError:
        return False


@cache
def _faults(document: str) -> tuple[Fault, ...]:
    return tuple(Fault(**each) for each in json.loads(document)) if document else ()
