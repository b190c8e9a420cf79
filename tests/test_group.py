"""Whose fault it is that a group of workers failed, and what is said of it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions
from ray.train import ControllerError
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError, WorkerHealthCheckTimeoutError
from ray.train.v2.api.exceptions import PreemptionError, WorkerGroupError

from lwray.cluster.group import explain, had_no_room, is_machines_fault

CLOSED = RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer [10.0.0.2]:1234")
NCCL = RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:3384, remote process exited or there was a network error")
BUG = KeyError("no such key: 'text'")
SESSION: Any = SimpleNamespace(attempt=SimpleNamespace(logs=Path("/runs/a/attempts/0001/logs")))


def group_of(**by_rank: Exception) -> WorkerGroupError:
    return WorkerGroupError("workers failed", {int(rank[1:]): error for rank, error in by_rank.items()})


@pytest.mark.parametrize(
    "error",
    [
        group_of(r0=CLOSED, r1=CLOSED),
        group_of(r0=NCCL),
        group_of(r0=CLOSED, r1=ray.exceptions.RayActorError()),
        group_of(r0=ray.exceptions.OutOfMemoryError("Memory on the node was 23 of 24 GB")),
        group_of(r0=BUG, r1=ray.exceptions.NodeDiedError("the node is gone")),
        group_of(r0=WorkerHealthCheckTimeoutError("no answer for 60 s")),
        ControllerError(WorkerHealthCheckTimeoutError("no answer")),
        ray.exceptions.OutOfMemoryError("the controller was killed"),
        ray.exceptions.ActorDiedError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_a_machine_did(error: Exception) -> None:
    assert is_machines_fault(error)


@pytest.mark.parametrize(
    "error",
    [
        group_of(r0=BUG),
        group_of(r0=CLOSED, r1=BUG),
        group_of(r0=RuntimeError("mat1 and mat2 shapes cannot be multiplied"), r1=CLOSED, r2=CLOSED),
        ValueError("anything else"),
        ControllerError(ValueError("a wrong argument")),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_the_task_did_is_not_tried_again(error: Exception) -> None:
    assert not is_machines_fault(error)


def test_a_preemption_is_the_machines_fault() -> None:
    assert is_machines_fault(PreemptionError.__new__(PreemptionError))


def test_a_group_that_found_no_room_has_lost_nothing() -> None:
    assert had_no_room(ControllerError(WorkerGroupStartupTimeoutError(2)))
    assert not had_no_room(group_of(r0=CLOSED))


def test_the_rank_that_failed_by_itself_is_named_and_not_those_that_only_lost_it() -> None:
    said = explain(group_of(r0=CLOSED, r1=CLOSED, r2=BUG), SESSION)
    assert said.startswith("Worker 2 failed: KeyError:")
    assert "no such key" in said
    assert str(SESSION.attempt.logs) in said


def test_a_worker_killed_for_memory_is_said_to_be_so_with_the_figures() -> None:
    said = explain(group_of(r1=out_of_memory()), SESSION)
    assert "Memory on the node (IP: 10.0.0.1) was 23.00GB used / 24.00GB limit (0.958)" in said
    assert "Refer to the documentation" not in said


def out_of_memory() -> Exception:
    """As Ray 2.60 words it, abridged."""
    return ray.exceptions.OutOfMemoryError(
        "1 worker(s) were killed due to the node running low on memory. "
        "Memory on the node (IP: 10.0.0.1) was 23.00GB used / 24.00GB limit (0.958)\n"
        "OOM kill reason: Memory usage exceeded threshold\n"
        "Refer to the documentation on how to address the out of memory issue: https://docs.ray.io/… Consider more."
    )
