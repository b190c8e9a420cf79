"""A run that is taken over several starts, on the layouts of its legs, and killed in between at drawn steps."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from lwray.tracking.journal import read_lines
from lwray.tracking.rundir import RunDir

REPOSITORY = Path(__file__).parents[2]
FILE = "configs/invariance.toml"
LEG_SECONDS = 400.0
"""A leg that takes longer is ended; the first one with a ZeRO backend compiles an extension of DeepSpeed's."""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
OWN = ("LWRAY_STORAGE", "RAY_ADDRESS", "MLFLOW_TRACKING_URI")
"""Variables that would lead a run elsewhere."""


class LegFailed(Exception):
    """A leg ended by itself before its kill, with an error, or not in time."""


@dataclass(frozen=True, slots=True)
class Leg:
    """One start of a run: how the same global batches are computed this time."""

    workers: int = 1
    backend: str = "none"
    micro: int = 0
    """Rows a micro-batch; 0 leaves it to lwray."""
    ray: bool = False
    """Start the workers on Ray instead of under torchrun."""

    def __str__(self) -> str:
        layout = f"{self.workers} {self.backend}" if self.workers > 1 else "1"
        return layout + (f" micro {self.micro}" if self.micro else "") + (" Ray" if self.ray else "")

    def command(self, keys: tuple[str, ...]) -> list[str]:
        """`lwray train` of `configs/invariance.toml` on this layout; one worker is one process, without a launcher."""
        torchrun = self.workers > 1 and not self.ray
        launcher = "ray" if self.ray else "torchrun" if torchrun else "inline"
        start = [sys.executable, *([*TORCHRUN, str(self.workers)] if torchrun else []), "-m", "lwray", "train", FILE]
        # workers of a Ray here share the cores that there are; one thread each either way
        cores = min(1.0, len(os.sched_getaffinity(0)) / self.workers)
        layout = [f"parallel.workers={self.workers}", f"parallel.backend={self.backend}"]
        layout += [f"parallel.cpus_per_worker={cores if self.ray else 1}"]
        layout += [f"batch.micro_size={self.micro}"] if self.micro else []
        return [*start, f"--launcher={launcher}", *layout, *keys]


@dataclass(frozen=True, slots=True)
class Journey:
    """A run by name: so many steps over `legs`, with a kill between each leg and the next."""

    name: str
    steps: int
    legs: tuple[Leg, ...] = (Leg(),)
    keys: tuple[str, ...] = ()

    @property
    def directory(self) -> str:
        """The name as lwray takes it."""
        return self.name.replace(" ", "-")

    def all_keys(self, storage: Path) -> tuple[str, ...]:
        """Options and keys that all legs share."""
        return (
            f"--storage={storage}",
            f"run.name={self.directory}",
            f"train.steps={self.steps}",
            f"eval.every_steps={self.steps // 3}",
            f"checkpoint.every_steps={max(5, self.steps // 30)}",
            "eval.baseline=false",
            "tracking.enabled=false",
            *self.keys,
        )


def travel(journey: Journey, storage: Path, draw: random.Random) -> list[int]:
    """Run all legs; returns the last step that was recorded at each kill. Raises LegFailed."""
    run = RunDir(storage / journey.directory)
    kills = []
    for number, (leg, goal) in enumerate(zip(journey.legs, [*goals(journey, draw), None], strict=True), start=1):
        log = storage / ".logs" / f"{journey.directory}-{number}.txt"
        with started(leg.command(journey.all_keys(storage)), log) as process:
            if goal is None:
                wait_for_end(process, log)
            else:
                wait_for_step(run, number, goal, process, log)
                # into any part of a step, or of a commit
                time.sleep(draw.uniform(0.0, 0.05))
                kill(process)
                if process.returncode != -signal.SIGKILL:
                    raise LegFailed(f"leg {number} ended before it was killed")
                kills.append(last_step(run))
    return kills


def goals(journey: Journey, draw: random.Random) -> list[int]:
    """A step for each kill, drawn, in order; the last leg keeps a seventh of the steps for itself."""
    kills = len(journey.legs) - 1
    return [int(journey.steps * 6 / 7 / kills * (number + draw.uniform(0.25, 1.0))) for number in range(kills)]


@contextlib.contextmanager
def started(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own that writes to `log`; gone afterwards, with its workers, come what may."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name not in OWN} | {"OMP_NUM_THREADS": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the groups of `process` and all below it: torchrun and Ray give workers groups of their own."""
    if process.poll() is not None:
        return
    root = psutil.Process(process.pid)
    family = [root, *root.children(recursive=True)]
    groups = dict.fromkeys(group for member in family if (group := group_of(member.pid)) is not None)
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    process.wait()
    psutil.wait_procs(family, timeout=30)


def group_of(pid: int) -> int | None:
    """The process group; None for a process that is gone."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def wait_for_step(run: RunDir, attempt: int, step: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until the attempt has recorded `step` and has committed once, so that the next leg goes on from its state."""
    deadline = time.monotonic() + LEG_SECONDS
    while not (last_step(run) >= step and committed(run, attempt)):
        if process.poll() is not None:
            raise LegFailed(f"the leg ended by itself before step {step}\n{end_of(log)}")
        if time.monotonic() > deadline:
            raise LegFailed(f"step {step} did not come within {LEG_SECONDS:.0f} s\n{end_of(log)}")
        time.sleep(0.02)


def wait_for_end(process: subprocess.Popen[bytes], log: Path) -> None:
    try:
        code = process.wait(LEG_SECONDS)
    except subprocess.TimeoutExpired:
        raise LegFailed(f"the last leg did not end within {LEG_SECONDS:.0f} s\n{end_of(log)}") from None
    if code != 0:
        raise LegFailed(f"the last leg ended with code {code}\n{end_of(log)}")


def last_step(run: RunDir) -> int:
    """The last step that the newest attempt has recorded; -1 before its first."""
    attempts = run.attempts_in_order()
    return max((line["step"] for line in read_lines(attempts[-1].metrics)), default=-1) if attempts else -1


def committed(run: RunDir, attempt: int) -> bool:
    """Whether the attempt of this number has committed a checkpoint."""
    ledger = run.attempts / f"{attempt:04d}" / "ledger.jsonl"
    return any(event["event"] == "checkpoint" for event in read_lines(ledger))


def end_of(log: Path) -> str:
    """The last lines of what a leg has printed; torchrun alone says much after the error."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-60:])
