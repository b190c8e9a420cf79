"""`lwray train` watches over its driver: a child process, started again where it dies without having said how.

Ray ends a driver that loses its head with exit code 1, and the kernel kills one that takes too much memory; neither
leaves anybody in the process to go on. What the driver reports itself is never tried again here: it has its reasons.
"""

import ctypes
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from lwray.cluster.head import answers
from lwray.cluster.notice import STARTED
from lwray.config.schema import Config
from lwray.errors import ExitCode, RunFailed
from lwray.tracking.journal import events_of, read_lines
from lwray.tracking.rundir import Attempt, read_json
from lwray.tracking.storage import Storage

VARIABLE = "LWRAY_DRIVER"
"""Tells a process that it is the driver, and not who watches over one."""
FORWARDED = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 75}
"""Signals that are handed on, and the exit code of a driver that one of them ended before it could take it."""
STARTS, ENDS = ("started", "resumed"), ("failed", "stopped", "superseded")
"""Events after which workers train, and those that a driver leaves which ends with exit code 1, or was to end."""
GIVEN_BACK_S = 3600.0
LONGEST_PAUSE_S, TICK_S = 60.0, 0.2
SAY_S = 60.0
"""Seconds after which a wait is told of; then twice as long each time."""
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Driver:
    """What a driver is told by the process that watches over it."""

    parent: int | None = None
    """The process that watches over it, if one does."""
    restarted: str | None = None
    """Why the one before died."""
    opened: bool = False
    """An attempt of this command was there already, so that `--fresh` is done."""

    @classmethod
    def of_environment(cls) -> "Driver | None":
        """What this process was told, once: its children are no drivers. None where it is no driver itself."""
        word = os.environ.pop(VARIABLE, None)
        return cls(**json.loads(word)) if word else None

    def die_with_parent(self) -> None:
        """From now on the end of the parent, however it comes, is a SIGTERM to this process."""
        if self.parent is None:
            return
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != self.parent:
            raise SystemExit(ExitCode.TERMINATED)


