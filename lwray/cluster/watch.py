"""While an attempt runs: a progress bar for the person, points for MLflow, from the lines that rank 0 writes."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from lwray.checkpoint.find import committed
from lwray.cluster.job import stop_wait_warning
from lwray.cluster.place import Placement
from lwray.cluster.preflight import Prepared
from lwray.cluster.slurm import grace_warning, start_warning
from lwray.config import Config
from lwray.engine.session import Session
from lwray.store import open_store
from lwray.tracking.follow import Follower, NewPoints
from lwray.tracking.journal import Journal, Line, merged_ledger, merged_metrics, read_lines
from lwray.tracking.mirror import Mirror
from lwray.tracking.mlflow_run import MlflowRun
from lwray.tracking.progress import Progress
from lwray.tracking.rundir import Attempt, RunDir
from lwray.tracking.turns import Turns


@contextmanager
def watched(
    session: Session, prepared: Prepared, placement: Placement, mlflow: MlflowRun | None, *, afar: bool
) -> Iterator[None]:
    """Follow the attempt's metrics until the block ends, however it ends. `afar`: their writer may be elsewhere."""
    start = newest_step(session.run)
    progress = Progress(prepared.total_steps, start, session.config.run.name)
    for line in introduction(session.config, prepared, placement, start):
        progress.note(line)
    for warning in (stop_wait_warning(), start_warning(), grace_warning(save_seconds(session.run))):
        if warning:
            progress.note(warning)
    followers = [Follower(session.attempt, shown(progress, session.attempt))]
    if mlflow:
        fresh, sink = NewPoints(mlflow.last_step), mlflow
        # what a killed driver had no time to record
        sink.log(fresh(merged_metrics(session.run)))
        followers.append(Follower(session.attempt, lambda lines: sink.log(fresh(lines))))
    brought = brought_here(session, afar) if session.run.url else None
    with progress:
        try:
            yield
        finally:
            if brought:
                brought.close()
            for follower in followers:
                stop_watching(follower, session)


def brought_here(session: Session, afar: bool) -> Turns:
    """Brings a request to stop; `afar` also what rank 0 writes on another machine: it is shown and summed up here."""
    attempt = session.attempt
    return Turns(Mirror(session.run), pull=(attempt.request, *((attempt.metrics, attempt.ledger) if afar else ())))


def shown(progress: Progress, attempt: Attempt) -> Callable[[list[Line]], None]:
    """A sink of metric lines: before the first of them, what the workers chose and found (rank 0 wrote it down)."""
    told = False

    def show(lines: list[Line]) -> None:
        nonlocal told
        # a shared file system may show one file later than the other: then it is said with later lines
        if not told and (events := read_lines(attempt.ledger)):
            for line in found_by_workers(events):
                progress.note(line)
            told = any("backend" in event for event in events)
        progress.metrics(lines)

    return show


def found_by_workers(events: list[Line]) -> list[str]:
    """Law 7: checkpoints that were passed over, and how the workers began, once that stands in the ledger."""
    begun = [event for event in events if "backend" in event][-1:]
    if not begun:
        return []
    skipped = [event for event in events if event["event"] == "skipped_checkpoint"]
    lines = [f"{event['checkpoint']} is passed over: {event['reason']}." for event in skipped]
    if skipped:
        lines.append(f"The run goes on at step {begun[0].get('from_step', 0):,}.")
    return [*lines, f"The workers train on backend {begun[0]['backend']}."]


def stop_watching(follower: Follower, session: Session) -> None:
    """A watcher that failed must not make a failure of the run that it watched; the ledger keeps what it said."""
    try:
        follower.stop()
    except Exception as error:
        with closing(Journal.of_driver(session.run, session.attempt)) as journal:
            journal.event("watcher_failed", error=f"{type(error).__name__}: {error}")


def introduction(config: Config, prepared: Prepared, placement: Placement, start: int) -> list[str]:
    """Law 7: what this start is, in a few lines."""
    cores = f"{placement.cpus:g} CPU core{'' if placement.cpus == 1 else 's'}"
    each = f"{cores} and a GPU" if placement.device == "cuda" else cores
    begins = f"goes on at step {start}" if start else "starts"
    rows = f"{prepared.train_rows:,} training rows, {prepared.val_rows:,} held out"
    return [
        f"{config.run.name} {begins} of {prepared.total_steps:,}: {count(prepared.parameters)} parameters, {rows}",
        f"{placement.workers} worker(s) with {each} each, {config.precision.mode}",
    ]


def count(number: int) -> str:
    """A large number as people say it: 519, 12.3 K, 0.69 M."""
    if number < 10_000:
        return str(number)
    return f"{number / 1e3:.1f} K" if number < 500_000 else f"{number / 1e6:.2f} M"


def save_seconds(run: RunDir) -> float:
    """What the run's latest save took; 0 before the first."""
    return next((event["total_s"] for event in reversed(merged_ledger(run)) if event["event"] == "checkpoint"), 0.0)


def newest_step(run: RunDir) -> int:
    """Steps done in the newest committed checkpoint, which the workers will verify."""
    _, newest = next(committed(open_store(run.checkpoints_place)), (None, None))
    return newest.step if newest else 0
