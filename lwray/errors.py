"""What can go wrong, and the exit code that says so."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every `lwray` command."""

    FINISHED = 0
    FAILED = 1
    BAD_INPUT = 2
    PREEMPTED = 75
    INTERRUPTED = 130
    TERMINATED = 143


class UserError(Exception):
    """Bad command line, configuration or input: nothing was started. The message says what to do. Exit code 2."""


class RunFailed(Exception):
    """A run that had started ended in a failure that is not the user's input. Exit code 1."""


class Diverged(RunFailed):
    """A loss or gradient is no finite number: all ranks see it in the same step."""


class Superseded(RunFailed):
    """A later attempt of the same run has begun: this one must not write anything that belongs to the run."""
