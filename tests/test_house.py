"""The house keeps its own rules: arrows between packages, a quick door, an image that lints."""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
ENTRYPOINT = ROOT / "cluster/docker/entrypoint.sh"
HADOLINT = shutil.which("hadolint", path=str(BIN)) or shutil.which("hadolint")


def run(*command: str | Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def fastest_of_three(call: Callable[[], None]) -> float:
    """Seconds; the best of three, because what else the machine does only adds."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def test_imports_follow_the_arrows() -> None:
    result = run(BIN / "lint-imports", "--no-logo", "--no-cache")
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("arguments", [("-m", "lwray", "--help"), ("-c", "import lwray")], ids=["help", "import"])
def test_the_door_opens_within_a_second(arguments: tuple[str, ...]) -> None:
    def call() -> None:
        result = run(sys.executable, *arguments)
        assert result.returncode == 0, result.stderr

    assert fastest_of_three(call) < 1.0


def test_the_command_line_alone_loads_nothing_heavy() -> None:
    code = "import sys, lwray.cli; print(*{'torch', 'ray', 'mlflow'} & set(sys.modules))"
    result = run(sys.executable, "-c", code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


def test_the_dockerfile_lints() -> None:
    assert HADOLINT is not None, "hadolint comes with the dev extra: pip install -e .[dev]"
    result = run(HADOLINT, "--no-color", "Dockerfile")
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    "script", [ENTRYPOINT, ROOT / ".ci/run", *sorted((ROOT / "cluster/vm").glob("*.sh"))], ids=lambda path: path.name
)
def test_shell_scripts_parse_and_are_executable(script: Path) -> None:
    shell = script.read_text().splitlines()[0].removeprefix("#!").split()[-1]
    result = run(shell, "-n", script)
    assert result.returncode == 0, result.stderr
    assert script.stat().st_mode & 0o111


@pytest.mark.parametrize("script", sorted((ROOT / "cluster/slurm").iterdir()), ids=lambda path: path.name)
def test_what_slurm_and_its_users_call_with_bash_parses(script: Path) -> None:
    result = run("bash", "-n", script)
    assert result.returncode == 0, result.stderr


def test_the_image_runs_lwray_in_its_job_role() -> None:
    result = run(ENTRYPOINT, "job", "--help", env={"PATH": f"{BIN}:/usr/bin:/bin"})
    assert result.returncode == 0, result.stderr
    assert "train" in result.stdout


@pytest.mark.parametrize(("role", "missing"), [("boss", "head, worker and job"), ("worker", "RAY_HEAD_ADDRESS")])
def test_the_image_refuses_a_start_that_cannot_work(role: str, missing: str) -> None:
    result = run(ENTRYPOINT, role, env={"PATH": "/usr/bin:/bin"})
    assert result.returncode == 2
    assert missing in result.stderr
