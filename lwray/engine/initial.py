"""Weights that a new run starts from (`init.from`): another run's checkpoint, or what another program wrote.

What the text means is resolved once, by the driver at the run's first start, and kept in run.json: every worker and
every later start reads the same checkpoint, however far the other run has gone on.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import xxhash
from torch import Tensor, nn

from lwray.checkpoint.find import committed, pick, verify
from lwray.checkpoint.foreign import Weights, fingerprint, fitted, is_foreign, open_foreign
from lwray.checkpoint.manifest import NAME
from lwray.checkpoint.read import Reader
from lwray.config import Config
from lwray.engine.backends.backend import MOMENTS, persistent_buffers
from lwray.errors import RunFailed, UserError
from lwray.models.stored import INDEX, SINGLE
from lwray.store import open_store
from lwray.tasks.task import Task
from lwray.tracking.journal import merged_ledger
from lwray.tracking.rundir import Identity, RunDir, differing, maths_of
from lwray.tracking.storage import Storage, find_run_at, pull_run, run_names

SHOWN = 4
MEANING = ("model.", "task.name", "data.tokenizer", "data.vocab_size")
"""Keys that say what the weights mean."""
COMPUTES_ALIKE = ("model.dropout", "model.context")
"""Of them, those that a branch may change: weights mean the same under any value."""
SHAPING = ("model.", "task.")
"""Keys that may say why weights have other shapes."""
FORMS = "RUN, RUN@STEP, RUN@best, a Hugging Face or torch.distributed.checkpoint directory, a .safetensors or .pt file"


@dataclass(frozen=True, slots=True)
class Initial:
    """A source of weights, found: `text` is what the user wrote. Picklable, and JSON in run.json."""

    text: str
    kind: Literal["run", "huggingface", "foreign"]
    path: str
    """Absolute: a file or directory; of a run, the directory or URL of its checkpoints."""
    checkpoint: str
    """The name of the run's checkpoint; empty for the other kinds."""
    step: int | None
    checksum: str
    """xxh3-64 (hex): of a run's manifest, which holds those of its files; else of the files."""
    optimizer: bool
    """Whether the optimiser's moments and its step count are taken too."""

    def __str__(self) -> str:
        return f"{self.path}/{self.checkpoint}" if self.checkpoint else self.path


def find_initial(config: Config, storage: Storage, run: RunDir | None) -> Initial | None:
    """What `init.from` means: what it meant at the first start of `run`, or (None: a fresh one) what it means now.

    Nothing of it is looked at once `run` has a checkpoint of its own. Raises UserError where there is no such thing.
    """
    section = config.init
    if not section.source:
        if section.optimizer:
            raise UserError("init.optimizer = true takes the optimiser of another run: name it in init.from.")
        return None
    kept = Identity.read(run.identity).init if run is not None and run.identity.exists() else None
    if run is None or kept is None:
        return _resolve(section.source, section.optimizer, storage, storage.run(config.run.name))
    initial = Initial(**kept)
    if not has_checkpoint(run) and _checksum(initial) != initial.checksum:
        raise UserError(
            f"init.from = {initial.text!r} was {initial} when the run first started, and that is changed or gone, and "
            "the run has no checkpoint of its own yet. Restore it, or start over with --fresh."
        )
    return initial


def has_checkpoint(run: RunDir) -> bool:
    """Whether a run has a committed checkpoint of its own to go on from."""
    return next(committed(open_store(run.checkpoints_place)), None) is not None


