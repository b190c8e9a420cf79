"""One `ray start --block` on this machine, with ports and files of its own, so that jobs can share the machine."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray._private.state import GlobalState
from ray._private.utils import set_kill_on_parent_death_linux
from ray.core.generated.autoscaler_pb2 import DrainNodeReason
from ray.util import get_node_ip_address

from lwray.cluster.head import answers

LABEL = "lwray-node"
OBJECT_STORE_BYTES = 256 * 2**20
"""Training passes nothing through it; Ray's default is a third of the machine's memory."""
END_S = 10.0


class RayNode:
    """Started when entered, ended with all that it started when left. `joins` is a head's address, None for a head."""

    def __init__(self, scratch: Path, joins: str | None, resources: Mapping[str, int]) -> None:
        self._scratch, self._resources, self._joins = scratch, resources, joins
        self._label = uuid.uuid4().hex
        self.address = joins or f"{get_node_ip_address()}:{free_port()}"

    def __enter__(self) -> "RayNode":
        # a short path: unix sockets lie in it
        self._files = Path(tempfile.mkdtemp(prefix="ray-", dir=self._scratch))
        # it is told in another way: by `drain`, or by the driver of the whole job
        environment = os.environ | {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
        environment.pop("RAY_ADDRESS", None)
        with (self._files / "start.log").open("w") as log:
            self._process = subprocess.Popen(
                self._command(),
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
                # where Slurm kills only the processes of a step that it knows, Ray must not be left
                preexec_fn=set_kill_on_parent_death_linux,
            )
        return self

    def __exit__(self, *failure: object) -> None:
        if self._process.poll():
            print((self._files / "start.log").read_text()[-2000:], flush=True)  # noqa: T201
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        # what ended in order has left nothing
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._files, ignore_errors=True)

    def _command(self) -> list[str]:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        command += [f"--temp-dir={self._files}", f"--object-store-memory={OBJECT_STORE_BYTES}"]
        command += [f"--num-cpus={self._resources['CPU']}", f"--num-gpus={self._resources['GPU']}"]
        command += [f"--labels={LABEL}={self._label}", "--include-log-monitor=false"]
        # the ports that Ray would take by number, or out of one range, on a machine that may be shared
        command += ["--min-worker-port=0", "--max-worker-port=0", f"--dashboard-agent-listen-port={free_port()}"]
        if self._joins:
            return [*command, f"--address={self._joins}"]
        host, _, port = self.address.rpartition(":")
        command += ["--head", f"--node-ip-address={host}", f"--port={port}"]
        # nothing scales this cluster but Slurm
        return [*command, f"--ray-client-server-port={free_port()}", "--include-dashboard=false", "--no-monitor"]

    def runs(self) -> bool:
        return self._process.poll() is None

    def is_member(self) -> bool:
        """Whether the cluster counts this node in: not before it has joined, and no more once drained and idle."""
        return bool(self._id())

    def is_busy(self) -> bool:
        """Whether something has resources of this node; a cluster that does not answer needs nothing."""
        with cluster_state(self.address) as state:
            if state is None or not (own := self._id()):
                return False
            total = state.total_resources_per_node().get(own, {})
            free = state.available_resources_per_node().get(own, {})
            return any(free.get(name, 0.0) < total.get(name, 0.0) for name in ("CPU", "GPU"))

    def drain(self, deadline: float) -> None:
        """Tell the cluster that this node is gone at `deadline`, in Unix seconds, as at any preemption."""
        if own := self._id():
            reason = DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
            ray._raylet.GcsClient(address=self.address).drain_node(
                own, reason, "Slurm takes the node", int(deadline * 1000)
            )

    def _id(self) -> str:
        """Ray's id of this node; empty where it has not joined, and where the cluster does not answer."""
        with cluster_state(self.address) as state:
            nodes = state.node_table() if state else []
            return next((node["NodeID"] for node in nodes if self._is_own(node) and node["Alive"]), "")

    def _is_own(self, node: Mapping[str, Any]) -> bool:
        return bool(node["Labels"].get(LABEL) == self._label)


@contextmanager
def cluster_state(address: str) -> Iterator[Any]:
    """What the head knows, or None where it does not answer. A connection that is kept would end with the head."""
    state, options = GlobalState(), ray._raylet.GcsClientOptions
    state._initialize_global_state(
        options.create(address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False)
    )
    try:
        # a port that nobody listens on is asked for a minute
        known = answers(address) and state._connect_and_get_accessor() is not None
    except ray.exceptions.RaySystemError:
        known = False
    try:
        yield state if known else None
    finally:
        state.disconnect()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
