"""The driver of a run: check, open an attempt, train, and say how it ended."""

import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lwray.checkpoint.fence import superseded_by
from lwray.cluster.launcher import Inline, Launcher, Torchrun
from lwray.cluster.lease import Holder, Lease, await_lease
from lwray.cluster.notice import allocation_end, explain
from lwray.cluster.place import Placement
from lwray.cluster.preflight import (
    Prepared,
    check_checkpoints,
    check_fresh,
    check_identity,
    check_layout,
    check_room,
    check_weights,
    fetch_known_data,
    find_storage,
    finished_summary,
    own_task_file,
    prepare_run,
)
from lwray.cluster.watch import watched
from lwray.config import Config, Resolved
from lwray.engine.initial import find_initial
from lwray.engine.session import FINISHED, PREEMPTED, Outcome, Session
from lwray.engine.stop import StopRequest
from lwray.errors import ExitCode, RunFailed, Superseded, UserError
from lwray.store import open_store
from lwray.tracking.journal import Journal
from lwray.tracking.mirror import Mirror
from lwray.tracking.mlflow_run import MlflowRun, default_uri
from lwray.tracking.rundir import (
    Attempt,
    Identity,
    RunDir,
    config_toml,
    env_record,
    maths_of,
    set_aside,
    write_json,
    write_text,
)
from lwray.tracking.secrets import masked
from lwray.tracking.storage import Storage, pull_run, storage_answers
from lwray.tracking.summary import show_summary, summarise


@dataclass(frozen=True, slots=True)
class Options:
    """Command-line options of `lwray train`."""

    storage: str | None = None
    fresh: bool = False
    launcher: str = "ray"
    restarted: str | None = None
    """Why the driver before this one died, where it is the same command that goes on."""


def make_launcher(name: str) -> Launcher:
    """`ray`, `torchrun` or `inline`."""
    if name == "inline":
        return Inline()
    if name == "torchrun":
        return Torchrun()
    from lwray.cluster.ray_launcher import RayLauncher

    return RayLauncher()


def drive(resolved: Resolved, options: Options) -> ExitCode:
    """Train a run from its file to its summary. Raises UserError before anything is started, RunFailed after."""
    config = resolved.config
    with closing(make_launcher(options.launcher)) as launcher:
        storage = find_storage(options.storage, config, joins_cluster=launcher.joins_cluster)
        run = storage.run(config.run.name)
        pull_run(run)
        lost = await_lease(run, config, print)
        resolved = with_storage(resolved, storage, options.storage)
        if options.fresh:
            check_fresh(run)
        else:
            check_identity(run, config)
            with storage_answers(run.url):
                check_checkpoints(run)
            if summary := finished_summary(run, config):
                show_summary(summary, again=True)
                return ExitCode.FINISHED
            fetch_known_data(run)
        before = None if options.fresh else run
        # before the data, which may take hours
        with storage_answers(run.url):
            initial = find_initial(config, storage, before)
        placement = launcher.place(config)
        launcher.check_storage(storage)
        prepared = prepare_run(config, storage, own_task_file(config), initial)
        if prepared.data is not None and not (storage.url and prepared.data.is_relative_to(storage.data)):
            launcher.check_data(prepared.data)
        check_layout(config, prepared, placement.workers, placement.device)
        check_room(storage, prepared.parameters)
        if weights := check_weights(prepared, config, before):
            if "://" not in weights:
                launcher.check_data(Path(weights))
            # law 7: `newest` and `best` are a step from now on
            print(f"init.from = {config.init.source}: the weights are those of {prepared.initial}.")  # noqa: T201
        if not options.fresh:
            check_identity(run, config, prepared.data_fingerprint)
        # the data may have taken hours
        lost = await_lease(run, config, print, judged=lost)
        attempt = RunningAttempt.open(resolved, storage, run, placement, prepared, options.fresh)
        attempt.note_before(lost, options.restarted)
        return attempt.train(launcher)


