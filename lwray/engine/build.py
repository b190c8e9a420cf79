"""The wrapped network in the state of the newest whole checkpoint, or of the seed; what was decided is written down."""

from dataclasses import asdict

import torch

from lwray.checkpoint.find import Found
from lwray.checkpoint.read import Reader
from lwray.config import Config
from lwray.data.deal import Deal
from lwray.data.rows import Rows
from lwray.engine.backends import Backend, choose_backend, make_backend
from lwray.engine.backends.backend import load_weights
from lwray.engine.frozen import check_frozen, frozen_checksums
from lwray.engine.initial import Initial, load_initial, reader_of
from lwray.engine.module import LossModule
from lwray.engine.progress import Progress, optimizer_updates
from lwray.engine.reach import freeze_unreachable
from lwray.engine.resume import newest_checkpoint
from lwray.engine.session import FINISHED, Session
from lwray.engine.world import World
from lwray.models.draws import use_row_dropout
from lwray.tasks.task import Task
from lwray.tracking.journal import Journal


def build(
    session: Session, task: Task, rows: Rows, deal: Deal, world: World, journal: Journal | None
) -> tuple[Backend, Progress, dict[str, str]]:
    """Network, backend and optimiser, restored; how far the run is; the checksums of what is frozen."""
    config = session.config
    network = task.model().to(world.device)
    for frozen in task.frozen().values():
        frozen.requires_grad_(False).to(world.device)
    autocast = torch.bfloat16 if config.precision.mode == "bf16" else None
    module = LossModule(task, network, use_row_dropout(network), autocast).train()
    unreachable = freeze_unreachable(module, task, rows, world, config.run.seed)

    store, found = newest_checkpoint(session.run.checkpoints_place, session.attempt.number, world)
    reader = Reader(store, found.name) if found.name else None
    frozen_sums = frozen_checksums(network, task.frozen(), world)
    if reader:
        load_weights(network, reader)
        check_frozen(reader.name, reader.manifest.frozen, frozen_sums)
    elif session.initial:
        load_initial(network, session.initial, task)
    name = choose_backend(config, network, world)
    backend = make_backend(name, module, task, config, world, deal.micro_rows)
    progress = Progress(**reader.manifest.progress) if reader else Progress()
    if reader:
        backend.restore(reader)
    elif session.initial and session.initial.optimizer:
        other = reader_of(session.initial)
        backend.restore(other)
        progress.updates_before = optimizer_updates(other.manifest)
    if (progress.ended == "max_hours" and not out_of_time(config, progress)) or progress.ended not in FINISHED:
        progress.ended = None
    if journal is not None:
        announce(journal, found, progress, deal, backend, world, unreachable, session.initial)
    return backend, progress, frozen_sums


def out_of_time(config: Config, progress: Progress) -> bool:
    """Whether `train.max_hours` of training are done."""
    return 0 < config.train.max_hours * 3600 <= progress.seconds


def announce(
    journal: Journal,
    found: Found,
    progress: Progress,
    deal: Deal,
    backend: Backend,
    world: World,
    unreachable: list[str],
    initial: Initial | None,
) -> None:
    """Law 7: what was chosen, frozen or skipped stands in the ledger."""
    for skipped in found.skipped:
        journal.event("skipped_checkpoint", checkpoint=skipped.name, reason=skipped.reason)
    facts = {
        "workers": world.size,
        "backend": backend.name,
        "device": world.device.type,
        "threads": torch.get_num_threads(),
        "micro_rows": deal.micro_rows,
        "accumulation": deal.micro_steps,
        "parameters": backend.parameters,
        "frozen_unreachable": unreachable,
    }
    if found.name:
        journal.event("resumed", from_step=progress.step, checkpoint=found.name, **facts)
    else:
        journal.event("started", **facts, **({"init": asdict(initial)} if initial else {}))
