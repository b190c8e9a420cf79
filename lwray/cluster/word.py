"""What the driver and a group of workers tell each other, by files of the attempt."""

from lwray.engine.session import Session
from lwray.engine.stop import Notice
from lwray.errors import UserError
from lwray.tracking.journal import Line, read_lines
from lwray.tracking.mirror import Mirror
from lwray.tracking.rundir import write_text
from lwray.tracking.storage import pull_logs


def whereabouts(session: Session) -> Line | None:
    """Where the ranks of the group are, once it has begun: rank 0 writes it down. None too where the storage fails."""
    try:
        if session.run.url:
            Mirror(session.run).pull(session.attempt.ledger)
        events = read_lines(session.attempt.ledger)
    except (OSError, UserError):
        # a shared file system may show a line before all of it is there
        return None
    groups = [line for line in events if line["event"] == "group" and line["group"] == session.attempt.group]
    return groups[-1] if groups else None


def ask_to_end(session: Session, notice: Notice) -> bool:
    """Leave the request where rank 0 looks for it; False where it could not be left, and is to be left again."""
    try:
        if session.run.url:
            # there before here: a worker on this machine brings what is there
            Mirror(session.run).put(session.attempt.stop, notice.text())
        write_text(session.attempt.stop, notice.text())
    except OSError as error:
        print(f"The request to stop could not be handed on, and is tried again: {error}.")  # noqa: T201
        return False
    return True


def bring_end(session: Session, *, failed: bool) -> None:
    """From an object store: what the workers left, and of those that failed the logs."""
    if not session.run.url:
        return
    try:
        if not session.attempt.outcome.exists():
            Mirror(session.run).pull(session.attempt.outcome)
        if failed:
            pull_logs(session.run, session.attempt.logs)
    except OSError as error:
        print(f"What the workers left could not be read: {error}.")  # noqa: T201