@dataclass(frozen=True, slots=True)
class RunningAttempt:
    """One start of a run, from its directory to summary.json and the status in MLflow."""

    session: Session
    placement: Placement
    prepared: Prepared
    mlflow: MlflowRun | None
    mlflow_uri: str
    started: float
    mirror: Mirror | None
    """Brings what the driver writes to an object store."""

    @classmethod
    def open(
        cls, resolved: Resolved, storage: Storage, run: RunDir, placement: Placement, prepared: Prepared, fresh: bool
    ) -> "RunningAttempt":
        """Find or create the run's MLflow run and identity, then the attempt's own directory.

        `fresh` sets an earlier run of this name aside, once nothing can go wrong any more.
        """
        config = resolved.config
        uri = tracking_uri(config, storage)
        known_id = None if fresh else recorded_mlflow_id(run)
        mlflow = open_mlflow(config, uri, run, known_id) if config.tracking.enabled else None
        taken = 0
        if fresh and run.root.exists():
            # an old driver that still lives must see that it has lost the name
            taken = RunDir(set_aside(run.root)).last_attempt()
        run.root.mkdir(parents=True, exist_ok=True)
        created = Identity.read(run.identity).created if run.identity.exists() else time.time()
        mlflow_id = mlflow.id if mlflow else known_id
        init = asdict(prepared.initial) if prepared.initial else None
        identity = Identity(maths_of(config), prepared.data_fingerprint, mlflow_id, created, init)
        earlier = run.attempts_in_order()
        mirror = Mirror(run) if run.url else None
        with storage_answers(run.url):
            if mirror:
                # before it is here: what is here alone is taken for the rest of a run that was removed there
                mirror.put(run.identity, identity.text())
            identity.write(run.identity)
            attempt = run.new_attempt(after=taken)
        write_text(attempt.config, config_toml(resolved))
        write_json(attempt.env, env_record(sys.argv))
        session = Session(
            config=config,
            run=run,
            attempt=attempt,
            data=prepared.data,
            task_file=keep_task_file(config, attempt),
            threads=placement.threads,
            device=placement.device,
            total_steps=prepared.total_steps,
            initial=prepared.initial,
            ends_at=allocation_end(config.cluster.time_limit),
        )
        note_changed_task(session, earlier)
        opened = cls(session, placement, prepared, mlflow, masked(uri), time.time(), mirror)
        opened.push(attempt.config, attempt.env, *([session.task_file] if session.task_file else []))
        return opened

    def note_before(self, lost: Holder | None, restarted: str | None) -> None:
        """Law 7: what became of the attempt before, as far as its own ledger cannot tell."""
        with closing(Journal.of_driver(self.session.run, self.session.attempt)) as journal:
            if restarted:
                journal.event("restarted", reason=restarted)
            if lost:
                journal.event("took_over", attempt=lost.attempt, host=lost.host, pid=lost.pid)
                print(  # noqa: T201
                    f"The lease of {lost} stood still: attempt {self.session.attempt.number} takes the run over, and "
                    "the old one commits nothing more."
                )

    def train(self, launcher: Launcher) -> ExitCode:
        """Hold the run's lease, and train to the end."""
        session, stop = self.session, StopRequest(explain)
        stop.trap_signals()
        stop.watch(session.attempt.request)
        lease = Lease(session.run, session.attempt.number, session.config.cluster.lease_s, lambda: stop.asked)
        with closing(lease), closing(stop):
            return self.train_to_the_end(launcher, stop)

    def train_to_the_end(self, launcher: Launcher, stop: StopRequest) -> ExitCode:
        """Run the workers to their end; whatever happens, the summary and the status say what did."""
        try:
            with (
                self.failing(),
                watched(self.session, self.prepared, self.placement, self.mlflow, afar=launcher.workers_apart),
            ):
                outcome = self.run(launcher, stop)
        except BaseException as error:
            self.fail(cause_of(error), str(error) or type(error).__name__)
            raise
        facts = asdict(outcome)
        self.conclude(facts.pop("cause"), facts, "FINISHED" if outcome.finished else "KILLED")
        return exit_code(outcome)

    def run(self, launcher: Launcher, stop: StopRequest) -> Outcome:
        """The workers' outcome. What is wrong from here on is a failure of a run that was started."""
        try:
            return launcher.run(self.session, self.placement, stop)
        except UserError as error:
            raise RunFailed(str(error)) from error

    @contextmanager
    def failing(self) -> Iterator[None]:
        """An object store that fails for good ends the run in a sentence."""
        try:
            yield
        except OSError as error:
            if not self.mirror:
                raise
            raise RunFailed(f"{error}. Run the same command again to go on from the newest checkpoint.") from error

    def fail(self, cause: str, error: str) -> None:
        """Record an attempt that ended without an outcome."""
        with closing(Journal.of_driver(self.session.run, self.session.attempt)) as journal:
            journal.event("failed" if cause == "failed" else "stopped", cause=cause, error=error)
        self.conclude(cause, {"error": error}, "FAILED" if cause == "failed" else "KILLED")

    def conclude(self, cause: str, facts: dict[str, Any], status: Any) -> None:
        """Write and show summary.json; end the MLflow run with the status it has."""
        task, run = self.prepared.task, self.session.run
        self.push(self.session.attempt.driver_ledger)
        if self.superseded():
            # the summary and the MLflow run are the later attempt's now
            return
        if self.mlflow:
            facts |= {"mlflow_run_id": self.mlflow.id, "mlflow_uri": self.mlflow_uri}
        try:
            # not for a run that was stopped: whoever stops it gives it seconds
            baselines = task.baselines() if cause in FINISHED else {}
            per_nat = task.summary(1.0).get("bits_per_byte")
            summary = summarise(run, cause, facts, baselines, per_nat, time.time() - self.started)
            write_json(run.summary, summary)
            self.push(run.summary)
            if self.mlflow:
                self.mlflow.artifact(run.summary)
        finally:
            if self.mlflow:
                self.mlflow.end(status)
        show_summary(summary)

    def superseded(self) -> bool:
        """Whether a later attempt has taken the run over; an object store that does not answer knows of none."""
        try:
            attempts = open_store(self.session.run.attempts_place)
            return superseded_by(attempts, self.session.attempt.number) is not None
        except OSError:
            if not self.mirror:
                raise
            return False

    def push(self, *paths: Path) -> None:
        """Bring files to an object store; where that fails, say so: the run is not lost by it."""
        if not self.mirror:
            return
        try:
            self.mirror.push(*paths)
        except OSError as error:
            names = ", ".join(path.name for path in paths)
            print(f"{error}. What is new in {names} is on this machine alone, in {self.session.run.root}.")  # noqa: T201


