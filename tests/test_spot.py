"""A spot machine's notice becomes a drain of its Ray node: a fake metadata server, and a real node that drains."""

import json
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from door import own_process  # noqa: F401
from ray_cluster import wait_for
from ray_nodes import Nodes, ray_nodes

from lwray.cluster import spot
from lwray.cluster.metadata import find_cloud
from lwray.errors import ExitCode, UserError

TOKEN = "a-token"


class Server:
    """Answers as a metadata server would; `notice` is what it says once there is one."""

    def __init__(self) -> None:
        self.notice = ""
        self.token = TOKEN
        self.url = ""


def aws(server: Server, method: str, path: str, headers: Any) -> tuple[int, str]:
    if (method, path) == ("PUT", "/latest/api/token"):
        return (200, server.token) if headers["X-aws-ec2-metadata-token-ttl-seconds"] else (400, "")
    if headers["X-aws-ec2-metadata-token"] != server.token:
        return 401, ""
    known = (method, path) == ("GET", "/latest/meta-data/spot/instance-action") and server.notice
    return (200, server.notice) if known else (404, "")


def gcp(server: Server, method: str, path: str, headers: Any) -> tuple[int, str]:
    if headers["Metadata-Flavor"] != "Google":
        return 403, ""
    known = {"instance/id": "17", "instance/preempted": server.notice or "FALSE"}
    text = known.get(path.removeprefix("/computeMetadata/v1/"))
    return (200, text) if method == "GET" and text else (404, "")


@contextmanager
def metadata_server(answer: Callable[[Server, str, str, Any], tuple[int, str]]) -> Iterator[Server]:
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version: ClassVar[str] = "HTTP/1.0"

        def handle_any(self) -> None:
            status, text = answer(server, self.command, self.path, self.headers)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_PUT = handle_any  # noqa: N815

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        server.url = f"http://127.0.0.1:{listening.server_address[1]}"
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            listening.shutdown()
            thread.join()


def terminate_at(seconds: float) -> str:
    """AWS's notice."""
    when = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return json.dumps({"action": "terminate", "time": when})


def test_aws_is_found_and_says_when_the_machine_goes() -> None:
    with metadata_server(aws) as server:
        cloud = find_cloud(server.url, "auto")
        assert (cloud.name, cloud.deadline()) == ("AWS", None)
        server.notice = terminate_at(1_800_000_000)
        assert cloud.deadline() == 1_800_000_000
        # its tokens end after some hours
        server.token = "another"
        assert cloud.deadline() == 1_800_000_000


def test_google_cloud_is_found_and_gives_half_a_minute() -> None:
    with metadata_server(gcp) as server:
        cloud = find_cloud(server.url, "auto")
        assert (cloud.name, cloud.deadline()) == ("Google Cloud", None)
        server.notice = "TRUE"
        assert cloud.deadline() == pytest.approx(time.time() + 30, abs=5)


def test_a_server_that_fails_is_no_notice_and_no_cloud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lwray.cluster.metadata.PAUSE_S", 0.0)
    with metadata_server(lambda *request: (500, "")) as server, pytest.raises(UserError, match="no metadata server"):
        find_cloud(server.url, "auto")
    with metadata_server(gcp) as server:
        cloud = find_cloud(server.url, "gcp")
    with pytest.raises(OSError):
        cloud.deadline()


def test_a_machine_without_ray_has_nothing_to_drain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lwray.cluster.spot.START_S", 0.0)
    assert spot.main(["--address", "127.0.0.1:1", "--cloud", "none"]) == ExitCode.BAD_INPUT
    said = capsys.readouterr().err
    assert "No Ray node runs on this machine: nobody answers at" in said
    assert said.count("\n") == 1


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """A cluster that this process has joined."""
    import ray

    with ray_nodes() as running:
        ray.init(address=running.cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        yield running
        ray.shutdown()


@contextmanager
def busy_node(nodes: Nodes) -> Iterator[str]:
    """The id of a fresh node that works, because one that drains and has nothing to do goes at once."""
    import ray

    @ray.remote(num_cpus=1)
    class Work:
        def node(self) -> str:
            return str(ray.get_runtime_context().get_node_id())

    nodes.add()
    worker = Work.remote()
    assert ray.get(worker.node.remote()) == nodes.nodes[-1].node_id
    yield nodes.nodes[-1].node_id
    ray.kill(worker)
    nodes.kill(nodes.nodes.pop())


@contextmanager
def agent(nodes: Nodes, log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m lwray.cluster.spot` for a fresh node, which has other nodes beside it on this machine."""
    command = [sys.executable, "-m", "lwray.cluster.spot", "--interval", "0.5", *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=nodes.environment, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def draining() -> dict[str, float]:
    """Unix seconds by which each draining node is gone."""
    from ray._private.state import state

    return {node: deadline / 1000 for node, deadline in state.get_draining_nodes().items()}


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_notice_drains_the_node_of_this_machine_until_its_deadline(nodes: Nodes, tmp_path: Path) -> None:
    log = tmp_path / "agent.txt"
    with metadata_server(aws) as server, busy_node(nodes) as own:
        with agent(nodes, log, "--node-id", own, "--metadata-url", server.url) as process:
            wait_for(lambda: "Watching AWS" in log.read_text(), 30, "the agent")
            assert draining() == {}
            deadline = int(time.time()) + 120
            server.notice = terminate_at(deadline)
            assert process.wait(20) == 0
        assert draining() == {own: pytest.approx(deadline, abs=1)}
    said = log.read_text().splitlines()
    assert said[1:] == [f"AWS takes this machine: Ray node {own} is draining; it has {said[1].split()[-2]} s."]
    assert 100 < int(said[1].split()[-2]) <= 120


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_sigterm_drains_the_node_too(nodes: Nodes, tmp_path: Path) -> None:
    log = tmp_path / "agent.txt"
    with busy_node(nodes) as own:
        with agent(nodes, log, "--node-id", own, "--cloud", "none", "--grace", "40") as process:
            wait_for(lambda: "Watching" in log.read_text(), 30, "the agent")
            begun = time.time()
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        assert draining()[own] == pytest.approx(begun + 40, abs=5)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_machine_of_several_nodes_must_name_one(nodes: Nodes, tmp_path: Path) -> None:
    nodes.add()
    with agent(nodes, tmp_path / "agent.txt", "--cloud", "none") as process:
        assert process.wait(40) == 2
    assert "--node-id" in (tmp_path / "agent.txt").read_text()
