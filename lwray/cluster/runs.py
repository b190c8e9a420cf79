"""The runs of a storage, from outside: which there are and how they stand, what their ranks say, and how to end one."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lwray.checkpoint.find import committed
from lwray.checkpoint.manifest import Manifest, NewerFormat
from lwray.cluster.lease import Holder, lease_store, process_space, read_holder
from lwray.config import load
from lwray.engine.stop import Notice
from lwray.errors import RunFailed, UserError
from lwray.store import open_store
from lwray.tracking.journal import Line, events_of, last_lines
from lwray.tracking.mirror import Mirror
from lwray.tracking.rundir import Attempt, RunDir, write_text
from lwray.tracking.show import last_ending
from lwray.tracking.storage import Storage, pull_logs, pull_run, run_names, storage_answers

POLL_S = 1.0
SILENT_S = 60.0
"""A driver whose lease stands still for so long, or for three of its beats, is taken for dead."""


@dataclass(frozen=True, slots=True)
class Row:
    """One run, as its newest attempt left it."""

    name: str
    state: str
    """`running`, `finished`, `stopped`, `failed`, `killed`, `not started`; `running or lost` on another machine."""
    cause: str | None
    step: int
    """Updates done, by the last logged step."""
    steps: str
    """Of the whole run, as the configuration has it: `4000`, `2ep`."""
    checkpoint: str | None
    committed: float | None
    """When that checkpoint was, in Unix seconds."""
    attempts: int


def storage_here() -> Storage:
    """LWRAY_STORAGE, else ./runs."""
    return Storage.at(os.environ.get("LWRAY_STORAGE") or "runs")


def rows(storage: Storage) -> Iterator[Row]:
    """Every run of a storage. Raises UserError where it does not answer."""
    for name in run_names(storage):
        run = storage.run(name)
        pull_run(run)
        with storage_answers(run.url):
            yield row_of(run)


def row_of(run: RunDir) -> Row:
    """Raises OSError where the storage fails."""
    attempts = run.attempts_in_order()
    newest = newest_checkpoint(run)
    checkpoint, manifest = newest or (None, None)
    if not attempts:
        return Row(run.root.name, "not started", None, 0, "", checkpoint, None, 0)
    last = attempts[-1]
    ending = last_ending(events_of(last))
    logged = [line["step"] + 1 for line in last_lines(last.metrics) if "loss" in line]
    return Row(
        name=run.root.name,
        state=ending["event"] if ending else without_end(run),
        cause=ending.get("cause") if ending else None,
        step=max([*logged, manifest.step if manifest else 0]),
        steps=str(load(last.config).config.train.steps) if last.config.exists() else "",
        checkpoint=checkpoint,
        committed=manifest.time if manifest else None,
        attempts=len(attempts),
    )


def without_end(run: RunDir) -> str:
    """The state of a run whose newest attempt has said nothing of an end. Raises OSError where the storage fails."""
    holder = trainer(run)
    if holder is None:
        return "killed"
    return "running" if holder.space == process_space() else "running or lost"


def newest_checkpoint(run: RunDir) -> tuple[str, Manifest] | None:
    """Name and manifest of the newest that is committed; None too where a later version of lwray wrote it."""
    try:
        return next(committed(open_store(run.checkpoints_place)), None)
    except NewerFormat:
        return None


def newest_attempt(run: RunDir) -> Attempt:
    """Raises UserError for a run that was never started."""
    attempts = run.attempts_in_order()
    if not attempts:
        raise UserError(f"{run.place} has no attempt yet: it was never started.")
    return attempts[-1]


def ending_of(run: RunDir, attempt: Attempt) -> Line | None:
    """The event that ended an attempt, as its storage has it now; None for one that runs, or was killed."""
    if run.url:
        Mirror(run).pull(attempt.ledger, attempt.driver_ledger)
    return last_ending(events_of(attempt))


def log_lines(run: RunDir, rank: int | None, *, follow: bool) -> Iterator[str]:
    """What the ranks of the newest attempt wrote, of one rank or of all; `follow` goes on until the attempt has ended.

    Raises UserError where there is nothing to read.
    """
    attempt = newest_attempt(run)
    wanted = "rank-*.txt" if rank is None else f"rank-{rank:02d}.txt"
    read_to: dict[Path, int] = {}
    while True:
        # asked before the logs are read, so that what follows the end is read too
        with storage_answers(run.url):
            ended = ending_of(run, attempt) is not None
            if run.url:
                pull_logs(run, attempt.logs)
        for path in sorted(attempt.logs.glob(wanted)):
            for line in fresh_lines(path, read_to):
                yield line if rank is not None else f"[{int(path.stem.removeprefix('rank-'))}] {line}"
        if ended or not follow:
            break
        time.sleep(POLL_S)
    if not read_to:
        raise UserError(no_logs(attempt, rank))


def fresh_lines(path: Path, read_to: dict[Path, int]) -> list[str]:
    """Whole lines that were not there the last time."""
    with path.open("rb") as file:
        file.seek(read_to.setdefault(path, 0))
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    read_to[path] += len(whole)
    return whole.decode(errors="replace").splitlines()


def no_logs(attempt: Attempt, rank: int | None) -> str:
    there = ", ".join(str(int(path.stem.removeprefix("rank-"))) for path in sorted(attempt.logs.glob("rank-*.txt")))
    if there:
        return f"Attempt {attempt.number} has no log of rank {rank}; it has those of {there}."
    return (
        f"Attempt {attempt.number} has no logs: its workers have not begun, or it has none but what it printed "
        "(--launcher inline, torchrun)."
    )


def stop_run(run: RunDir, seconds: float, say: Callable[[str], None]) -> None:
    """Ask the newest attempt to commit and end, and wait until its driver has gone.

    Raises RunFailed where it has not after `seconds`, or does not live; UserError where the storage does not answer.
    """
    attempt = newest_attempt(run)
    with storage_answers(run.url):
        if ending_of(run, attempt) and trainer(run) is None:
            say(f"{run.root.name} has ended already.")
            return
        write_text(attempt.request, Notice("TERM").text())
        if run.url:
            Mirror(run).push(attempt.request)
        say(f"{run.root.name}, attempt {attempt.number}, is asked to commit and end.")
        wait_for_end(run, attempt, seconds)


def wait_for_end(run: RunDir, attempt: Attempt, seconds: float) -> None:
    """Raises RunFailed where the driver has not gone after `seconds`, or went without a word; OSError."""
    asked = moved = time.monotonic()
    before = trainer(run)
    while True:
        # asked before the ledger is read, because a driver writes its end first
        now = trainer(run)
        ended = ending_of(run, attempt) is not None
        if now is None:
            break
        if now != before:
            before, moved = now, time.monotonic()
        still = time.monotonic() - moved
        if still > max(SILENT_S, 3 * now.every) or time.monotonic() - asked > seconds:
            raise RunFailed(
                f"{run.root.name} has not ended {time.monotonic() - asked:.0f} s after it was asked: {now} has it, and "
                f"gave its last sign of life {still:.0f} s ago."
            )
        time.sleep(POLL_S)
    if not ended:
        raise RunFailed(
            f"Nothing trains {run.root.name}: attempt {attempt.number} was killed, and could not say so. What it had "
            "committed stands. If its `lwray train` starts it again, ask once more."
        )


def trainer(run: RunDir) -> Holder | None:
    """Who holds the run's lease and, as far as this machine can tell, lives. Raises OSError where the storage fails."""
    holder = read_holder(lease_store(run))
    return None if holder is None or holder.is_gone else holder