def check_initial(initial: Initial, task: Task, config: Config) -> None:
    """Raises UserError where the weights are not whole or not those of the task's network, which is not made."""
    with torch.device("meta"):
        network = task.model()
    try:
        if initial.kind == "run":
            verify(open_store(initial.path), initial.checkpoint)
        weights = open_initial(initial, task, network)
    except (ValueError, OSError) as error:
        raise UserError(f"init.from = {initial.text!r}: {initial} cannot be used: {error}.") from None
    if initial.optimizer and not all(reader_of(initial).keys(kind) for kind in MOMENTS):
        raise UserError(f"init.optimizer: {initial} holds no moments of {config.optim.name}. Leave the key away.")
    if unlike := differences(network, weights, excused=_frozen_there(initial)):
        shaping = other_keys(initial, config, SHAPING)
        raise UserError(
            f"init.from = {initial.text!r}: {initial} holds the weights of another network: {'; '.join(unlike)}."
            f"{' That run has ' + '; '.join(shaping) + '.' if shaping else ''}"
        )
    if other := other_keys(initial, config, MEANING, excused=COMPUTES_ALIKE):
        raise UserError(
            f"init.from = {initial.text!r}: the run's weights are of another model or tokeniser: {'; '.join(other)}. "
            "Give these keys as they are there."
        )


def other_keys(
    initial: Initial, config: Config, beginnings: tuple[str, ...], excused: Collection[str] = ()
) -> list[str]:
    """Of a run: the keys that begin so and are others here, with both values."""
    if initial.kind != "run" or not (run := _run_of(initial)).identity.is_file():
        return []
    changed = differing(maths_of(Config()) | Identity.read(run.identity).maths, maths_of(config))
    return [
        f"{key} = {old!r}, here {new!r}"
        for key, old, new in changed
        if key.startswith(beginnings) and key not in excused
    ]


def load_initial(network: nn.Module, initial: Initial, task: Task) -> None:
    """Fill trainable parameters and persistent buffers; dtypes become the network's. Raises RunFailed."""
    try:
        weights = open_initial(initial, task, network)
        if unlike := differences(network, weights):
            raise ValueError("; ".join(unlike))
        with torch.no_grad():
            for names, tensor in _wanted(network).values():
                tensor.copy_(_sound(weights, next(name for name in names if name in weights.shapes), tensor))
    except (ValueError, OSError, UserError) as error:
        raise RunFailed(
            f"The weights of init.from = {initial.text!r} ({initial}) cannot be loaded: {error}. Every worker must see "
            "them until the run has a checkpoint of its own."
        ) from error


def _sound(weights: Weights, name: str, like: Tensor) -> Tensor:
    """Raises ValueError for integers where weights are wanted, and for values that are not finite."""
    tensor = weights.read(name)
    if like.is_floating_point() and not tensor.is_floating_point():
        raise ValueError(f"{name} is of {tensor.dtype}")
    if tensor.is_floating_point() and not tensor.isfinite().all():
        raise ValueError(f"{name} holds values that are no finite numbers")
    return tensor


def open_initial(initial: Initial, task: Task, network: nn.Module) -> Weights:
    """The weights under the names of `network`. Raises ValueError, OSError, UserError (the task's)."""
    if initial.kind == "run":
        reader = reader_of(initial)
        keys = {key.partition("/")[2]: key for key in reader.manifest.tensors if key.startswith(("param/", "buffer/"))}
        return Weights(
            {name: reader.manifest.tensors[key].shape for name, key in keys.items()},
            lambda name: reader.whole(keys[name]),
        )
    if initial.kind == "huggingface":
        return Weights.of(task.from_huggingface(Path(initial.path)))
    return fitted(open_foreign(Path(initial.path)), network.state_dict().keys())


def reader_of(initial: Initial) -> Reader:
    """The checkpoint of a run that is started from."""
    return Reader(open_store(initial.path), initial.checkpoint)


def differences(network: nn.Module, weights: Weights, excused: Collection[str] = ()) -> list[str]:
    """What is missing (but for `excused`), unexpected or of another shape: a phrase each, naming up to four."""
    wanted, there = _wanted(network), weights.shapes
    held = {name: next((alias for alias in names if alias in there), None) for name, (names, _) in wanted.items()}
    # frozen parameters and tables that follow from others come from the task, but may be there
    known = {
        *network.state_dict(),
        *(n for n, _ in network.named_parameters()),
        *(n for n, _ in network.named_buffers()),
    }
    shapes = [
        f"{name} ({list(there[alias])}, here {list(wanted[name][1].shape)})"
        for name, alias in held.items()
        if alias is not None and there[alias] != tuple(wanted[name][1].shape)
    ]
    found = {
        "missing": [name for name, alias in held.items() if alias is None and name not in excused],
        "unexpected": sorted(there.keys() - known),
        "of another shape": shapes,
    }
    return [f"{what}: {_some(names)}" for what, names in found.items() if names]


