"""Ray on one node of a Slurm job: `python -m lwray.cluster.slurm_node ROLE --meeting DIR`; cluster/slurm starts it.

`head` starts a cluster and writes its address into the meeting directory, `node` joins it and stays until it is told to
end (SIGUSR2), and `member` is a job of its own, which comes and goes: at a notice it drains its node, and where nothing
needs it for `cluster.idle_leave` it leaves. SIGTERM says nothing to the first two: the driver of their job hears it
too, and needs them for its commit.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from ray.exceptions import RayError

from lwray.cluster.ray_node import RayNode
from lwray.cluster.slurm import NEAR_S, job_end, preemption
from lwray.config import load
from lwray.errors import ExitCode

TICK_S, LOOK_S = 0.5, 5.0
"""Seconds between looks at signals and at the process, and at the cluster."""
CANCELLED_S = 20.0
"""A cancelled job is killed after Slurm's KillWait, 30 s by default."""
SPARE_S = 3.0
"""Before the deadline, what Ray needs to end its processes."""


class Told:
    """The last signal; handlers only set it."""

    def __init__(self, *heard: signal.Signals) -> None:
        self.signal: signal.Signals | None = None
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            # not ignored: Ray's processes would inherit that
            signal.signal(number, self._hear if number in heard else lambda number, frame: None)

    def wait(self, condition: Callable[[], bool]) -> None:
        """Until it is so, or a signal has come."""
        time.sleep(TICK_S)
        while self.signal is None and not condition():
            time.sleep(TICK_S)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0; 1 where Ray ended by itself; 75 where the job is to start again; 143 where it is cancelled."""
    parser = argparse.ArgumentParser(prog="python -m lwray.cluster.slurm_node", allow_abbrev=False)
    parser.add_argument("role", choices=("head", "node", "member"))
    parser.add_argument("--meeting", type=Path, required=True, help="a directory that all nodes see")
    parser.add_argument("--scratch", type=Path, default=Path("/tmp"), help="local room for Ray's files")
    parser.add_argument("--only-drives", action="store_true", help="head: take no workers")
    parser.add_argument("--run", nargs=argparse.REMAINDER, help="member, and last: CONFIG [section.key=value …]")
    arguments = parser.parse_args(argv)
    if arguments.role == "head":
        return head(arguments.meeting, arguments.scratch, arguments.only_drives)
    if arguments.role == "node":
        return node(arguments.meeting, arguments.scratch)
    overrides = [word for word in arguments.run if "=" in word and not word.startswith("-")]
    file = next(word for word in arguments.run if "=" not in word and not word.startswith("-"))
    return member(arguments.meeting, arguments.scratch, load(Path(file), overrides).config.cluster.idle_leave)


def head(meeting: Path, scratch: Path, only_drives: bool) -> int:
    """A new cluster, until SIGUSR2."""
    told = Told(signal.SIGUSR2)
    with RayNode(scratch, None, {"CPU": 0, "GPU": 0} if only_drives else slurms_share()) as ray:
        told.wait(lambda: ray.is_member() or not ray.runs())
        draft = meeting / "address.tmp"
        draft.write_text(ray.address)
        draft.replace(meeting / "address")
        return serve(ray, told)


def node(meeting: Path, scratch: Path) -> int:
    """A node of the head's own job, until SIGUSR2."""
    told = Told(signal.SIGUSR2)
    told.wait(lambda: bool(address_in(meeting)))
    with RayNode(scratch, address_in(meeting), slurms_share()) as ray:
        told.wait(lambda: ray.is_member() or not ray.runs())
        (meeting / f"joined-{os.environ['SLURM_PROCID']}").touch()
        return serve(ray, told)


def serve(ray: RayNode, told: Told) -> int:
    told.wait(lambda: not ray.runs())
    return ExitCode.FINISHED if told.signal else ExitCode.FAILED


def member(meeting: Path, scratch: Path, patience: float) -> int:
    """Join, and again where there is another head, until there is a notice, or for `patience` seconds nothing to do."""
    told, needed = Told(signal.SIGTERM, signal.SIGUSR1), time.monotonic()
    while told.signal is None and time.monotonic() - needed < patience:
        if address := address_in(meeting):
            with RayNode(scratch, address, slurms_share()) as ray:
                needed = take_part(ray, told, needed, patience)
                if told.signal is not None:
                    leave(ray)
        told.wait(lambda: True)
    if told.signal is None:
        say(f"Nothing has needed this node for {patience:.0f} s: it leaves.")
        return ExitCode.FINISHED
    return ExitCode.PREEMPTED if told.signal == signal.SIGUSR1 or preemption() else ExitCode.TERMINATED


def take_part(ray: RayNode, told: Told, needed: float, patience: float) -> float:
    """When something last ran here; returns at a notice, when Ray has ended, and when nothing ran for `patience`."""
    looked = 0.0
    while ray.runs() and told.signal is None and time.monotonic() - needed < patience:
        if time.monotonic() - looked >= LOOK_S:
            looked = time.monotonic()
            needed = looked if ray.is_busy() else needed
        time.sleep(TICK_S)
    return needed


def leave(ray: RayNode) -> None:
    """Say by when this node is gone, and wait for what runs here to end: Ray lets a drained node go once it is idle."""
    taken = preemption()
    deadline = (taken.deadline if taken else job_end()) or time.time()
    if taken is None and deadline - time.time() > NEAR_S:
        deadline = time.time() + CANCELLED_S
    say(f"This node goes in {deadline - time.time():.0f} s: draining it.")
    try:
        ray.drain(deadline - SPARE_S)
    except RayError as error:
        # the run sees that the node is gone, and goes on without it
        say(f"The head takes no notice: {error}")
    while ray.is_member() and time.time() < deadline - SPARE_S:
        time.sleep(TICK_S)


def slurms_share() -> dict[str, int]:
    """What Slurm gives this job of this node."""
    return {"CPU": int(os.environ["SLURM_CPUS_ON_NODE"]), "GPU": int(os.environ.get("SLURM_GPUS_ON_NODE", "0"))}


def address_in(meeting: Path) -> str:
    """The head's address; empty before it is there."""
    file = meeting / "address"
    return file.read_text() if file.exists() else ""


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