class Supervisor:
    """Keeps one driver alive until it ends by its own word."""

    def __init__(self, config: Config, storage: str | None) -> None:
        """`storage` is the command's option; what is wrong with it is the driver's to say."""
        place = storage or os.environ.get("LWRAY_STORAGE") or config.run.storage
        self.run = Storage.at(place).run(config.run.name)
        self.section = config.cluster
        self.budget = Budget(self.run.root / "restarts.jsonl", config.cluster.max_restarts)
        self.asked: list[int] = []
        self.child: subprocess.Popen[bytes] | None = None

    def supervise(self) -> int:
        """The exit code of the last driver. Raises RunFailed where there may be no other after one that died."""
        for number in FORWARDED:
            signal.signal(number, self.forward)
        os.environ.setdefault(STARTED, str(time.time()))
        driver = Driver(os.getpid())
        newest: Attempt | None = None
        while True:
            before = self.run.last_attempt()
            code = self.drive(driver)
            own = self.opened_by(self.child, before) if self.child else None
            reason = self.why_died(code, own, driver)
            if reason is None:
                return code if code >= 0 else self.code_of_asked(code)
            pause = self.budget.spend(reason)
            self.say(f"{reason} It is started again in {pause:.0f} s ({self.budget.left} more restarts are left).")
            newest = own or newest
            driver = Driver(os.getpid(), reason, newest is not None)
            self.wait(pause)
            self.await_head()
            if self.asked:
                return FORWARDED[signal.Signals(self.asked[-1])]
            if newest is not None and newest.request.exists():
                self.say("It was asked to stop: it is not started again.")
                return ExitCode.TERMINATED

    def drive(self, driver: Driver) -> int:
        """Run a driver to its end; negative where a signal ended it."""
        self.child = subprocess.Popen(
            [sys.executable, *sys.orig_argv[1:]],
            env={**os.environ, VARIABLE: json.dumps(asdict(driver))},
            # a terminal's Ctrl-C comes here alone, and is handed on once
            process_group=0,
        )
        for number in self.asked:
            # what came before there was a child
            self.child.send_signal(number)
        return self.child.wait()

    def forward(self, number: int, frame: FrameType | None) -> None:
        """Hand a signal on. The one who sent it wants no driver to be started again."""
        self.asked.append(number)
        if self.child is not None:
            self.child.send_signal(number)

    def opened_by(self, child: "subprocess.Popen[bytes]", before: int) -> Attempt | None:
        """The attempt of a driver; others may have come from other machines meanwhile."""
        for attempt in self.run.attempts_in_order():
            if attempt.number > before and attempt.env.exists():
                made = read_json(attempt.env)
                if (made["hostname"], made["pid"]) == (socket.gethostname(), child.pid):
                    return attempt
        return None

    def why_died(self, code: int, own: Attempt | None, driver: Driver) -> str | None:
        """Why a driver is to be started again; None where it ended in order, or was asked to end."""
        if self.asked:
            return None
        if code < 0:
            return f"The driver was killed by {signal.Signals(-code).name}."
        if code != ExitCode.FAILED or not (own or driver.restarted) or (own and has_ended(own)):
            return None
        return "The driver ended without a word, as Ray ends one that has lost its head."

    def code_of_asked(self, code: int) -> int:
        """Of a driver that a signal ended after it was asked to end. Raises RunFailed where it had no time to."""
        name = signal.Signals(-code)
        if name in FORWARDED:
            return FORWARDED[name]
        raise RunFailed(
            f"The driver was killed by {name.name} while it was ending: what was committed before stands. Run the same "
            "command again to go on."
        )

    def await_head(self) -> None:
        """Wait for the head of a joined cluster. Raises RunFailed after `cluster.give_up_after`."""
        address = os.environ.get("RAY_ADDRESS", "")
        began = said = time.monotonic()
        interval = SAY_S
        while not self.asked and not answers(address):
            waited = time.monotonic() - began
            if 0 < self.section.give_up_after <= waited:
                raise RunFailed(
                    f"Ray's head at {address} did not answer for {waited:.0f} s. What was committed stands: run the "
                    "same command again when it is there."
                )
            if time.monotonic() - said >= interval:
                self.say(f"Ray's head at {address} does not answer. Waiting for it.")
                said, interval = time.monotonic(), 2 * interval
            self.wait(1.0)

    def wait(self, seconds: float) -> None:
        """Sleep, unless the run is asked to end."""
        deadline = time.monotonic() + seconds
        while not self.asked and time.monotonic() < deadline:
            time.sleep(TICK_S)

    def say(self, text: str) -> None:
        print(text, flush=True)  # noqa: T201


class Budget:
    """Restarts of a run's drivers, kept in its directory over all its starts."""

    def __init__(self, path: Path, most: int) -> None:
        """`most` restarts, of which each hour gives one back. An object store's run has its file in the spool."""
        self.path, self.most = path, most

    @property
    def left(self) -> int:
        """Restarts that there may still be."""
        return max(0, int(self.most - self.spent))

    @property
    def spent(self) -> float:
        return spent([line["time"] for line in read_lines(self.path)], time.time())

    def spend(self, reason: str) -> float:
        """Note a restart; returns how many seconds to wait before it. Raises RunFailed where none is left."""
        if self.left < 1:
            raise RunFailed(
                f"{reason} No restart is left (cluster.max_restarts = {self.most}, of which each hour gives one back). "
                f"Look for the cause, then run the same command again with a larger one. Restarts so far: {self.path}."
            )
        pause = min(LONGEST_PAUSE_S, 2.0 ** round(self.spent))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), "reason": reason}) + "\n")
        return pause


def spent(times: list[float], now: float) -> float:
    """How much of a budget is gone, after restarts at these Unix times."""
    level, last = 0.0, -math.inf
    for moment in times:
        level = max(0.0, level - (moment - last) / GIVEN_BACK_S) + 1.0
        last = moment
    return max(0.0, level - (now - last) / GIVEN_BACK_S)


def has_ended(attempt: Attempt) -> bool:
    """Whether an attempt has written down that it failed, was stopped, or lost the run to a later one."""
    names = [event["event"] for event in events_of(attempt)]
    return next((name for name in reversed(names) if name in (*STARTS, *ENDS)), None) in ENDS