def with_storage(resolved: Resolved, storage: Storage, option: str | None) -> Resolved:
    """The run file with the storage that is really used, and where that came from."""
    origins = dict(resolved.origins)
    if option or os.environ.get("LWRAY_STORAGE"):
        origins["run.storage"] = "--storage" if option else "LWRAY_STORAGE"
    section = resolved.config.run.model_copy(update={"storage": str(storage)})
    config = resolved.config.model_copy(update={"run": section})
    return Resolved(config, origins, resolved.path)


def tracking_uri(config: Config, storage: Storage) -> str:
    """`tracking.uri` over MLFLOW_TRACKING_URI over a database in the storage, or in the spool of an object store."""
    named = config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI")
    if named:
        return named
    if storage.url and config.tracking.enabled:
        print(  # noqa: T201
            f"MLflow's database is {storage.root / 'mlflow.db'}, on this machine and not in {storage}: a start on "
            "another machine begins an MLflow run of its own. Set tracking.uri to a server."
        )
    return default_uri(storage.root)


def open_mlflow(config: Config, uri: str, run: RunDir, known_id: str | None) -> MlflowRun:
    """The run's one MLflow run. Raises UserError where the server cannot be used."""
    params = {key: str(value) for key, value in maths_of(config).items()}
    tags = {"lwray.run": config.run.name, "lwray.path": run.place}
    return MlflowRun.open(uri, config.tracking.experiment, config.run.name, known_id, params, tags)


def recorded_mlflow_id(run: RunDir) -> str | None:
    """The id of the run's one MLflow run, if it has been started."""
    return Identity.read(run.identity).mlflow_run_id if run.identity.exists() else None


def keep_task_file(config: Config, attempt: Attempt) -> Path | None:
    """A copy of the user's task file in the attempt: what really ran, where every worker sees it."""
    source = own_task_file(config)
    return Path(shutil.copy(source, attempt.path)) if source else None


def note_changed_task(session: Session, earlier: list[Attempt]) -> None:
    """Law 7: a task file that was edited since the last start is taken, and said so."""
    if session.task_file is None or not earlier:
        return
    before = earlier[-1].path / session.task_file.name
    if before.exists() and before.read_bytes() != session.task_file.read_bytes():
        with closing(Journal.of_driver(session.run, session.attempt)) as journal:
            journal.event("task_changed", file=session.task_file.name, since_attempt=earlier[-1].number)
        print(f"{session.task_file.name} has changed since attempt {earlier[-1].number}.")  # noqa: T201


def cause_of(error: BaseException) -> str:
    """What ended an attempt that has no outcome."""
    if isinstance(error, KeyboardInterrupt):
        return "INT"
    return "superseded" if isinstance(error, Superseded) else "failed"


def exit_code(outcome: Outcome) -> ExitCode:
    """0 when the run is finished, 130 or 143 when the user stopped it, 75 when its machines went."""
    if outcome.finished:
        return ExitCode.FINISHED
    if outcome.cause in PREEMPTED:
        return ExitCode.PREEMPTED
    return ExitCode.INTERRUPTED if outcome.cause == "INT" else ExitCode.TERMINATED
