"""From here to runs elsewhere: a job is checked, shown and handed over; runs are listed, read and stopped."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from door import Door, copy_of_trained, fresh_door, own_process, trained_run  # noqa: F401
from engine_ranks import TOY_KEYS, losses_of
from kustomize import Manifest, render
from ray_cluster import REPOSITORY, RayCluster, ray_cluster, wait_for
from s3_server import BUCKET, ENVIRONMENT, s3_server
from test_kuberay import every, validate_manifests  # noqa: F401

from lwray.cli import main
from lwray.cluster.job import STOP_WAIT
from lwray.errors import ExitCode
from lwray.tracking.journal import read_lines

QUICKSTART = "configs/quickstart.toml"
NOBODY = "http://127.0.0.1:1"
ENDLESS = ("train.steps=100000", "checkpoint.every_seconds=0", "train.log_every=1")


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit code of a command, and what it printed."""
    capsys.readouterr()
    code = main(list(arguments))
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def program(directory: Path, name: str, script: str) -> Path:
    """A program of this name, first on the PATH; returns the file in which it may write down what it was given."""
    file = directory / "bin" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"#!/bin/bash\nrecord={directory / name}.txt\n{script}\n")
    file.chmod(0o755)
    os.environ["PATH"] = f"{file.parent}:{os.environ['PATH']}"
    return directory / f"{name}.txt"


# lwray submit --to ray


def test_what_a_ray_cluster_would_be_sent_is_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ("submit", QUICKSTART, "optim.lr=2e-3", "--print", "--storage", str(tmp_path))
    code, printed = said(capsys, *arguments)
    job = yaml.safe_load(printed)
    assert code == ExitCode.FINISHED
    assert job["submission_id"] == "quickstart-1"
    assert shlex.split(job["entrypoint"]) == [
        *("python", "-m", "lwray", "train", QUICKSTART, "optim.lr=2e-3", "--storage", str(tmp_path))
    ]
    assert job["runtime_env"]["working_dir"] == "."
    assert int(job["runtime_env"]["env_vars"][STOP_WAIT]) > 3


