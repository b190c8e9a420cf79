"""Workers as a Ray Train group: on the cluster of RAY_ADDRESS, or on a Ray started here."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import ray

from lwray.cluster.groups import Groups
from lwray.cluster.join import join, own_signals
from lwray.cluster.launcher import Launcher
from lwray.cluster.machines import await_machines
from lwray.cluster.nodes import check_reached, check_same_directory, check_seen
from lwray.cluster.place import Node, Placement, this_machine
from lwray.config import Config
from lwray.engine.session import Outcome, Session
from lwray.engine.stop import StopRequest
from lwray.tracking.storage import Storage

OBJECT_STORE_BYTES = 256 * 2**20
"""Of a Ray started here: training passes nothing through it."""


class RayLauncher(Launcher):
    """Ray Train v2's TorchTrainer; checkpoints are ours, so Ray's registry is never asked."""

    def __init__(self) -> None:
        self.joins_cluster = bool(os.environ.get("RAY_ADDRESS"))
        # Ray's default of 2 s is how long a failed worker, or the end of a run, goes unseen
        os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
        # what Ray does at a notice of preemption, it does to a group that commits; drained nodes are seen here
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
        # Ray means to change this by 2.61, and warns until it is set: a worker without a GPU keeps its environment
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

    def nodes(self) -> Sequence[Node]:
        if not self.joins_cluster:
            return [this_machine()]
        if not ray.is_initialized():
            join(os.environ["RAY_ADDRESS"])
        return [node["Resources"] for node in ray.nodes() if node["Alive"]]

    def place(self, config: Config) -> Placement:
        return await_machines(config, self.nodes, say=print) if self.joins_cluster else super().place(config)

    workers_apart = True

    def check_storage(self, storage: Storage) -> None:
        """Every node must read a nonce that this process wrote. Raises UserError naming those that do not."""
        if self.joins_cluster and storage.url:
            check_reached(storage.url)
        elif self.joins_cluster:
            check_same_directory(storage.root)

    def check_data(self, data: Path) -> None:
        if self.joins_cluster:
            check_seen(data)

    def run(self, session: Session, placement: Placement, stop: StopRequest) -> Outcome:
        if not ray.is_initialized():
            machine = this_machine()
            with own_signals():
                ray.init(
                    # not one that happens to run here
                    "local",
                    num_cpus=int(machine["CPU"]),
                    num_gpus=int(machine["GPU"]),
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    object_store_memory=OBJECT_STORE_BYTES,
                )
            # Ray's core hears it first otherwise, and prints a stack
            stop.trap_signals()
        return Groups(session, placement, stop, say=print).run()

    def close(self) -> None:
        ray.shutdown()
