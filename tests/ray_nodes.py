"""A real Ray cluster of several nodes on loopback, which come and go."""

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
    """A head without CPUs, and nodes of one CPU each, that can be added, killed and drained."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes: list[Any] = []

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, **ENVIRONMENT, "RAY_ADDRESS": self.cluster.address}

    def add(self) -> None:
        self.nodes.append(self.cluster.add_node(num_cpus=1, object_store_memory=STORE))

    def kill(self, node: Any = None) -> None:
        """SIGKILL to a node, by default the oldest."""
        self.cluster.remove_node(node or self.nodes.pop(0), allow_graceful=False)

    def drain(self, seconds: int) -> Any:
        """Tell the cluster that the oldest node goes, as a notice of preemption does; it stays until it is killed."""
        node = self.nodes.pop(0)
        command = [str(Path(sys.executable).parent / "ray"), "drain-node", "--address", self.cluster.address]
        command += ["--node-id", node.node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
        command += ["--reason-message", "spot", "--deadline-remaining-seconds", str(seconds)]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        return node


@contextmanager
def ray_nodes() -> Iterator[Nodes]:
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    nodes = Nodes()
    try:
        yield nodes
    finally:
        nodes.cluster.shutdown()
        os.environ.clear()
        os.environ.update(before)
