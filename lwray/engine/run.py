"""All that a training loop works with, put together from a session."""

from contextlib import ExitStack
from dataclasses import dataclass

from lwray.config import Config
from lwray.data.deal import Deal
from lwray.data.rows import Rows
from lwray.engine.agree import Agreement
from lwray.engine.backends import Backend
from lwray.engine.batch import count_steps, deal_rows
from lwray.engine.build import build
from lwray.engine.feed import Feed
from lwray.engine.interval import Interval, count_losses
from lwray.engine.life import Life
from lwray.engine.metrics import StepMetrics
from lwray.engine.mirrored_save import MirroredSaver
from lwray.engine.progress import Progress
from lwray.engine.save import Saver
from lwray.engine.schedule import Schedule, make_schedule
from lwray.engine.session import Session
from lwray.engine.world import World
from lwray.tasks.task import Task
from lwray.tracking.journal import Journal, merged_ledger
from lwray.tracking.mirror import Mirror
from lwray.tracking.turns import Turns


@dataclass(frozen=True, slots=True)
class Run:
    """One rank's side of a run, in the state of the newest checkpoint. `journal` and `turns` are rank 0's alone."""

    config: Config
    world: World
    task: Task
    deal: Deal
    val_rows: Rows
    total_steps: int
    schedule: Schedule
    backend: Backend
    progress: Progress
    feed: Feed
    agreement: Agreement
    metrics: StepMetrics
    saver: Saver
    life: Life
    journal: Journal | None
    turns: Turns | None
    """Brings the journal to an object store; None where the run is in a directory."""

    def close(self) -> None:
        """End the loader's threads and the writer process, and close the files; all of them, whatever fails."""
        with ExitStack() as stack:
            if self.turns is not None:
                stack.callback(self.turns.close)
            if self.journal is not None:
                stack.callback(self.journal.close)
            stack.callback(self.saver.close)
            stack.callback(self.feed.close)


def assemble(session: Session, world: World) -> Run:
    """Everything of this rank, ready for the next step."""
    config = session.config
    journal = Journal(session.attempt) if world.rank == 0 else None
    task = session.make_task()
    rows = task.rows("train")
    deal = deal_rows(config, task, world.size, world.device.type)
    total_steps = count_steps(config, task, rows)
    backend, progress, frozen = build(session, task, rows, deal, world, journal)
    losses = count_losses(merged_ledger(session.run)) if world.rank == 0 else 0
    interval = Interval(config.checkpoint, losses, progress.seconds)
    turns = mirrored(session) if world.rank == 0 else None
    save_with = (config.checkpoint, session.run, session.attempt, backend, world, journal, frozen, interval)
    return Run(
        config=config,
        world=world,
        task=task,
        deal=deal,
        val_rows=task.rows("val"),
        total_steps=total_steps,
        schedule=make_schedule(config.optim, total_steps),
        backend=backend,
        progress=progress,
        feed=Feed(task, rows, deal, world.rank, config.run.seed, progress.step, total_steps),
        agreement=Agreement(world),
        metrics=StepMetrics(task, world, journal, deal.rows),
        saver=MirroredSaver(*save_with, turns=turns) if session.run.url else Saver(*save_with),
        life=Life(session.attempt.life if world.rank == 0 else None, config),
        journal=journal,
        turns=turns,
    )


def mirrored(session: Session) -> Turns | None:
    """Of a run on an object store, what keeps the journal and the sign of life there."""
    attempt = session.attempt
    push = (attempt.metrics, attempt.ledger, attempt.ids, attempt.life)
    return Turns(Mirror(session.run), push=push) if session.run.url else None
