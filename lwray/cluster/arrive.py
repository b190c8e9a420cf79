"""A session on the machine of a worker, where the run is on an object store: its own spool, and what must lie there."""

from dataclasses import replace
from pathlib import Path

from lwray.data.published import fetch
from lwray.engine.session import Session
from lwray.errors import RunFailed
from lwray.store import open_store
from lwray.tracking.mirror import Mirror
from lwray.tracking.storage import Storage, pull_ledgers, storage_of


def on_this_machine(session: Session, rank: int) -> Session:
    """The session with this machine's paths, and the files that they name brought here; a shared directory as it is.

    Raises RunFailed where the data were not published, OSError where the storage fails.
    """
    run = session.run
    if not run.url:
        return session
    there, here = storage_of(run), Storage.at(storage_of(run).url)

    def moved(path: Path) -> Path:
        return here.root / path.relative_to(there.root) if path.is_relative_to(there.root) else path

    attempt = replace(session.attempt, path=moved(session.attempt.path))
    session = replace(
        session,
        run=here.run(run.root.name),
        attempt=attempt,
        data=moved(session.data) if session.data else None,
        task_file=moved(session.task_file) if session.task_file else None,
    )
    attempt.logs.mkdir(parents=True, exist_ok=True)
    if session.data is not None and session.data.is_relative_to(here.data):
        fetch_data(here, session.data)
    mirror = Mirror(session.run)
    if session.task_file is not None:
        mirror.pull(session.task_file)
    if rank == 0:
        # how often the run was lost says how often to save
        pull_ledgers(session.run)
        mirror.take_over(attempt.metrics, attempt.ledger, attempt.ids)
    return session


def fetch_data(storage: Storage, data: Path) -> None:
    """Raises RunFailed where the storage does not have them."""
    directory = storage.data / data.relative_to(storage.data).parts[0]
    if not fetch(open_store(storage.data_place), directory):
        raise RunFailed(f"The data of the run are not in {storage.data_place}/{directory.name}: they were removed.")
