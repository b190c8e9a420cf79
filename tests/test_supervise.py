"""A driver that dies is started again, within a budget; what it reports itself, and what a person asks for, stands."""

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from door import process_as_it_was
from ray_cluster import BIN, free_port, wait_for
from ray_nodes import ENVIRONMENT, STORE
from test_resume import KEYS, assert_same, command, last_step, resumed_steps

from lwray.cli import main
from lwray.cluster.head import answers
from lwray.cluster.supervise import Budget, spent
from lwray.errors import RunFailed
from lwray.tracking.journal import merged_ledger, read_lines
from lwray.tracking.rundir import RunDir

ILL = """
import os, signal, time
from pathlib import Path
with (Path(__file__).parent / "drivers").open("a") as file:
    file.write(f"{{os.getpid()}}\\n")
{illness}
"""
ON_RAY = (
    *KEYS,
    "train.steps=600",
    "task.options.pause=0.01",
    "parallel.workers=1",
    "parallel.cpus_per_worker=1",
    "checkpoint.every_steps=20",
)
RECONNECT = ("RAY_gcs_rpc_server_reconnect_timeout_s", "1")
"""How long a driver that lost its head waits before Ray ends it; 60 s by default."""
WAIT_S = 120
"""For what takes seconds on a quiet machine."""
Begin = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """`begin(*options)` starts the run `watched` as users do; what is left of it at the end is killed."""
    begun: list[subprocess.Popen[str]] = []

    def start_one(*options: str) -> subprocess.Popen[str]:
        words = command(tmp_path, "watched", *options)
        pipe, out = subprocess.PIPE, subprocess.STDOUT
        begun.append(subprocess.Popen(words, stdout=pipe, stderr=out, text=True, start_new_session=True))
        return begun[-1]

    yield start_one
    for process in begun:
        for pid in (*children(process.pid), process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "watched")


def children(pid: int) -> list[int]:
    return [int(child) for each in Path(f"/proc/{pid}/task").glob("*/children") for child in each.read_text().split()]


def descendants(pid: int) -> list[int]:
    return [below for child in children(pid) for below in (child, *descendants(child))]


def driver_of(process: subprocess.Popen[str]) -> int:
    (driver,) = children(process.pid)
    return driver


def named(pids: list[int], name: str) -> int:
    """The one of these processes whose program has this name."""
    (found,) = [pid for pid in pids if name in Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0]]
    return found


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ill_task(tmp_path: Path, illness: str) -> str:
    """A task file that the driver alone comes to, and notes itself in."""
    file = tmp_path / "ill.py"
    file.write_text(ILL.format(illness=illness))
    return f"task.name={file}:Ill"


