"""The loop: one global batch a step, the same on any number of workers."""

import time
from collections.abc import Mapping
from contextlib import closing

from lwray.engine.backends.plain import DDP
from lwray.engine.build import out_of_time
from lwray.engine.deterministic import make_deterministic
from lwray.engine.evaluate import evaluate
from lwray.engine.feed import StepRows, passes
from lwray.engine.leaving import Leaving
from lwray.engine.objective import Objective
from lwray.engine.progress import Progress
from lwray.engine.run import Run, assemble
from lwray.engine.session import REGROUP, Outcome, Session
from lwray.engine.stop import StopRequest
from lwray.engine.world import World
from lwray.errors import Diverged
from lwray.faults import reach


def train(session: Session, world: World, stop: StopRequest) -> Outcome:
    """Train from the newest whole checkpoint, or from the start, until the run ends or is asked to stop."""
    if session.config.train.deterministic:
        make_deterministic()
    with closing(assemble(session, world)) as run:
        try:
            ends_at = session.ends_at if world.rank == 0 else None
            run_steps(run, Leaving(stop, ends_at, lambda: run.saver.seconds))
        except Diverged:
            # an earlier state that is being saved is a good one
            run.life.saves(run.progress.step)
            run.saver.finish(run.saver.deadline)
            raise
        outcome: Outcome = world.from_first(outcome_of(run.progress))
        if run.journal is not None and outcome.cause not in REGROUP:
            name = "finished" if outcome.finished else "stopped"
            run.journal.event(name, cause=outcome.cause, step=outcome.step)
    return outcome


def run_steps(run: Run, leaving: Leaving) -> None:
    """All steps that are left; `run.progress` says how far it came and why it ended."""
    config, progress, metrics = run.config, run.progress, run.metrics
    run.agreement.begin(run.feed.weights(progress.step))
    weights = run.agreement.end()
    order_buckets(run, weights)
    make_up_for_evaluation(run, leaving)

    while progress.ended is None and progress.step < run.total_steps:
        step = progress.step
        started = time.perf_counter()
        reach("step.data", step, run.world.rank)
        step_rows = run.feed.take(step)
        next_weights = run.feed.weights(step + 1)
        metrics.waited(time.perf_counter() - started)
        # begun here and read at the step's end: no device waits for what the ranks agree on
        last = step + 1 == run.total_steps
        evaluates = len(run.val_rows) > 0 and (last or is_due(step + 1, config.eval.every_steps))
        run.agreement.begin(next_weights | flags(run, leaving, evaluates))

        reach("step.backward", step, run.world.rank)
        objective = Objective(run.task, weights, run.world.device)
        accumulate(run, step_rows, objective)
        lr = run.schedule(step)
        norm = run.backend.update(lr)

        agreed = run.agreement.end()
        reach("step.update", step, run.world.rank)
        weights = {term: agreed[term] for term in run.task.terms}
        record_rows(run, step, step_rows)
        progress.step += 1
        progress.seconds += time.perf_counter() - started
        leaving.stepped(time.perf_counter() - started)
        run.life.took(time.perf_counter() - started)

        # the machines go: what can be made good at the next start is left to it
        evaluates &= last or not agreed["stop"]
        saves = agreed["save"] > 0 or is_due(progress.step, config.checkpoint.every_steps) or run.saver.owes
        noticed = agreed["notice"] > 0
        logged = is_due(progress.step, config.train.log_every) or step == 0 or last
        logged |= evaluates or saves or noticed or agreed["stop"] > 0 or agreed["out_of_time"] > 0
        metrics.step(step, lr, objective, norm, logged=logged)

        paused = time.perf_counter()
        if noticed and not last:
            save_at_notice(run, leaving)
        if evaluates:
            metrics.flush()
            evaluate_after(run, step, leaving)
        progress.ended = why_end(run, agreed, leaving, last, evaluates)
        run.saver.advance(agreed)
        save(run, due=saves and not noticed)
        metrics.paused(time.perf_counter() - paused)
        if progress.ended is None:
            run.life.trains(progress.step)


def accumulate(run: Run, step_rows: StepRows, objective: Objective) -> None:
    """Forward and backward over a step's micro-batches; gradients are reduced in the last pass."""
    for micro, part, last in passes(step_rows, run.task.parts, run.world.device):
        with run.backend.micro_step(last):
            loss = objective.share(run.backend(micro.batch, micro.keys, part), micro)
            run.backend.backward(loss * run.backend.grad_scale)


def order_buckets(run: Run, weights: Mapping[str, float]) -> None:
    """One backward that does not count: DDP orders its buckets by it, so a resumed run sums as the whole one did."""
    step = run.progress.step
    if isinstance(run.backend, DDP) and step < run.total_steps:
        accumulate(run, run.feed.peek(step), Objective(run.task, weights, run.world.device))
        run.backend.discard()


