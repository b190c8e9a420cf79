"""What a launcher hands to a worker, and what the worker hands back."""

from dataclasses import dataclass
from pathlib import Path

from lwray.config import Config
from lwray.engine.initial import Initial
from lwray.tasks.find import find_task
from lwray.tasks.task import Task
from lwray.tracking.rundir import Attempt, RunDir


@dataclass(frozen=True, slots=True)
class Session:
    """One start of a run: everything a worker needs, picklable, with paths that every worker sees."""

    config: Config
    run: RunDir
    attempt: Attempt
    data: Path | None
    """What the task's `prepare` made."""
    task_file: Path | None
    """The run's own copy of a user's task file."""
    threads: int
    """CPU threads of one worker."""
    device: str
    """`cpu` or `cuda`."""
    total_steps: int = 0
    """Of the whole run."""
    initial: Initial | None = None
    """What `init.from` names, for a run without a checkpoint of its own."""
    ends_at: float | None = None
    """Unix seconds at which the allocation of this attempt ends; None where nobody said."""

    def make_task(self) -> Task:
        return find_task(self.config.task.name, self.task_file)(self.config, self.data)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended: `cause` is one of FINISHED, or that of the notice that ended it."""

    cause: str
    step: int
    loss: float | None
    val_loss: float | None
    best_val_loss: float | None
    seconds: float
    """Training seconds over all attempts."""

    @classmethod
    def before_any_step(cls, cause: str) -> "Outcome":
        """A start that was stopped before its workers were there."""
        return cls(cause, 0, None, None, None, 0.0)

    @property
    def finished(self) -> bool:
        return self.cause in FINISHED


PREEMPTED = ("preempted", "time_limit")
"""Causes after which the same command is to be run again: the machines went."""
REGROUP = ("resize", "drain")
"""Causes after which the same attempt goes on, with another group of workers."""
FINISHED = ("finished", "stop_below", "patience", "max_hours")
"""Causes after which a run needs no more; out of hours, it goes on when it is given more."""
