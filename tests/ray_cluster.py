"""A real Ray cluster on loopback for a test module: its own ports and temporary directory, token authentication."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BIN = Path(sys.executable).parent
REPOSITORY = Path(__file__).parent.parent


@dataclass(frozen=True)
class RayCluster:
    address: str
    dashboard: str
    environment: dict[str, str]

    def joined(self) -> dict[str, str]:
        """The environment of a command that joins the cluster."""
        return self.environment | {"RAY_ADDRESS": self.address}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def ray_cluster(cpus: int) -> Iterator[RayCluster]:
    """`ray start --head --block` with a dashboard; ended, with all that it started, at the end."""
    port, dashboard = free_port(), free_port()
    # a short path: unix sockets lie in it
    temporary = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    environment = os.environ | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("RAY_ADDRESS", None)
    command = [str(BIN / "ray"), "start", "--head", "--block", f"--num-cpus={cpus}", "--node-ip-address=127.0.0.1"]
    command += [f"--port={port}", f"--dashboard-port={dashboard}", "--dashboard-host=127.0.0.1"]
    # a second cluster on this machine would have no agent, and take no jobs, for want of the agent's port
    command += [f"--dashboard-agent-listen-port={free_port()}"]
    command += [f"--temp-dir={temporary}", f"--object-store-memory={100 * 2**20}", "--disable-usage-stats"]
    with (Path(temporary) / "head.log").open("w") as log:
        head = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for(lambda: answers(port) and answers(dashboard), 60, "the Ray head")
        yield RayCluster(f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}", environment)
    finally:
        head.send_signal(signal.SIGTERM)
        try:
            head.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(head.pid, signal.SIGKILL)
        shutil.rmtree(temporary, ignore_errors=True)


def answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_for(condition: object, seconds: float, what: str) -> None:
    """Poll `condition` (a callable) until it is true; AssertionError after `seconds`."""
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds:.0f} s"
        time.sleep(0.1)