def test_a_submission_has_the_number_of_the_attempt_that_it_will_start(
    door: Door, capsys: pytest.CaptureFixture[str]
) -> None:
    os.environ["LWRAY_STORAGE"] = str(door.storage)
    _, printed = said(capsys, "submit", QUICKSTART, "run.name=tiny", "--print")
    assert yaml.safe_load(printed)["submission_id"] == "tiny-3"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((QUICKSTART, "optim.lrr=1", "--storage", "/r"), "unknown key optim.lrr; did you mean optim.lr?"),
        ((QUICKSTART, "--storage", "runs"), "is a relative path"),
        (("nowhere.toml", "--storage", "/r"), "no configuration file nowhere.toml"),
        ((QUICKSTART, "--storage", "/r", "--address", NOBODY), f"No Ray cluster answers at {NOBODY}"),
        ((QUICKSTART, "--storage", "/r", "--address", "head:6379"), "not the address of a dashboard"),
        ((QUICKSTART, "--storage", "/r"), "Give --address"),
        ((QUICKSTART, "--storage", "/r", "--runtime-env", "none.yaml"), "There is no none.yaml here"),
    ],
    ids=["key", "relative", "file", "nobody", "port", "address", "runtime-env"],
)
def test_what_cannot_work_is_one_sentence_before_anything_is_sent(
    arguments: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed = said(capsys, "submit", *arguments)
    assert code == ExitCode.BAD_INPUT
    assert sentence in printed
    assert printed.count("\n") == 1


def test_a_file_that_would_not_be_sent_is_refused(fresh: Door, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = said(capsys, "submit", str(fresh.config), "--storage", "/r", "--print")
    assert code == ExitCode.BAD_INPUT
    assert f"{fresh.config} lies outside {REPOSITORY}" in printed


# lwray submit --to kube


def rayjob(printed: str) -> Manifest:
    [job] = [document for document in yaml.safe_load_all(printed) if document["kind"] == "RayJob"]
    return dict(job)


def test_a_rayjob_is_one_that_kuberay_takes(
    capsys: pytest.CaptureFixture[str], validate: Callable[[Manifest], None]
) -> None:
    arguments = ("submit", QUICKSTART, "run.name=My_Run.2", "--to", "kube", "--print", "--image", "r/lwray:1")
    code, printed = said(capsys, *arguments)
    job = rayjob(printed)
    assert code == ExitCode.FINISHED
    validate(job)
    assert job["metadata"]["name"] == job["spec"]["jobId"] == "my-run-2-1"
    assert job["spec"]["entrypoint"] == f"python -m lwray train {QUICKSTART} run.name=My_Run.2 run.name=My_Run.2"
    assert set(every("image", job)) == {"r/lwray:1"}


def kubectl(tmp_path: Path, rayjobs: list[dict[str, Any]]) -> Path:
    """A kubectl that knows these RayJobs, renders overlays, and writes down what it is to apply."""
    overlay = yaml.safe_dump_all(render(REPOSITORY / "cluster/kuberay/overlays/gpu-8"))
    (tmp_path / "overlay.yaml").write_text(overlay)
    (tmp_path / "rayjobs.json").write_text(json.dumps({"items": rayjobs}))
    script = f"""
        case $1 in
            get) cat {tmp_path}/rayjobs.json ;;
            kustomize) cat {tmp_path}/overlay.yaml ;;
            apply) cat > $record ;;
        esac"""
    return program(tmp_path, "kubectl", script)


def test_kubectl_is_given_the_overlay_with_a_free_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended = {"metadata": {"name": "quickstart-4"}, "status": {"jobDeploymentStatus": "Complete"}}
    applied = kubectl(tmp_path, [ended, {"metadata": {"name": "quickstarter-9"}}])
    overlay = ("--manifest", "cluster/kuberay/overlays/gpu-8")
    code, printed = said(capsys, "submit", QUICKSTART, "--to", "kube", *overlay)
    assert code == ExitCode.FINISHED
    assert "RayJob quickstart-5" in printed
    assert rayjob(applied.read_text())["metadata"]["name"] == "quickstart-5"
    assert applied.read_text() in printed
    assert "PersistentVolumeClaim" in applied.read_text()


def test_a_run_whose_rayjob_has_not_ended_is_not_submitted_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    applied = kubectl(tmp_path, [{"metadata": {"name": "quickstart-4"}, "status": {"jobDeploymentStatus": "Running"}}])
    code, printed = said(capsys, "submit", QUICKSTART, "--to", "kube", "--image", "r/lwray:1")
    assert code == ExitCode.BAD_INPUT
    assert "kubectl delete rayjob quickstart-4" in printed
    assert not applied.exists()


def test_pods_without_an_image_are_not_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    applied = kubectl(tmp_path, [])
    code, printed = said(capsys, "submit", QUICKSTART, "--to", "kube")
    assert code == ExitCode.BAD_INPUT
    assert "--image" in printed
    assert not applied.exists()


# lwray submit --to slurm


def test_sbatch_is_given_the_run_by_its_name(
    fresh: Door, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = program(tmp_path, "sbatch", 'printf "%s\\n" "$@" > $record; echo 17')
    fresh.config.write_text(fresh.config.read_text() + '\n[run]\nname = "other"\n')
    script = ("--script", str(REPOSITORY / "cluster/slurm/train.sbatch"))
    code, shown = said(capsys, "submit", str(fresh.config), "train.steps=9", "--to", "slurm", *script, "--print")
    assert code == ExitCode.FINISHED
    assert not given.exists()
    code, printed = said(capsys, "submit", str(fresh.config), "train.steps=9", "--to", "slurm", *script)
    assert "Slurm job 17" in printed
    words = given.read_text().splitlines()
    assert shown.split() == ["sbatch", *words]
    assert "--job-name=other" in words
    assert words[-3:] == [str(fresh.config), "train.steps=9", "run.name=other"]


@pytest.mark.parametrize(("to", "missing"), [("slurm", "sbatch"), ("kube", "kubectl")])
def test_a_program_that_is_missing_is_named(
    to: str, missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("bash", "dirname", "realpath", "basename"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    os.environ["PATH"] = str(tmp_path)
    code, printed = said(capsys, "submit", QUICKSTART, "--to", to)
    assert code == ExitCode.BAD_INPUT
    assert f"{missing} is not installed here" in printed


# lwray ls, logs and stop


def test_ls_says_how_each_run_stands(door: Door, capsys: pytest.CaptureFixture[str]) -> None:
    os.environ["LWRAY_STORAGE"] = str(door.storage)
    code, printed = said(capsys, "ls", "--json")
    [row] = json.loads(printed)["runs"]
    assert code == ExitCode.FINISHED
    assert (row["name"], row["state"], row["cause"], row["step"], row["steps"], row["attempts"]) == (
        *("tiny", "finished", "finished", 6, "6", 2),
    )
    assert row["checkpoint"].startswith("step-00000006-")
    (door.storage / "tiny/attempts/0002/ledger.jsonl").write_text("")
    _, printed = said(capsys, "ls")
    assert "tiny" in printed
    assert "killed" in printed
    assert "6 of 6" in printed


def test_logs_are_those_of_the_newest_attempt(door: Door, capsys: pytest.CaptureFixture[str]) -> None:
    os.environ["LWRAY_STORAGE"] = str(door.storage)
    code, printed = said(capsys, "logs", "tiny")
    assert code == ExitCode.BAD_INPUT
    assert "has no logs" in printed
    for rank in (0, 1):
        (door.storage / f"tiny/attempts/0002/logs/rank-{rank:02d}.txt").write_text(f"rank {rank} begins\n")
    assert said(capsys, "logs", "tiny") == (0, "[0] rank 0 begins\n[1] rank 1 begins\n")
    assert said(capsys, "logs", "tiny", "--rank", "1", "--follow") == (0, "rank 1 begins\n")
    code, printed = said(capsys, "logs", "tiny", "--rank", "2")
    assert code == ExitCode.BAD_INPUT
    assert "it has those of 0, 1" in printed


def start(door: Door, *keys: str, storage: str = "", **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lwray", "train", str(door.config), "--launcher", "inline"]
    return subprocess.Popen(
        [*command, "--storage", storage or str(door.storage), *ENDLESS, *keys],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def steps_done(storage: Path, run: str, attempt: int = 1) -> int:
    path = storage / run / "attempts" / f"{attempt:04d}" / "metrics.jsonl"
    return max((line["step"] for line in read_lines(path)), default=0)


def test_a_run_is_stopped_by_its_storage_and_commits(fresh: Door, capsys: pytest.CaptureFixture[str]) -> None:
    process = start(fresh)
    wait_for(lambda: steps_done(fresh.storage, "tiny") > 5, 40, "step 5")
    os.environ["LWRAY_STORAGE"] = str(fresh.storage)
    _, listed = said(capsys, "ls", "--json")
    assert json.loads(listed)["runs"][0]["state"] == "running"
    code, printed = said(capsys, "stop", "tiny")
    output, _ = process.communicate(timeout=20)
    assert (code, process.returncode) == (0, ExitCode.TERMINATED), printed + output
    last = read_lines(fresh.storage / "tiny/attempts/0001/ledger.jsonl")[-1]
    assert (last["event"], last["cause"]) == ("stopped", "TERM")
    assert f"it goes on at step {last['step']}." in printed
    code, printed = said(capsys, "stop", "tiny")
    assert code == 0
    assert "has ended already" in printed


def test_a_run_that_was_killed_cannot_be_stopped_any_more(fresh: Door, capsys: pytest.CaptureFixture[str]) -> None:
    process = start(fresh, "checkpoint.every_steps=2")
    wait_for(lambda: steps_done(fresh.storage, "tiny") > 5, 40, "step 5")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    os.environ["LWRAY_STORAGE"] = str(fresh.storage)
    begun = time.monotonic()
    code, printed = said(capsys, "stop", "tiny")
    assert code == ExitCode.FAILED
    assert "attempt 1 was killed" in printed
    assert time.monotonic() - begun < 5


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_run_on_an_object_store_is_stopped_from_another_machine(
    fresh: Door, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with s3_server() as endpoint:
        os.environ.update(ENVIRONMENT | {"AWS_ENDPOINT_URL": endpoint, "LWRAY_SPOOL": str(tmp_path / "here")})
        url = f"s3://{BUCKET}/runs"
        process = start(fresh, storage=url, LWRAY_SPOOL=str(tmp_path / "there"))
        wait_for(lambda: any(path.stat().st_size for path in (tmp_path / "there").rglob("metrics.jsonl")), 40, "a step")
        code, printed = said(capsys, "stop", f"{url}/tiny")
        output, _ = process.communicate(timeout=20)
        assert (code, process.returncode) == (0, ExitCode.TERMINATED), printed + output
        assert "it goes on at step" in printed
        os.environ["LWRAY_STORAGE"] = url
        _, listed = said(capsys, "ls", "--json")
    [row] = json.loads(listed)["runs"]
    assert (row["state"], row["cause"]) == ("stopped", "TERM")


# on a real cluster that asks for a token


def lwray(cluster: RayCluster, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lwray", *arguments],
        cwd=REPOSITORY,
        env=cluster.environment | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_submitted_run_is_stopped_submitted_again_and_goes_on(tmp_path: Path) -> None:
    keys = ("run.name=toy", *TOY_KEYS, *ENDLESS, "tracking.enabled=false")
    here = {"LWRAY_STORAGE": str(tmp_path)}
    with ray_cluster(cpus=2) as cluster:
        at = ("--address", cluster.dashboard)
        submit = ("submit", "configs/invariance.toml", *keys, "--storage", str(tmp_path), *at)
        missing = lwray(cluster, *submit, RAY_AUTH_MODE="disabled")
        wrong = lwray(cluster, *submit, RAY_AUTH_TOKEN="0" * 64)
        for refused, sentence in ((missing, "asks for a token"), (wrong, "does not take the token")):
            assert refused.returncode == ExitCode.BAD_INPUT
            assert sentence in refused.stderr
            assert refused.stderr.count("\n") == 1, refused.stderr

        wait_for(lambda: submitted(cluster, submit, "toy-1"), 150, "an agent for jobs")
        wait_for(lambda: steps_done(tmp_path, "toy") > 20, 90, "step 20 of the job")
        again = lwray(cluster, *submit)
        assert again.returncode == ExitCode.BAD_INPUT
        assert "has the job toy-1 (RUNNING)" in again.stderr
        first = stopped(tmp_path, 1, lwray(cluster, "stop", "toy", *at, **here))

        assert submitted(cluster, submit, "toy-2")
        wait_for(lambda: steps_done(tmp_path, "toy", 2) > first + 20, 90, "20 more steps")
        assert "toy-2" in lwray(cluster, "ls", *at, **here).stdout
        # the driver and its workers hear of it through the storage
        second = stopped(tmp_path, 2, lwray(cluster, "stop", "toy", **here))
    events = read_lines(tmp_path / "toy/attempts/0002/ledger.jsonl")
    assert [event["from_step"] for event in events if event["event"] == "resumed"] == [first]
    assert len(losses_of(tmp_path, "toy")) == second
    assert "is process" in lwray(cluster, "logs", "toy", "--rank", "0", **here).stdout


def stopped(storage: Path, attempt: int, command: subprocess.CompletedProcess[str]) -> int:
    """The step at which a stop committed."""
    assert command.returncode == 0, command.stdout + command.stderr
    saved, last = read_lines(storage / f"toy/attempts/{attempt:04d}/ledger.jsonl")[-2:]
    assert (saved["event"], last["event"], last["cause"]) == ("checkpoint", "stopped", "TERM")
    assert saved["step"] == last["step"]
    assert f"it goes on at step {last['step']}." in command.stdout
    return int(last["step"])


def submitted(cluster: RayCluster, arguments: tuple[str, ...], submission_id: str) -> bool:
    """False while the cluster has no agent yet that takes jobs."""
    done = lwray(cluster, *arguments)
    if "No available agent" in done.stderr:
        return False
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"job {submission_id}" in done.stdout
    return True
