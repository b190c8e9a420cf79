"""What is checked before anything is started or written: each failure is one sentence and exit code 2."""

import secrets
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lwray.checkpoint.find import committed
from lwray.checkpoint.manifest import NewerFormat
from lwray.cluster.storage import PROBING, named_storage
from lwray.config import Config
from lwray.data.published import fetch, kept_name, publish
from lwray.engine.batch import check_batch_given, count_steps, deal_rows
from lwray.engine.initial import Initial, check_initial, has_checkpoint
from lwray.engine.session import FINISHED
from lwray.errors import UserError
from lwray.models.draws import use_row_dropout
from lwray.store import open_store
from lwray.tasks.find import find_task
from lwray.tasks.task import Task
from lwray.tracking.rundir import Identity, RunDir, differing, maths_of, read_json
from lwray.tracking.storage import Storage, storage_answers, storage_of

BYTES_A_PARAMETER = 12
"""In a checkpoint: an fp32 weight and two fp32 moments."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the checks found out about a run."""

    task: Task
    data: Path | None
    data_fingerprint: str
    total_steps: int
    train_rows: int
    val_rows: int
    parameters: int
    initial: Initial | None


def find_storage(option: str | None, config: Config, *, joins_cluster: bool) -> Storage:
    """Where runs are kept: a directory, absolute and writable, or an object store. Raises UserError."""
    named = named_storage(option, config, joins_cluster=joins_cluster)
    if "://" in named:
        return find_object_store(named)
    path = Path(named).expanduser().absolute()
    check_writable(path)
    return Storage(path)


def find_object_store(url: str) -> Storage:
    """Raises UserError where runs cannot be kept there."""
    storage = Storage.at(url)
    check_writable(storage.root, "The spool", "Name a directory of this machine in LWRAY_SPOOL.")
    check_object_store(storage.url)
    return storage


def check_object_store(url: str) -> None:
    """Write, claim, list, read and remove an object. Raises UserError."""
    from lwray.store.objects import ObjectStore

    store, name = ObjectStore(url, PROBING), f".probe-{secrets.token_hex(8)}"
    try:
        won, again = store.create(name, b"claimed"), store.create(name, b"lost")
        listed, read = name in store.names(), store.read(name)
        store.put(name, [b"written"])
        store.remove(name)
    except OSError as error:
        raise UserError(
            f"The storage {store.url} cannot be used: {error}. Check bucket, AWS_ENDPOINT_URL and credentials "
            "(docs/storage.md), or choose another with --storage."
        ) from None
    if not (won and listed and read == b"claimed") or again:
        raise UserError(
            f"The storage {store.url} does not give back what was written, or lets two writers own one object. Choose "
            "another with --storage."
        )


def check_writable(storage: Path, what: str = "The storage", remedy: str = "Choose another with --storage.") -> None:
    """Raises UserError where a file cannot be made in `storage` (which is made if it is not there)."""
    try:
        storage.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=storage, prefix=".write-test-"):
            pass
    except OSError as error:
        raise UserError(f"{what} {storage} cannot be written: {error.strerror}. {remedy}") from None


def finished_summary(run: RunDir, config: Config) -> dict[str, object] | None:
    """The summary of a run that needs no more, or None. A run out of hours goes on when it is given more."""
    if not run.summary.exists():
        return None
    summary: dict[str, object] = read_json(run.summary)
    if summary["cause"] not in FINISHED:
        return None
    hours = config.train.max_hours
    if summary["cause"] == "max_hours" and (hours == 0 or float(str(summary["seconds"])) < hours * 3600):
        return None
    # where it lies now: a storage may have been moved since
    return {**summary, "path": run.place}


def check_identity(run: RunDir, config: Config, data_fingerprint: str | None = None) -> None:
    """Raises UserError, with the differing keys, where a run of this name has other mathematics or other data."""
    if not run.identity.exists():
        return
    identity = Identity.read(run.identity)
    # a key that the version of the first start did not have was, in effect, at its default
    changed = differing(maths_of(Config()) | identity.maths, maths_of(config))
    fresh = "" if run.url else ", or start over with --fresh (the old run is set aside, not deleted)"
    ways = f"Choose another run.name{fresh}."
    if changed:
        listed = "\n".join(f"  {key}: {old!r} became {new!r}" for key, old, new in changed)
        raise UserError(
            f"The run {run.place} exists and is another one; these keys change its mathematics:\n{listed}\n{ways}"
        )
    if data_fingerprint is not None and data_fingerprint != identity.data_fingerprint:
        raise UserError(f"The data of {run.place} has changed since the run started. Restore it, or: {ways}")


def check_fresh(run: RunDir) -> None:
    """Raises UserError where an existing run would have to be set aside and cannot be."""
    if run.url and run.identity.exists():
        raise UserError(
            f"--fresh would set {run.place} aside, and an object store cannot rename what it holds. Choose another "
            "run.name, or remove that run yourself."
        )


