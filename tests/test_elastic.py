"""Machines come and go: on a Ray cluster of several nodes a run grows, gives way and goes on, and stays the run."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from door import process_as_it_was
from engine_ranks import losses_of, rows_of
from ray_cluster import REPOSITORY, wait_for
from ray_nodes import Nodes, ray_nodes

from lwray.cli import main
from lwray.tracking.journal import merged_ledger, merged_metrics
from lwray.tracking.rundir import RunDir

# slow enough that growing pays, and that there is time for machines to come and go
PACE = """
[env]
LWRAY_FAULTS = '[{"point": "step.data", "do": "delay", "seconds": 0.6}]'
"""
PENDING = """
import ray
from ray.util import placement_group_table
ray.init(logging_level="error", log_to_driver=False)
print(sum(group["state"] == "PENDING" for group in placement_group_table().values()))
"""
KEYS = ("train.steps=300", "tracking.enabled=false", "parallel.cpus_per_worker=1", "eval.baseline=false")
ELASTIC = ("parallel.workers=[1,3]", "cluster.wait_s=0", "checkpoint.every_steps=5")


def start(nodes: Nodes, storage: Path, name: str, *keys: str) -> subprocess.Popen[str]:
    file = storage / "paced.toml"
    file.write_text((REPOSITORY / "configs" / "invariance.toml").read_text() + PACE)
    return subprocess.Popen(
        [sys.executable, "-m", "lwray", "train", str(file), f"--storage={storage}", f"run.name={name}", *keys],
        env=nodes.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def step_of(run: RunDir) -> int:
    return max((line["step"] for line in merged_metrics(run)), default=-1)


def waits_for_room(nodes: Nodes) -> bool:
    """Whether a placement group that an autoscaler would see is pending."""
    command = [sys.executable, "-c", PENDING]
    done = subprocess.run(command, env=nodes.environment, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.strip() != "0"


def groups(run: RunDir) -> list[int]:
    """The sizes of the groups of workers so far."""
    return [event["workers"] for event in merged_ledger(run) if event["event"] == "group"]


def progress(run: RunDir, size: int, steps: int = 10) -> None:
    """Wait until a new group, of `size` workers, has done some steps."""
    before = len(groups(run))
    wait_for(lambda: len(groups(run)) > before and groups(run)[-1] == size, 90, f"a group of {size}")
    goal = step_of(run) + steps
    wait_for(lambda: step_of(run) >= goal, 60, f"step {goal}")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_times_nodes_are_drained_killed_and_added_and_the_run_stays_the_run(tmp_path: Path) -> None:
    whole = ["train", str(REPOSITORY / "configs" / "invariance.toml"), f"--storage={tmp_path}", "run.name=whole", *KEYS]
    with process_as_it_was():
        assert main([*whole, "--launcher=inline"]) == 0
    run = RunDir(tmp_path / "elastic")
    with ray_nodes() as nodes:
        for _ in range(3):
            nodes.add()
        process = start(nodes, tmp_path, "elastic", *KEYS, *ELASTIC)
        try:
            progress(run, 3)
            nodes.kill()
            progress(run, 2)
            nodes.add()
            progress(run, 3)
            leaving = nodes.drain(30)
            progress(run, 2)
            nodes.kill(leaving)
            nodes.add()
            progress(run, 3)
            nodes.kill()
            progress(run, 2)
            nodes.kill()
            progress(run, 1)
            nodes.add()
            progress(run, 2)
            leaving = nodes.drain(30)
            progress(run, 1)
            nodes.kill(leaving)
            # the last one, too: the run waits, and asks the cluster for room
            nodes.kill()
            wait_for(lambda: waits_for_room(nodes), 60, "a placement that waits")
            nodes.add()
            progress(run, 1)
            output, _ = process.communicate(timeout=250)
            assert process.returncode == 0, output
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            print(process.communicate()[0])
    assert rows_of(tmp_path, "elastic") == rows_of(tmp_path, "whole")
    pairs = zip(losses_of(tmp_path, "whole"), losses_of(tmp_path, "elastic"), strict=True)
    assert max(abs(a - b) / abs(a) for a, b in pairs) <= 1e-5
    assert groups(run) == [3, 2, 3, 2, 3, 2, 1, 2, 1, 1]
    events = [event["event"] for event in merged_ledger(run)]
    assert (events.count("lost"), events.count("drain"), events.count("resized")) == (4, 2, 9)
