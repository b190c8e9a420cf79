"""One run is one MLflow run, however often it starts, and the driver alone writes to it."""

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from lwray.errors import UserError
from lwray.tracking.follow import Point
from lwray.tracking.secrets import masked

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

log = logging.getLogger(__name__)

Status = Literal["FINISHED", "FAILED", "KILLED"]
T = TypeVar("T")

METRICS_A_BATCH = 1000
PARAMS_A_BATCH = 100
LONGEST_PARAM = 6000
MOST_PENDING = 100_000
"""Points kept while the server is away: about a day of ten metrics every ten seconds."""


class MlflowRun:
    """An open MLflow run, for one thread at a time.

    Only `open` raises: a server that goes away later does not stop training.
    """

    def __init__(self, client: "MlflowClient", run_id: str) -> None:
        self.id = run_id
        self.failures = 0
        """Calls that the server did not take."""
        self.lost = 0
        """Points given up because the server was away for too long."""
        self._client = client
        self._pending: list[Point] = []
        self._last_steps = self._recorded_steps()

    @classmethod
    def open(
        cls,
        uri: str,
        experiment: str,
        run_name: str,
        existing_id: str | None,
        params: Mapping[str, str],
        tags: Mapping[str, str],
    ) -> "MlflowRun":
        """Find `existing_id` and set it running again, or create a run; `id` says which.

        Parameters that the run has already stay as they are. Raises UserError if the server cannot be used.
        """
        try:
            client = _connect(uri)
            run_id = _reopen(client, existing_id) if existing_id else None
            if run_id is None:
                run_id = client.create_run(_experiment_id(client, uri, experiment), run_name=run_name).info.run_id
            _describe(client, run_id, params, tags)
            return cls(client, run_id)
        except _server_errors() as error:
            raise UserError(
                f"Cannot record the run in MLflow at {masked(uri)}: {_short(error)}. Set tracking.uri "
                "to a server that answers, or train without it: tracking.enabled=false."
            ) from None

    def last_step(self, metric: str) -> int:
        """The largest step recorded when the run was opened, -1 if none."""
        return self._last_steps.get(metric, -1)

    def log(self, points: Sequence[Point]) -> None:
        """Record points; what the server does not take is kept for the next call."""
        from mlflow.entities import Metric

        self._pending.extend(points)
        while self._pending:
            batch = self._pending[:METRICS_A_BATCH]
            metrics = [Metric(point.name, point.value, point.timestamp_ms, point.step) for point in batch]
            try:
                self._client.log_batch(self.id, metrics=metrics)
            except _server_errors() as error:
                self._failed("metrics", error)
                break
            del self._pending[: len(batch)]
        excess = max(0, len(self._pending) - MOST_PENDING)
        self.lost += excess
        del self._pending[:excess]

    def artifact(self, path: Path) -> None:
        """Copy a file to the run's artifacts."""
        try:
            self._client.log_artifact(self.id, str(path))
        except _server_errors() as error:
            self._failed(path.name, error)

    def end(self, status: Status) -> None:
        """Record what is pending and the status that the run really has."""
        self.log([])
        try:
            self._client.set_terminated(self.id, status)
        except _server_errors() as error:
            self._failed(f"the status {status}", error)
        lost = self.lost + len(self._pending)
        if lost:
            log.warning("MLflow lacks %d points of this run; metrics.jsonl has them all.", lost)

    def _failed(self, what: str, error: Exception) -> None:
        self.failures += 1
        if self.failures == 1:
            log.warning("MLflow did not take %s (%s); training goes on, and it is tried again.", what, _short(error))

    def _recorded_steps(self) -> dict[str, int]:
        # the latest value of a metric is that of its largest step, which MLflow's plain dict of values drops
        metrics = self._client.get_run(self.id).data.to_proto().metrics
        return {metric.key: metric.step for metric in metrics}


def default_uri(storage: Path) -> str:
    """The MLflow database in a storage directory; artifacts lie beside it, in mlartifacts/."""
    return f"sqlite:///{storage.resolve() / 'mlflow.db'}"


def _connect(uri: str) -> "MlflowClient":
    # Seven tries with doubling pauses would hold up a start, or an end, by minutes. Usage reports to MLflow's
    # makers are the user's to switch on.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    database = _sqlite_file(uri)
    if database is not None:
        database.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        # MLflow's own table mappings use what SQLAlchemy deprecates
        warnings.simplefilter("ignore", DeprecationWarning)
        from mlflow.tracking import MlflowClient

        for noisy in ("alembic", "mlflow.store.db.utils"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        client = MlflowClient(tracking_uri=uri)
        client.search_experiments(max_results=1)
    return client


def _reopen(client: "MlflowClient", run_id: str) -> str | None:
    """`run_id`, running again; None if this server does not know it or the user deleted it there."""
    from mlflow.exceptions import MlflowException

    try:
        found = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None
    if found.info.lifecycle_stage != "active":
        return None
    client.update_run(run_id, status="RUNNING")
    return run_id


def _experiment_id(client: "MlflowClient", uri: str, name: str) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    database = _sqlite_file(uri)
    try:
        return str(client.create_experiment(name, str(database.parent / "mlartifacts") if database else None))
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
        # another run of the same sweep was faster
        return _experiment_id(client, uri, name)


def _describe(client: "MlflowClient", run_id: str, params: Mapping[str, str], tags: Mapping[str, str]) -> None:
    from mlflow.entities import Param, RunTag

    known = client.get_run(run_id).data.params
    fresh = [Param(name, value[:LONGEST_PARAM]) for name, value in params.items() if name not in known]
    for page in _pages(fresh, PARAMS_A_BATCH):
        client.log_batch(run_id, params=page)
    for tag_page in _pages([RunTag(name, value) for name, value in tags.items()], PARAMS_A_BATCH):
        client.log_batch(run_id, tags=tag_page)


def _pages(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _sqlite_file(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///")).resolve() if uri.startswith("sqlite:///") else None


def _server_errors() -> tuple[type[Exception], ...]:
    """What an MLflow call raises for a server, a database or a driver of one that cannot be used."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return (MlflowException, SQLAlchemyError, OSError, ImportError)


def _short(error: Any) -> str:
    return masked(str(error).partition("\n")[0])[:200].rstrip(".")
