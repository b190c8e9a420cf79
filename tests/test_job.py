"""A job says when a stop would kill it before it has committed, and cluster/runtime_env.yaml is the remedy."""

import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray._private.runtime_env.packaging import create_package
from ray.dashboard.modules.job.job_supervisor import JobSupervisor
from ray.runtime_env import RuntimeEnv
from ray_cluster import BIN, RayCluster, ray_cluster, wait_for

from lwray.cluster.job import DEFAULT_STOP_WAIT_S, JOB_CONFIG, STOP_WAIT, stop_wait_warning

ROOT = Path(__file__).parents[1]
RUNTIME_ENV = ROOT / "cluster/runtime_env.yaml"
MEBIBYTE = 2**20


@pytest.fixture
def in_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The environment that Ray gives to the command of a job, without a stop wait."""
    monkeypatch.setenv(JOB_CONFIG, json.dumps({"runtime_env": {}, "metadata": {"job_submission_id": "raysubmit_1"}}))
    monkeypatch.delenv(STOP_WAIT, raising=False)
    return monkeypatch


def runtime_env() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(RUNTIME_ENV.read_text())
    return content


def test_outside_a_job_there_is_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(JOB_CONFIG, raising=False)
    assert stop_wait_warning() is None


def test_a_job_without_a_stop_wait_is_warned_and_told_the_file(in_job: pytest.MonkeyPatch) -> None:
    warning = stop_wait_warning()
    assert warning is not None
    assert STOP_WAIT in warning
    assert f"{DEFAULT_STOP_WAIT_S} s" in warning
    assert str(RUNTIME_ENV.relative_to(ROOT)) in warning


def test_a_stop_wait_that_ray_cannot_read_is_a_warning_too(in_job: pytest.MonkeyPatch) -> None:
    in_job.setenv(STOP_WAIT, "120s")
    assert "'120s'" in str(stop_wait_warning())


def test_a_job_with_a_stop_wait_is_not_warned(in_job: pytest.MonkeyPatch) -> None:
    in_job.setenv(STOP_WAIT, "120")
    assert stop_wait_warning() is None


def test_the_wait_without_a_setting_is_still_the_one_that_rays_source_has() -> None:
    assert JobSupervisor.DEFAULT_RAY_JOB_STOP_WAIT_TIME_S == DEFAULT_STOP_WAIT_S


def test_ray_takes_the_runtime_environment(in_job: pytest.MonkeyPatch) -> None:
    in_job.chdir(ROOT)
    env_vars = RuntimeEnv(**runtime_env())["env_vars"]
    assert int(env_vars[STOP_WAIT]) > DEFAULT_STOP_WAIT_S


def test_the_working_directory_stays_small_and_holds_what_a_job_runs(tmp_path: Path) -> None:
    package = tmp_path / "package.zip"
    create_package(str(ROOT), package, include_gitignore=True, excludes=runtime_env()["excludes"])
    names = zipfile.ZipFile(package).namelist()
    assert {"lwray/__main__.py", "configs/quickstart.toml", "examples/my_task.py"} <= set(names)
    assert not {".git", ".venv", "runs", "tests", "bench", "docs"} & {name.split("/")[0] for name in names}
    assert package.stat().st_size < 2 * MEBIBYTE


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_real_job_is_warned_until_it_is_submitted_with_the_file() -> None:
    code = "import lwray.cluster.job as job;print('says:',job.stop_wait_warning())"
    with ray_cluster(cpus=1) as cluster:
        without = submitted(cluster, ["--working-dir", str(ROOT / "lwray")], code)
        with_file = submitted(cluster, ["--runtime-env", str(RUNTIME_ENV)], code)
    assert f"says: {STOP_WAIT} is not set" in without
    assert "says: None" in with_file


def submitted(cluster: RayCluster, options: list[str], code: str) -> str:
    """What a job prints, submitted as soon as the cluster takes it."""
    command = [str(BIN / "ray"), "job", "submit", "--address", cluster.dashboard, *options, "--", sys.executable, "-c"]
    results: list[subprocess.CompletedProcess[str]] = []

    def taken() -> bool:
        results.append(
            subprocess.run(
                [*command, code],
                cwd=ROOT,
                env=cluster.environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=100,
            )
        )
        return "No available agent" not in results[-1].stderr

    wait_for(taken, 100, "an agent for jobs")
    assert results[-1].returncode == 0, results[-1].stdout + results[-1].stderr
    return results[-1].stdout
