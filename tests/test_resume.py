"""Killed with SIGKILL and started again, a run goes on and ends as if nothing had happened, bit for bit."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_ranks import TOY_KEYS, losses_of, rows_of, weights_of
from ray_cluster import wait_for

from lwray.tracking.journal import merged_ledger, read_lines
from lwray.tracking.rundir import RunDir

KEYS = (
    *TOY_KEYS,
    "parallel.cpus_per_worker=1",
    "task.options.dropout=0.1",
    "train.steps=900",
    "eval.every_steps=50",
    "tracking.enabled=false",
)


def command(storage: Path, name: str, *options: str) -> list[str]:
    file = storage / "toy.toml"
    file.touch()
    return [sys.executable, "-m", "lwray", "train", str(file), f"--storage={storage}", f"run.name={name}", *options]


def start(storage: Path, name: str, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(storage, name, *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], seconds: float) -> None:
    output, _ = process.communicate(timeout=seconds)
    assert process.returncode == 0, output


def last_step(run: RunDir) -> int:
    attempts = run.attempts_in_order()
    if not attempts or not attempts[-1].metrics.exists():
        return -1
    return max((line["step"] for line in read_lines(attempts[-1].metrics)), default=-1)


def assert_same(storage: Path, name: str, whole: str) -> None:
    assert losses_of(storage, name) == losses_of(storage, whole)
    assert rows_of(storage, name) == rows_of(storage, whole)
    expected = weights_of(storage, whole)
    found = weights_of(storage, name)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].equal(tensor), key


def resumed_steps(storage: Path, name: str) -> Iterator[int]:
    return (e["from_step"] for e in merged_ledger(RunDir(storage / name)) if e["event"] == "resumed")


def test_a_run_killed_at_any_point_is_bit_identical_in_the_end(tmp_path: Path) -> None:
    keys = ("--launcher=inline", *KEYS, "checkpoint.every_steps=7")
    finish(start(tmp_path, "whole", *keys), 25)
    draw = random.Random(7)
    for goal in (40, 300, 600):
        process = start(tmp_path, "killed", *keys)
        goal += draw.randrange(60)
        wait_for(lambda goal=goal: last_step(RunDir(tmp_path / "killed")) >= goal, 25, f"step {goal}")
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    finish(start(tmp_path, "killed", *keys), 25)
    # the first kill may come before the first commit, from the writer that is still starting
    assert len(list(resumed_steps(tmp_path, "killed"))) in (2, 3)
    assert_same(tmp_path, "killed", "whole")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_on_ray_a_killed_driver_is_bit_identical_in_the_end(tmp_path: Path) -> None:
    # three workers: with two, a sum has the same bits in any order, and a wrong order of buckets would not show
    keys = (
        *KEYS,
        "train.steps=600",
        "parallel.cpus_per_worker=0.6",
        "parallel.workers=3",
        "batch.micro_size=2",
        "checkpoint.every_steps=20",
    )
    finish(start(tmp_path, "whole", *keys), 150)
    process = start(tmp_path, "killed", *keys)
    wait_for(lambda: last_step(RunDir(tmp_path / "killed")) >= 250, 90, "step 250")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    finish(start(tmp_path, "killed", *keys), 150)
    assert min(resumed_steps(tmp_path, "killed")) >= 240
    assert_same(tmp_path, "killed", "whole")
