"""A real Ray cluster on loopback: a head without CPUs, and nodes of one CPU each that come and go."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STORE = 80 * 2**20
ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0", "OMP_NUM_THREADS": "1"}


class Nodes:
    """The nodes by Ray's ids, in the order in which they came."""

    def __init__(self) -> None:
        # Ray reads the environment when it is imported
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._nodes: dict[str, Any] = {}

    @property
    def environment(self) -> dict[str, str]:
        """Of a command that joins the cluster."""
        return {**os.environ, "RAY_ADDRESS": self._cluster.address}

    def add(self) -> None:
        node = self._cluster.add_node(num_cpus=1, object_store_memory=STORE)
        self._nodes[node.node_id] = node

    def kill(self, name: str) -> None:
        """SIGKILL to all of a node."""
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def drain(self, name: str, seconds: int) -> None:
        """Tell the cluster that a node goes, as a notice of preemption does; it stays until it is killed."""
        command = [str(Path(sys.executable).parent / "ray"), "drain-node", "--address", self._cluster.address]
        command += ["--node-id", name, "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
        command += ["--deadline-remaining-seconds", str(seconds)]
        subprocess.run(command, check=True, capture_output=True, timeout=60)

    def close(self) -> None:
        self._cluster.shutdown()


@contextmanager
def cluster(size: int) -> Iterator[Nodes]:
    """A cluster of so many nodes beside its head."""
    os.environ.update(ENVIRONMENT)
    nodes = Nodes()
    try:
        for _ in range(size):
            nodes.add()
        yield nodes
    finally:
        nodes.close()
