"""A group of workers that hangs: found by its silence, its stacks taken, and ended so that another can follow.

Ray notices a worker that is gone and not one that waits for good, and a collective times out after ten minutes only.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lwray.engine.life import Sign
from lwray.engine.session import Session
from lwray.tracking.journal import Line
from lwray.tracking.mirror import Mirror

T = TypeVar("T")

HEARD_S = 5.0
"""Silence counts as far as it was listened to: this much between two looks at most."""
STARTS = 60
"""Times `cluster.hang_s` that reading a checkpoint, compiling and the first step may take."""
STORE_S = 120.0
"""How much later an object store that fails now and then may show a sign."""
DUMP_S, ANSWER_S = 20.0, 60.0
"""How long the stack of a process may take, and how long the nodes are waited for."""
ENDS_S = 300.0
"""Within this time the stacks are taken, the workers killed, and Ray has seen it."""
PR_SET_PTRACER, PR_SET_PTRACER_ANY = 0x59616D61, -1


@dataclass(frozen=True, slots=True)
class Hang:
    """A silence that was too long, and the last sign before it."""

    found: float
    """By time.monotonic()."""
    silent_s: float
    step: int | None
    """Updates done; None where there was no sign before."""
    doing: str

    def __str__(self) -> str:
        at = f"{self.step} updates ({self.doing})" if self.step is not None else "their start"
        return f"The workers hang: there was no sign of life for {self.silent_s:.0f} s, after {at}"


class Vigil:
    """Listens to one group. Times are seconds of one monotonic clock."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._hang_s = session.config.cluster.hang_s
        self._last: Sign | None = None
        self._looked: float | None = None
        self._silent = 0.0

    def look(self, now: float) -> Hang | None:
        """The hang, once the group was silent for longer than it said that it might be. From its start on."""
        if not self._hang_s:
            return None
        passed, self._looked = now - (self._looked or now), now
        try:
            sign = last_sign(self._session)
        except OSError:
            # a storage that does not answer tells nothing of the workers
            self._silent = 0.0
            return None
        if sign is not None and sign != self._last:
            self._last, self._silent = sign, 0.0
        else:
            self._silent += min(passed, HEARD_S)
        step, doing, patience = None, "start", STARTS * self._hang_s
        if self._last:
            step, doing, patience = self._last.step, self._last.doing, self._last.patience_s
        if self._session.run.url:
            patience += STORE_S
        return Hang(now, self._silent, step, doing) if self._silent > patience else None


def last_sign(session: Session) -> Sign | None:
    """The group's last sign of life; None before the first. Raises OSError."""
    path = session.attempt.life
    # what is here is newer where rank 0 is on this machine, so nothing is brought in its place
    found = [path.read_bytes()] if path.exists() else []
    if session.run.url and (there := Mirror(session.run).read(path)):
        found.append(there)
    return max(filter(None, map(Sign.of, found)), key=lambda sign: sign.count, default=None)


def take_stacks(session: Session, place: Line, hang: Hang) -> None:
    """Add the stack of every rank to `stacks/` of the attempt; of a node that does not answer, that."""
    stacks = on_processes(place, stack_of, ANSWER_S)
    paths = []
    session.attempt.stacks.mkdir(exist_ok=True)
    for rank, node in enumerate(place["nodes"]):
        path = session.attempt.stacks / f"rank-{rank:02d}.txt"
        with path.open("a", encoding="utf-8") as file:
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            text = stacks.get(rank, f"The node {node} gave no stack within {ANSWER_S:.0f} s.")
            file.write(f"{hang}. Group {session.attempt.group}, {when}.\n\n{text}\n")
        paths.append(path)
    if session.run.url:
        # without them the run goes on as well
        with suppress(OSError):
            Mirror(session.run).push(*paths)


def kill_group(place: Line) -> None:
    """SIGKILL to every rank, which ends one that sleeps, waits for a device or is stopped; Ray then ends the group."""
    on_processes(place, kill, ANSWER_S)


def on_processes(place: Line, question: Callable[[int], T], seconds: float) -> dict[int, T]:
    """By rank, what `question` comes to on its node for its process; none of nodes that do not answer in `seconds`."""

    def ask(pids: dict[int, int]) -> dict[int, T]:
        return {rank: question(pid) for rank, pid in pids.items()}

    by_node: dict[str, dict[int, int]] = {}
    for rank, (node, pid) in enumerate(zip(place["nodes"], place["pids"], strict=True)):
        by_node.setdefault(node, {})[rank] = pid
    task = ray.remote(num_cpus=0, max_retries=0)(ask)
    asked = [
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(pids)
        for node, pids in by_node.items()
    ]
    done, _ = ray.wait(asked, num_returns=len(asked), timeout=seconds)
    answers: dict[int, T] = {}
    for answer in done:
        # a node may be gone meanwhile
        with suppress(ray.exceptions.RayError):
            answers |= ray.get(answer)
    return answers


def stack_of(pid: int) -> str:
    """What every thread of a process of this machine is at, or why that cannot be said."""
    places = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    command = [shutil.which("py-spy", path=places) or "py-spy", "dump", "--pid", str(pid)]
    said = ""
    # one that has been stopped cannot be paused for the look, and need not be
    for more in ([], ["--nonblocking"]):
        try:
            done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=DUMP_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            said += f"There is no stack: {error}.\n"
            continue
        if done.returncode == 0:
            return done.stdout
        said += done.stderr
    return said


def kill(pid: int) -> None:
    """SIGKILL to a process of this machine, if it is still there."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def allow_stacks() -> None:
    """Let processes of the same user look at this one's stack, as Linux does unless Yama is set up (Ubuntu)."""
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0)
