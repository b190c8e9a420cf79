"""How workers are started: the same engine in this process, under torchrun, or as Ray Train workers."""

import os
import pickle
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from lwray.cluster.arrive import on_this_machine
from lwray.cluster.place import Node, Placement, place_workers, this_machine
from lwray.config import Config
from lwray.engine.session import Outcome, Session
from lwray.engine.stop import StopRequest
from lwray.errors import UserError
from lwray.tracking.storage import Storage


class Launcher(ABC):
    """Finds out what there is, then runs a session on it."""

    joins_cluster = False
    """Whether workers are on machines that this process did not start."""
    workers_apart = False
    """Whether rank 0 is another process than this one."""

    def nodes(self) -> Sequence[Node]:
        """Resources of each node that workers can be placed on."""
        return [this_machine()]

    def place(self, config: Config) -> Placement:
        """Raises UserError where `[parallel]` asks for more than there can ever be."""
        return place_workers(config.parallel, self.nodes())

    def check_storage(self, storage: Storage) -> None:
        """Raises UserError where a worker would not see `storage` as this process does."""

    def check_data(self, data: Path) -> None:
        """Raises UserError where a worker would not see the prepared `data`."""

    @abstractmethod
    def run(self, session: Session, placement: Placement, stop: StopRequest) -> Outcome:
        """Train until the end or the request to stop. Raises RunFailed."""

    def close(self) -> None:
        """Let go of what `nodes` or `run` started."""


class Inline(Launcher):
    """One worker, in this process: a debugger works."""

    def place(self, config: Config) -> Placement:
        placement = super().place(config)
        wanted = config.parallel.workers
        least = wanted[0] if isinstance(wanted, tuple) else wanted
        if isinstance(least, int) and least > 1:
            raise UserError(
                f"parallel.workers asks for {least}, but --launcher inline is one process: leave the option away, "
                "or set parallel.workers=1."
            )
        cpus = config.parallel.cpus_per_worker
        return Placement(1, placement.device, this_machine()["CPU"] if cpus == "auto" else cpus)

    def run(self, session: Session, placement: Placement, stop: StopRequest) -> Outcome:
        return train_rank(session, stop)


class Torchrun(Launcher):
    """The processes that torchrun started; rank 0 drives, the others wait for the session that it hands out.

    They wait at torchrun's own store, not in a collective: rank 0 may tokenise for hours, or find nothing to do.
    """

    def __init__(self) -> None:
        # a group that torchrun starts again meets under new keys
        self._key = f"lwray/session/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._handed_out = False

    def place(self, config: Config) -> Placement:
        machine = this_machine()
        here = int(os.environ["LOCAL_WORLD_SIZE"])
        device = config.parallel.device
        if device == "auto":
            device = "cuda" if machine["GPU"] >= here else "cpu"
        if device == "cuda" and machine["GPU"] < here:
            raise UserError(f"torchrun started {here} processes here, and there are {machine['GPU']:g} GPUs.")
        workers = int(os.environ["WORLD_SIZE"])
        wanted = config.parallel.workers
        low, high = wanted if isinstance(wanted, tuple) else (wanted, wanted)
        if isinstance(low, int) and isinstance(high, int) and not low <= workers <= high:
            raise UserError(f"parallel.workers = {wanted}, but torchrun started {workers} processes: make them agree.")
        cpus = config.parallel.cpus_per_worker
        return Placement(workers, device, machine["CPU"] / here if cpus == "auto" else cpus)

    def run(self, session: Session, placement: Placement, stop: StopRequest) -> Outcome:
        self._hand_out(session)
        return train_rank(session, stop)

    def close(self) -> None:
        """Let the other ranks go where there was nothing to train."""
        if not self._handed_out:
            self._hand_out(None)

    def follow(self) -> None:
        """What ranks above 0 do: wait for rank 0's session, and train."""
        stop = StopRequest()
        stop.trap_signals()
        session: Session | None = pickle.loads(torchrun_store().get(self._key))
        if session is not None:
            train_rank(on_this_machine(session, int(os.environ["RANK"])), stop)

    def _hand_out(self, session: Session | None) -> None:
        self._handed_out = True
        torchrun_store().set(self._key, pickle.dumps(session))


def train_rank(session: Session, stop: StopRequest) -> Outcome:
    """Join the group that the environment describes, and train."""
    from lwray.engine.train import train
    from lwray.engine.world import join_world

    os.environ.update(session.config.env)
    world = join_world(session.device, session.threads)
    outcome = train(session, world, stop)
    world.leave()
    return outcome


def torchrun_store() -> Any:
    """The key-value store of torchrun's agent, through which its processes find each other."""
    from torch._C._distributed_c10d import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=timedelta(days=7))