def prepare_run(config: Config, storage: Storage, task_file: Path | None, initial: Initial | None) -> Prepared:
    """Make the task and its data ready; raises UserError for input that cannot train."""
    check_batch_given(config)
    task_class = find_task(config.task.name, task_file)
    data, fingerprint = task_class.prepare(config, storage.data)
    if storage.url and data is not None:
        publish_data(storage, data)
    task = task_class(config, data)
    rows, val_rows = task.rows("train"), task.rows("val")
    check_rows(config, task, len(rows), len(val_rows))
    if config.checkpoint.exportable:
        task.check_exportable()
    return Prepared(
        task=task,
        data=data,
        data_fingerprint=fingerprint,
        total_steps=count_steps(config, task, rows),
        train_rows=len(rows),
        val_rows=len(val_rows),
        parameters=count_parameters(task),
        initial=initial,
    )


def fetch_known_data(run: RunDir) -> None:
    """What an earlier start of the run prepared on another machine need not be prepared again."""
    if run.url and run.identity.exists() and (known := Identity.read(run.identity).data_fingerprint):
        storage = storage_of(run)
        with storage_answers(run.url):
            fetch(open_store(storage.data_place), storage.data / kept_name(known))


def publish_data(storage: Storage, data: Path) -> None:
    """Put prepared data where nodes that lack them find them; data that lie elsewhere are there as they are."""
    if data.is_relative_to(storage.data):
        with storage_answers(storage.url):
            publish(open_store(storage.data_place), storage.data / data.relative_to(storage.data).parts[0])


def check_weights(prepared: Prepared, config: Config, run: RunDir | None) -> str | None:
    """Where workers will read the weights that a run starts from, which are right; None where they need none.

    `run` is None for a fresh start. Raises UserError where the weights are not whole or another network's.
    """
    if prepared.initial is None or (run is not None and has_checkpoint(run)):
        return None
    check_initial(prepared.initial, prepared.task, config)
    return prepared.initial.path


def check_rows(config: Config, task: Task, rows: int, val_rows: int) -> None:
    """Raises UserError where there is nothing to train on, or an `[eval]` key could never act."""
    if not rows:
        raise UserError("The task has no training rows. Check data.source or task.options.")
    if val_rows % task.row_group:
        raise UserError(f"{val_rows} held-out rows are no whole number of the task's groups of {task.row_group} rows.")
    waits = config.eval.stop_below is not None or config.eval.patience > 0
    if waits and not (config.eval.every_steps and val_rows):
        lacks = "there are no held-out rows" if not val_rows else "eval.every_steps is 0"
        raise UserError(f"eval.stop_below and eval.patience could never act: {lacks}.")


def check_layout(config: Config, prepared: Prepared, workers: int, device: str) -> None:
    """Raises UserError, with the arithmetic, where the global batch cannot be dealt to these workers."""
    if config.parallel.backend == "none" and workers > 1:
        raise UserError(f"parallel.backend = none is for one worker, and there are {workers}. Use auto or ddp.")
    deal_rows(config, prepared.task, workers, device)
    if isinstance(config.parallel.workers, tuple):
        least, most = config.parallel.workers
        for size in range(least, most + 1):
            try:
                deal_rows(config, prepared.task, size, device)
            except UserError as error:
                raise UserError(f"parallel.workers = [{least}, {most}] may come to {size} workers: {error}") from None


def count_parameters(task: Task) -> int:
    """Parameters of the network, without making it. Raises UserError where a module breaks the laws."""
    import torch

    with torch.device("meta"):
        model = task.model()
    use_row_dropout(model)
    return sum(p.numel() for p in model.parameters())


def check_room(storage: Storage, parameters: int) -> None:
    """Raises UserError where the disk has no room for one checkpoint; an object store does not say."""
    if storage.url:
        return
    needed = parameters * BYTES_A_PARAMETER
    free = shutil.disk_usage(storage.root).free
    if free < needed * 1.05:
        raise UserError(
            f"The storage {storage} has {free / 1e9:.2f} GB free, and one checkpoint of {parameters / 1e6:.1f} M "
            f"parameters takes {needed / 1e9:.2f} GB. Free some, or choose another with --storage."
        )


def own_task_file(config: Config) -> Path | None:
    """The user's file in `task.name`, or None for a built-in task."""
    path, colon, _ = config.task.name.rpartition(":")
    return Path(path).expanduser().absolute() if colon else None


def check_checkpoints(run: RunDir) -> None:
    """Raises UserError where a newer version of lwray has gone on with the run: it must not fall back behind that."""
    try:
        next(committed(open_store(run.checkpoints_place)), None)
    except NewerFormat as error:
        raise UserError(f"{run.place}: {error}. Go on with the version that wrote it.") from None
