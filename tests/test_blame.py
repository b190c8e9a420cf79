"""A node that loses workers again and again is named, and later groups are placed elsewhere."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray.exceptions
from engine_ranks import TOY_KEYS
from ray.train.v2.api.exceptions import WorkerGroupError
from ray_cluster import wait_for
from ray_nodes import ray_nodes

from lwray.cluster.blame import STEPS, blamed, failing, trusted
from lwray.cluster.capacity import NodeView
from lwray.tracking.journal import Line, merged_ledger, merged_metrics
from lwray.tracking.rundir import RunDir

NEED = {"CPU": 1.0}


def lost(step: int, *nodes: str) -> Line:
    return {"event": "lost", "step": step, "nodes": nodes}


def node(name: str, cpus: float = 1.0, leaves_at: float | None = None) -> NodeView:
    return NodeView(name, "10.0.0.1", {}, leaves_at, total={"CPU": cpus})


def test_the_node_of_the_worker_that_is_gone_is_blamed_and_not_those_that_lost_the_link_to_it() -> None:
    broken = RuntimeError("Connection closed by peer [10.0.0.2]:1234")
    failure = WorkerGroupError("workers failed", {0: broken, 1: ray.exceptions.RayActorError()})
    assert blamed(failure, {"nodes": ["a", "b"]}) == ["b"]
    assert blamed(failure, None) == []


def test_a_node_that_fails_twice_in_a_hundred_steps_fails_and_one_that_fails_rarely_does_not() -> None:
    assert failing([lost(10, "a"), {"event": "checkpoint"}, lost(10 + STEPS - 1, "b", "a")]) == {"a"}
    assert failing([lost(10, "a"), lost(10 + STEPS, "a"), lost(300, "b")]) == set()
    assert failing([lost(10), lost(11)]) == set()


def test_a_failing_node_is_used_all_the_same_where_the_others_are_not_enough() -> None:
    there = [node("bad"), node("good"), node("other")]
    assert trusted(there, {"bad"}, NEED, least=2) == there[1:]
    assert trusted(there, {"bad"}, NEED, least=3) == there
    assert trusted([node("bad"), node("leaves", leaves_at=1.0)], {"bad"}, NEED, least=1)[0].id == "bad"


def start(storage: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    file = storage / "toy.toml"
    file.write_text("""[env]\nLWRAY_FAULTS = '[{"point": "step.data", "do": "delay", "seconds": 0.3}]'\n""")
    command = [sys.executable, "-m", "lwray", "train", str(file), f"--storage={storage}", "run.name=run", *TOY_KEYS]
    keys = ("train.steps=60", "tracking.enabled=false", "parallel.workers=1", "parallel.cpus_per_worker=1")
    return subprocess.Popen(
        [*command, *keys, "checkpoint.every_steps=2"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_the_third_group_leaves_out_the_node_that_lost_the_first_two(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")

    def groups() -> list[Any]:
        return [event for event in merged_ledger(run) if event["event"] == "group"]

    def trains(number: int) -> None:
        wait_for(lambda: len(groups()) == number, 150, f"group {number}")
        goal = max((line["step"] for line in merged_metrics(run)), default=0) + 4
        wait_for(lambda: merged_metrics(run)[-1:] and merged_metrics(run)[-1]["step"] >= goal, 60, f"step {goal}")

    with ray_nodes() as nodes:
        nodes.add()
        process = start(tmp_path, nodes.environment)
        try:
            trains(1)
            os.kill(groups()[0]["pids"][0], signal.SIGKILL)
            trains(2)
            nodes.add()
            os.kill(groups()[1]["pids"][0], signal.SIGKILL)
            output, _ = process.communicate(timeout=120)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        assert process.returncode == 0, output
        bad, other = (node.node_id for node in nodes.nodes)
    assert [group["nodes"] for group in groups()] == [[bad], [bad], [other]]
    named = [event for event in merged_ledger(run) if event["event"] == "left_out"]
    assert [event["node"] for event in named] == [bad]
    assert f"({bad}) lost workers twice" in output