def flags(run: Run, leaving: Leaving, evaluates: bool) -> dict[str, float]:
    """What this rank has to say at the step boundary; all hear a sum above zero. Rank 0's clock is the clock."""
    first = run.world.rank == 0
    return {
        "save": float(first and run.saver.interval.is_due()),
        "out_of_time": float(first and out_of_time(run.config, run.progress)),
        **leaving.flags(evaluates=evaluates),
        **run.saver.flags(),
    }


def make_up_for_evaluation(run: Run, leaving: Leaving) -> None:
    """One that was due when the workers before had no time for it, with all that follows from it."""
    progress = run.progress
    due = len(run.val_rows) > 0 and progress.step > 0 and is_due(progress.step, run.config.eval.every_steps)
    if due and progress.val_step != progress.step:
        evaluate_after(run, progress.step - 1, leaving)
        progress.ended = why_end(run, {"out_of_time": 0.0, "stop": 0.0}, leaving, last=False, evaluated=True)
        save(run, due=False)


def evaluate_after(run: Run, step: int, leaving: Leaving) -> None:
    """The loss of the state after `step` over the held-out rows, into the run's progress and journal."""
    began = time.perf_counter()
    reach("evaluate", step, run.world.rank)
    run.progress.evaluated(evaluation(run), run.config.eval.min_delta)
    record_evaluation(run, step)
    leaving.evaluated(time.perf_counter() - began)


def save(run: Run, *, due: bool) -> None:
    """The last state is saved while training stands still, others beside it; none that is not finite."""
    progress = run.progress
    is_best = run.config.checkpoint.keep_best > 0 and progress.is_best
    if not (due or is_best or progress.ended):
        return
    run.life.saves(progress.step)
    run.metrics.flush()
    if run.metrics.loss is not None:
        progress.loss = run.metrics.loss
    if progress.ended:
        run.saver.save(progress, "final", last=True)
    else:
        run.saver.begin(progress, "best" if is_best else "periodic")


def save_at_notice(run: Run, leaving: Leaving) -> None:
    """The machines will be gone, and there is time: this state is safe first, then the training goes on."""
    run.life.saves(run.progress.step)
    run.metrics.flush()
    run.progress.loss = run.metrics.loss
    if (notice := leaving.heed()) and run.journal is not None:
        run.journal.event("notice", cause=notice.cause, deadline=notice.deadline, step=run.progress.step)
    run.saver.save(run.progress, "notice")


def why_end(run: Run, agreed: Mapping[str, float], leaving: Leaving, last: bool, evaluated: bool) -> str | None:
    """None to go on. Ranks agree on whether; the name of a signal is rank 0's to tell."""
    section, progress = run.config.eval, run.progress
    if last:
        return "finished"
    if evaluated and progress.val_loss is not None:
        if section.stop_below is not None and progress.val_loss < section.stop_below:
            return "stop_below"
        if section.patience and progress.evals_since_best >= section.patience:
            return "patience"
    if agreed["out_of_time"]:
        return "max_hours"
    if agreed["stop"]:
        return leaving.notice.cause if leaving.notice else "TERM"
    return None


def is_due(step: int, every: int) -> bool:
    """Whether `step` updates complete another `every`; 0 is never."""
    return every > 0 and step % every == 0


def record_rows(run: Run, step: int, step_rows: StepRows) -> None:
    """With `data.log_ids`: the rows that the ranks really fed the model, gathered, never recomputed."""
    if run.config.data.log_ids:
        everyone = run.world.gather(step_rows.ids)
        if run.journal is not None:
            run.journal.ids(step, sorted(row for ids in everyone for row in ids))


def evaluation(run: Run) -> float:
    """The validation loss; each pass is a sign of life."""
    step = run.progress.step
    return evaluate(run.backend, run.task, run.val_rows, run.deal, run.world, lambda: run.life.evaluates(step))


def record_evaluation(run: Run, step: int) -> None:
    """One line of the evaluation after `step`, with what else the loss says (bits per byte)."""
    val_loss = run.progress.val_loss
    if run.journal is not None and val_loss is not None:
        more = {f"val_{name}": value for name, value in run.task.summary(val_loss).items()}
        run.journal.metrics(step=step, val_loss=val_loss, **more)


def outcome_of(progress: Progress) -> Outcome:
    """What the driver is told."""
    return Outcome(
        cause=progress.ended or "finished",
        step=progress.step,
        loss=progress.loss,
        val_loss=progress.val_loss,
        best_val_loss=progress.best_val_loss,
        seconds=progress.seconds,
    )