def _wanted(network: nn.Module) -> Mapping[str, tuple[list[str], Tensor]]:
    """Trainable parameters and persistent buffers, each with all the names that it has (tied weights have several)."""
    state = network.state_dict(keep_vars=True)
    tensors = {name: p for name, p in network.named_parameters() if p.requires_grad} | persistent_buffers(network)
    return {name: ([n for n, t in state.items() if t is tensor], tensor) for name, tensor in tensors.items()}


def _resolve(text: str, optimizer: bool, storage: Storage, own: RunDir) -> Initial:
    """Raises UserError, naming the forms there are."""
    if "://" in text and not text.startswith("hf://"):
        return _resolve_url(text, optimizer, own)
    whole = Path(text).expanduser().absolute()
    base, _, which = text.rpartition("@") if "@" in text and not whole.exists() else (text, "", "newest")
    for run in (RunDir(Path(base).expanduser().absolute()), storage.run(base)):
        if pull_run(run) and run.identity.is_file():
            return _resolve_run(text, run, which, optimizer, own)
    if optimizer:
        raise UserError(f"init.optimizer = true is for another run, and init.from = {text!r} is none. Leave it away.")
    if is_foreign(whole):
        return Initial(text, "foreign", str(whole), "", None, fingerprint(whole), False)
    if any((whole / name).is_file() for name in ("config.json", INDEX, SINGLE)):
        return Initial(text, "huggingface", str(whole), "", None, fingerprint(whole), False)
    runs = run_names(storage)
    known = f"the runs in {storage} are {', '.join(runs)}" if runs else f"{storage} holds no runs"
    raise UserError(f"init.from = {text!r} is none of {FORMS}; {known}.")


def _resolve_url(text: str, optimizer: bool, own: RunDir) -> Initial:
    """`s3://bucket/runs/RUN`, with or without `@STEP` or `@best`."""
    base, _, which = text.rpartition("@") if "@" in text else (text, "", "newest")
    run = find_run_at(base)
    if run is None:
        raise UserError(f"init.from = {text!r}: there is no run {base}.")
    return _resolve_run(text, run, which, optimizer, own)


def _resolve_run(text: str, run: RunDir, which: str, optimizer: bool, own: RunDir) -> Initial:
    if run == own:
        raise UserError(
            f"init.from = {text!r} is the run itself. Choose another run.name for the one that starts from it."
        )
    store = open_store(run.checkpoints_place)
    try:
        name = pick(store, which)
        manifest = Reader(store, name).manifest
    except ValueError as error:
        raise UserError(f"init.from = {text!r}: of the run {run.place}, {error}.") from None
    checksum = xxhash.xxh3_64_hexdigest(store.read(f"{name}/{NAME}"))
    return Initial(text, "run", run.checkpoints_place, name, manifest.step, checksum, optimizer)


def _checksum(initial: Initial) -> str | None:
    """What it is now; None where it is gone."""
    try:
        if initial.kind == "run":
            return xxhash.xxh3_64_hexdigest(open_store(initial.path).read(f"{initial.checkpoint}/{NAME}"))
        return fingerprint(Path(initial.path))
    except FileNotFoundError:
        return None


def _frozen_there(initial: Initial) -> set[str]:
    """What a run froze because no term of its loss reaches it, and hence did not save."""
    if initial.kind != "run":
        return set()
    events = merged_ledger(_run_of(initial))
    return {name for event in events for name in event.get("frozen_unreachable", ())}


def _run_of(initial: Initial) -> RunDir:
    """The other run; on an object store its small files are here since it was resolved, or are brought."""
    place = initial.path.rpartition("/")[0]
    return (find_run_at(place) if "://" in place else None) or RunDir(Path(place))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
