"""`lwray train` on a real Ray cluster: the losses, a stop that commits, the loss of a worker, and Ray jobs."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_ranks import TOY_KEYS, EngineRun, losses_of, train_on, weights_of
from ray_cluster import BIN, REPOSITORY, RayCluster, ray_cluster, wait_for

from lwray.tracking.journal import read_lines

LONG = (*TOY_KEYS[:-2], "train.steps=4000", "checkpoint.every_steps=20", "tracking.enabled=false")
SHORT = (*TOY_KEYS, "tracking.enabled=false")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(cpus=4) as running:
        yield running


def command(storage: Path, name: str, *keys: str) -> list[str]:
    """`lwray train` of an empty file: everything is on the command line."""
    file = storage / "toy.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    return [sys.executable, "-m", "lwray", "train", str(file), "--storage", str(storage), f"run.name={name}", *keys]


def start(cluster: RayCluster, *arguments: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments), env=cluster.joined(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def steps_done(storage: Path, name: str, attempt: int) -> int:
    path = storage / name / "attempts" / f"{attempt:04d}" / "metrics.jsonl"
    return max((line["step"] for line in read_lines(path)), default=0) if path.exists() else 0


def events(storage: Path, name: str, attempt: int) -> list[dict[str, Any]]:
    return read_lines(storage / name / "attempts" / f"{attempt:04d}" / "ledger.jsonl")


def test_two_ray_workers_have_the_losses_of_one_process(cluster: RayCluster, tmp_path: Path) -> None:
    train_on(1, tmp_path, [EngineRun("alone", SHORT)])
    process = start(cluster, tmp_path, "together", *SHORT, "parallel.workers=2")
    output, _ = process.communicate(timeout=55)
    assert process.returncode == 0, output
    pairs = zip(losses_of(tmp_path, "alone"), losses_of(tmp_path, "together"), strict=True)
    assert max(abs(a - b) / abs(a) for a, b in pairs) <= 1e-5
    summary = json.loads((tmp_path / "together" / "summary.json").read_text())
    assert (summary["cause"], summary["step"]) == ("finished", 20)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 75)])
def test_a_stopped_run_commits_and_says_who_stopped_it(
    cluster: RayCluster, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    process = start(cluster, tmp_path, "stopped", *LONG)
    wait_for(lambda: steps_done(tmp_path, "stopped", 1) > 30, 40, "step 30")
    process.send_signal(number)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == code, output
    last = events(tmp_path, "stopped", 1)
    assert [event["event"] for event in last[-2:]] == ["checkpoint", "stopped"]
    assert last[-2]["step"] == last[-1]["step"] == steps_done(tmp_path, "stopped", 1) + 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_worker_costs_no_more_than_the_steps_since_the_last_commit(
    cluster: RayCluster, tmp_path: Path
) -> None:
    keys = (*LONG, "train.steps=400", "parallel.workers=2")
    whole = start(cluster, tmp_path, "whole", *keys)
    output, _ = whole.communicate(timeout=120)
    assert whole.returncode == 0, output
    process = start(cluster, tmp_path, "bereft", *keys)
    wait_for(lambda: steps_done(tmp_path, "bereft", 1) > 60, 60, "step 60")
    os.kill(worker_pid(tmp_path / "bereft" / "attempts" / "0001" / "logs" / "rank-01.txt"), signal.SIGKILL)
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 0, output
    assert [e["event"] for e in events(tmp_path, "bereft", 1) if e["event"] in ("started", "resumed")] == [
        "started",
        "resumed",
    ]
    assert losses_of(tmp_path, "bereft") == losses_of(tmp_path, "whole")
    for key, tensor in weights_of(tmp_path, "whole").items():
        assert tensor.equal(weights_of(tmp_path, "bereft")[key]), key


def worker_pid(log: Path) -> int:
    """A rank writes its process id in the first line of its log."""
    return int(log.read_text().splitlines()[0].rpartition(" ")[2])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_ray_job_is_stopped_submitted_again_and_goes_on(cluster: RayCluster, tmp_path: Path) -> None:
    def job(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(BIN / "ray"), "job", *arguments],
            env=cluster.environment | {"RAY_API_SERVER_ADDRESS": cluster.dashboard},
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )

    def submit(storage: str, *keys: str, wait: bool) -> subprocess.CompletedProcess[str]:
        wait_time = json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}})
        options = [f"--runtime-env-json={wait_time}", "--working-dir=.", *([] if wait else ["--no-wait"])]
        train = ["python", "-m", "lwray", "train", "configs/invariance.toml", f"--storage={storage}", *keys]
        return job("submit", f"--submission-id=job-{len(submitted)}", *options, "--", *train)

    submitted: list[str] = []
    refused = submit("runs", *LONG, wait=True)
    assert "relative path" in refused.stdout
    assert "--storage /shared/runs" in refused.stdout
    submitted.append("job-0")

    keys = ("run.name=job", *LONG, "train.steps=1500")
    submit(str(tmp_path), *keys, wait=False)
    wait_for(lambda: steps_done(tmp_path, "job", 1) > 60, 90, "step 60 of the job")
    job("stop", "job-1")
    assert events(tmp_path, "job", 1)[-1]["event"] == "stopped"
    submitted.append("job-1")
    again = submit(str(tmp_path), *keys, wait=True)
    assert "succeeded" in again.stdout, again.stdout[-3000:]
    resumed = next(event for event in events(tmp_path, "job", 2) if event["event"] != "group")
    assert (resumed["event"], resumed["from_step"]) == ("resumed", events(tmp_path, "job", 1)[-1]["step"])
    assert len(losses_of(tmp_path, "job")) == 1500


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_stop_reaches_a_ray_that_was_started_here(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(tmp_path, "local", *LONG), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wait_for(lambda: steps_done(tmp_path, "local", 1) > 30, 80, "step 30")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 143, output
    assert [event["event"] for event in events(tmp_path, "local", 1)[-2:]] == ["checkpoint", "stopped"]


@pytest.mark.slow
def test_a_stop_before_there_are_workers_is_a_stop(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(tmp_path, "early", *LONG), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    # while Ray starts, which takes the signal for itself
    wait_for((tmp_path / "early" / "attempts" / "0001" / "config.toml").exists, 40, "the attempt")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=40)
    assert process.returncode == 143, output
    assert "early ended: TERM after 0 steps" in output
