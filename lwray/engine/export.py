"""`lwray export`: the weights of one checkpoint of a run, in the layout that its task writes."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lwray.checkpoint.find import damage, pick, val_loss_of
from lwray.checkpoint.read import Reader
from lwray.config import Config, load
from lwray.data.prepared import is_prepared
from lwray.data.published import fetch, kept_name
from lwray.engine.backends.backend import load_weights
from lwray.engine.frozen import check_frozen, frozen_checksums
from lwray.engine.world import World
from lwray.errors import UserError
from lwray.store import open_store
from lwray.store.local import sync_directory
from lwray.tasks.find import find_task
from lwray.tasks.task import Task
from lwray.tracking.rundir import Attempt, Identity, RunDir, versions, write_json
from lwray.tracking.storage import storage_of

RECORD = "export.json"
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "peft")


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written, where, and of which state of the run."""

    directory: Path
    run: str
    step: int
    attempt: int
    val_loss: float | None
    """Of this very state, in nats; None where it was not evaluated."""
    network: str
    """The class that loads the directory, else that of the task's network."""
    tokenizer: bool
    """Whether the directory holds one."""
    versions: dict[str, str]

    def record(self) -> dict[str, Any]:
        """What stands in export.json: all but the place, which may change."""
        record = asdict(self)
        del record["directory"]
        return {"class" if name == "network" else name: value for name, value in record.items()}


def export(run: RunDir, out: Path, which: str = "newest") -> Exported:
    """Write the `newest` checkpoint, the `best` or that of a step (as text) to `out`, which is whole or absent.

    Needs the run's directory and what its task prepared, no device. Raises UserError where `out` is taken, the run has
    no such checkpoint or its task cannot be made, RunFailed where the checkpoint is of another network.
    """
    out = out.expanduser().absolute()
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty directory; choose another with --out.")
    reader = open_checkpoint(run, which)
    task = task_of(run, Attempt(reader.manifest.attempt, run.attempts / f"{reader.manifest.attempt:04d}"))
    task.check_exportable()
    network = trained_network(task, reader)
    with whole_directory(out) as draft:
        task.export(network, draft)
        exported = Exported(
            directory=out,
            run=run.root.resolve().name,
            step=reader.manifest.step,
            attempt=reader.manifest.attempt,
            val_loss=val_loss_of(reader.manifest),
            network=class_in(draft) or type(network).__name__,
            tokenizer=(draft / "tokenizer_config.json").exists(),
            versions=versions(PACKAGES),
        )
        write_json(draft / RECORD, exported.record())
    return exported


def open_checkpoint(run: RunDir, which: str) -> Reader:
    """A checkpoint whose every byte is right. Raises UserError where there is none."""
    store = open_store(run.checkpoints_place)
    try:
        name = pick(store, which)
        if reason := damage(store, name):
            raise ValueError(f"{name} is damaged ({reason}); choose another with --step")
        return Reader(store, name)
    except (ValueError, OSError) as error:
        raise UserError(f"{run.root.name} cannot be exported: {error}.") from None


def task_of(run: RunDir, attempt: Attempt) -> Task:
    """The task as the attempt made it, from the attempt's own configuration and copy of the task's file."""
    config = load(attempt.config).config
    path, colon, _ = config.task.name.rpartition(":")
    file = attempt.path / Path(path).name if colon else None
    if file is not None and not file.is_file():
        raise UserError(f"The run's copy of its task, {file}, is gone: put {Path(path).name} back there.")
    task_class = find_task(config.task.name, file)
    return task_class(config, find_data(task_class, config, run))


def find_data(task_class: type[Task], config: Config, run: RunDir) -> Path | None:
    """What the task prepared: the tokenised text in the storage, whose source may be gone, else prepared again."""
    fingerprint = Identity.read(run.identity).data_fingerprint
    cache = run.root.absolute().parent / ".data"
    # where lwray.data.prepare puts what it made
    kept = cache / kept_name(fingerprint)
    if fingerprint and run.url:
        fetch(open_store(storage_of(run).data_place), kept)
    if fingerprint and is_prepared(kept):
        return kept
    data, found = task_class.prepare(config, cache)
    if found != fingerprint:
        raise UserError(f"The data of {run.root.name} has changed since the run started, or is gone. Restore it.")
    return data


def trained_network(task: Task, reader: Reader) -> nn.Module:
    """The task's network on the CPU, in evaluation mode, with the weights of the checkpoint."""
    network = task.model()
    saved = set(reader.keys("param"))
    for name, parameter in network.named_parameters():
        # no term of the loss reached it, or the task froze it: the checksums know its value
        parameter.requires_grad_(parameter.requires_grad and name in saved)
    load_weights(network, reader)
    frozen = {source: digest for source, digest in reader.manifest.frozen.items() if source == "network"}
    check_frozen(reader.name, frozen, frozen_checksums(network, {}, World(0, 1, torch.device("cpu"))))
    return network.eval()


@contextmanager
def whole_directory(out: Path) -> Iterator[Path]:
    """A directory beside `out` to write to, which gets its name once all in it is on disk, or is removed."""
    draft = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        draft.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}. Choose another with --out.") from None
    try:
        yield draft
        for path in draft.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        draft.replace(out)
        sync_directory(out.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def class_in(directory: Path) -> str | None:
    """The class that a directory in Hugging Face's layout names, None for another layout."""
    path = directory / "config.json"
    config: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return next(iter(config.get("architectures") or ()), None)