def drivers(tmp_path: Path) -> list[int]:
    """The processes that have come to the task file."""
    file = tmp_path / "drivers"
    return [int(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_driver_that_keeps_dying_is_given_up_when_its_budget_is_spent(tmp_path: Path, begin: Begin) -> None:
    task = ill_task(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    output, _ = (process := begin(*ON_RAY, task, "cluster.max_restarts=1")).communicate(timeout=50)
    assert process.returncode == 1, output
    assert "The driver was killed by SIGKILL. It is started again in 1 s (0 more restarts are left)." in output
    assert "lwray: The driver was killed by SIGKILL. No restart is left (cluster.max_restarts = 1, of which" in output
    assert len(drivers(tmp_path)) == 2
    assert len(read_lines(tmp_path / "watched" / "restarts.jsonl")) == 1


def test_a_start_that_comes_to_nothing_is_not_tried_again(tmp_path: Path, begin: Begin) -> None:
    output, _ = (process := begin(*ON_RAY, ill_task(tmp_path, "os._exit(1)"))).communicate(timeout=50)
    assert process.returncode == 1, output
    assert len(drivers(tmp_path)) == 1
    assert not (tmp_path / "watched").exists()


def test_a_signal_reaches_the_driver_and_its_end_stands(tmp_path: Path, begin: Begin) -> None:
    expected = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGUSR1: 75}
    task = ill_task(tmp_path, "time.sleep(600)")
    started = {number: begin(*ON_RAY, task) for number in expected}
    wait_for(lambda: len(drivers(tmp_path)) == 3, 50, "three drivers")
    for number, process in started.items():
        process.send_signal(number)
    assert {number: process.wait(20) for number, process in started.items()} == expected
    assert len(drivers(tmp_path)) == 3


def test_a_driver_does_not_outlive_the_one_who_watches_over_it(tmp_path: Path, begin: Begin) -> None:
    process = begin(*ON_RAY, ill_task(tmp_path, "time.sleep(600)"))
    wait_for(lambda: drivers(tmp_path), 40, "a driver")
    (driver,) = drivers(tmp_path)
    assert driver == driver_of(process)
    process.kill()
    try:
        wait_for(lambda: not lives(driver), 5, "the end of the driver")
    finally:
        with suppress(ProcessLookupError):
            os.kill(driver, signal.SIGKILL)


def test_each_hour_gives_one_restart_back(tmp_path: Path) -> None:
    assert spent([], 0.0) == 0
    assert spent([0.0, 0.0, 0.0], 0.0) == 3
    assert spent([0.0, 0.0, 0.0], 5400.0) == pytest.approx(1.5)
    # an hour in which there was nothing to give back is no credit
    assert spent([0.0, 36_000.0], 36_000.0) == 1
    budget = Budget(tmp_path / "restarts.jsonl", 3)
    assert [budget.spend("It died.") for _ in range(3)] == [1, 2, 4]
    with pytest.raises(RunFailed, match=r"It died\. No restart is left \(cluster\.max_restarts = 3"):
        budget.spend("It died.")
    lines = read_lines(budget.path)
    budget.path.write_text("".join(json.dumps({**line, "time": line["time"] - 7200}) + "\n" for line in lines))
    assert (budget.left, budget.spend("It died.")) == (2, 2)


def test_only_an_address_that_nobody_listens_at_is_waited_for() -> None:
    assert answers("auto")
    assert answers("")
    assert not answers("127.0.0.1:1")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_driver_and_a_lost_head_leave_no_trace_in_the_run(
    tmp_path: Path, begin: Begin, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(*RECONNECT)
    with process_as_it_was():
        words = command(tmp_path, "whole", *ON_RAY, "--launcher=inline")
        assert main(words[words.index("train") :]) == 0
    process = begin(*ON_RAY, "--fresh")
    wait_for(lambda: last_step(run) >= 100, WAIT_S, "step 100")
    os.kill(driver_of(process), signal.SIGKILL)
    wait_for(lambda: run.last_attempt() == 2 and last_step(run) >= 200, WAIT_S, "step 200 of the second driver")
    # what Ray's head runs on; a driver that loses it is ended by Ray
    os.kill(named(descendants(process.pid), "gcs_server"), signal.SIGKILL)
    output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, output
    reasons = [event["reason"] for event in merged_ledger(run) if event["event"] == "restarted"]
    assert reasons[0] == "The driver was killed by SIGKILL."
    assert len(reasons) == 2
    assert [line["reason"] for line in read_lines(run.root / "restarts.jsonl")] == reasons
    assert run.last_attempt() == 3, "--fresh is done once"
    assert_same(tmp_path, "watched", "whole")


@contextmanager
def ray_head(port: int, temporary: Path) -> Iterator[None]:
    """A head of one CPU core, lost without a word at the end."""
    words = [str(BIN / "ray"), "start", "--head", "--block", "--num-cpus=1", f"--port={port}"]
    words += ["--node-ip-address=127.0.0.1", "--include-dashboard=false", "--disable-usage-stats"]
    words += [f"--temp-dir={temporary}", f"--object-store-memory={STORE}"]
    head = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        wait_for(lambda: answers(f"127.0.0.1:{port}"), WAIT_S, "Ray's head")
        yield
    finally:
        for pid in (*descendants(head.pid), head.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        head.wait()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_waits_for_a_head_that_comes_back_at_its_address(
    begin: Begin, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setenv(*RECONNECT)
    for name, value in {**ENVIRONMENT, "RAY_ADDRESS": f"127.0.0.1:{port}"}.items():
        monkeypatch.setenv(name, value)
    # a short path: unix sockets lie in it
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as temporary:
        with ray_head(port, Path(temporary, "1")):
            process = begin(*ON_RAY)
            wait_for(lambda: last_step(run) >= 100, WAIT_S, "step 100")
        wait_for((run.root / "restarts.jsonl").exists, WAIT_S, "the end of the driver")
        with ray_head(port, Path(temporary, "2")):
            output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, output
    assert "The driver ended without a word, as Ray ends one that has lost its head. It is started again" in output
    assert next(resumed_steps(run.root.parent, "watched")) >= 80


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_stopped_by_a_signal_or_orphaned_the_workers_commit_and_end(begin: Begin, run: RunDir) -> None:
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)):
        process = begin(*ON_RAY, "train.steps=5000")
        attempt = run.last_attempt() + 1
        wait_for(lambda: run.last_attempt() == attempt and last_step(run) > 0, WAIT_S, "a step")  # noqa: B023
        below = descendants(process.pid)
        process.send_signal(number)
        assert process.wait(WAIT_S) == code
        wait_for(lambda: not any(map(lives, below)), WAIT_S, "the end of all processes")  # noqa: B023
        events = [event["event"] for event in read_lines(run.attempts_in_order()[-1].ledger)]
        assert events[-2:] == ["checkpoint", "stopped"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_shape_error_is_not_tried_again(tmp_path: Path, begin: Begin, run: RunDir) -> None:
    toy = (Path(__file__).parent / "tasks" / "toy.py").read_text()
    task = tmp_path / "misshapen.py"
    task.write_text(toy.replace('model(batch["x"])', 'model(batch["x"][:, :3])'))
    output, _ = (process := begin(*ON_RAY, f"task.name={task}:Toy")).communicate(timeout=WAIT_S)
    assert process.returncode == 1, output
    assert "shapes cannot be multiplied" in output
    assert run.last_attempt() == 1
    assert not (run.root / "restarts.jsonl").exists()
