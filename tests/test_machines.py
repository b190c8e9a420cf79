"""A run on a cluster whose machines are still to come, or never will."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_ranks import TOY_KEYS
from ray_nodes import Nodes, ray_nodes

from lwray.cluster import machines
from lwray.cluster.machines import asked_for, await_joined
from lwray.config import Config
from lwray.errors import RunFailed

KEYS = (*TOY_KEYS, "tracking.enabled=false", "parallel.cpus_per_worker=1", "parallel.workers=[1,2]", "cluster.wait_s=0")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """A head without a core, and nothing else."""
    with ray_nodes() as nodes:
        yield nodes


def start(nodes: Nodes, storage: Path, *keys: str) -> subprocess.Popen[str]:
    (storage / "toy.toml").touch()
    return subprocess.Popen(
        [sys.executable, "-m", "lwray", "train", str(storage / "toy.toml"), f"--storage={storage}", *KEYS, *keys],
        env=nodes.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def test_without_machines_to_come_too_many_workers_are_refused(nodes: Nodes, tmp_path: Path) -> None:
    process = start(nodes, tmp_path)
    output, _ = process.communicate(timeout=50)
    assert process.returncode == 2, output
    assert "parallel.workers asks for 1 workers, but there are 0 CPU cores" in output
    assert not (tmp_path / "toy").exists()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_where_machines_may_join_the_run_waits_for_them(nodes: Nodes, tmp_path: Path) -> None:
    process = start(nodes, tmp_path, "cluster.grows=true")
    assert process.stdout is not None
    try:
        said = next(line for line in process.stdout if "Waiting" in line)
        assert "there are 0 CPU cores" in said
        nodes.add()
        output, _ = process.communicate(timeout=80)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output
    assert "ended: finished after 20 steps" in output


def test_a_wait_without_end_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "LOOK_S", 0.01)
    config = Config.model_validate({"cluster": {"give_up_after": 0.1}, "parallel": {"workers": 2}})
    said: list[str] = []
    with pytest.raises(RunFailed, match=r"No machines came for 0 s\. parallel\.workers asks for 2 workers"):
        await_joined(config, lambda: [], said.append)


def test_what_is_asked_of_an_autoscaler() -> None:
    for parallel, most, asked in (
        ({"workers": [3, 8]}, {"CPU": 64.0, "GPU": 8.0}, ({"CPU": 1.0, "GPU": 1.0}, 3)),
        ({"workers": [3, 8], "device": "cpu", "cpus_per_worker": 4}, {"CPU": 64.0, "GPU": 8.0}, ({"CPU": 4.0}, 3)),
        ({}, {"CPU": 64.0}, ({"CPU": 1.0}, 1)),
    ):
        assert asked_for(Config.model_validate({"parallel": parallel}), most) == asked
