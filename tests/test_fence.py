"""One run has one writer: an old driver that comes back commits nothing."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_ranks import losses_of
from ray_cluster import wait_for
from test_resume import KEYS, assert_same, finish, last_step, start

from lwray.checkpoint.find import committed
from lwray.faults import VARIABLE
from lwray.store.local import LocalStore
from lwray.tracking.journal import merged_ledger, read_lines
from lwray.tracking.rundir import RunDir, read_json
from lwray.tracking.show import overview

INLINE = ("--launcher=inline", *KEYS, "checkpoint.every_steps=7", "checkpoint.keep=1000", "cluster.lease_s=1")


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`begin(*options)` starts the run `fenced`; whatever is left of it at the end, frozen or not, is killed."""
    begun: list[subprocess.Popen[str]] = []

    def start_one(*options: str) -> subprocess.Popen[str]:
        begun.append(start(tmp_path, "fenced", *options))
        return begun[-1]

    yield start_one
    for process in begun:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


Begin = Callable[..., subprocess.Popen[str]]


def of_attempt(run: RunDir, number: int) -> set[int]:
    """The steps that an attempt has committed."""
    return {m.step for _, m in committed(LocalStore(run.checkpoints)) if m.attempt == number}


def test_an_old_driver_that_wakes_up_commits_nothing_and_ends(tmp_path: Path, begin: Begin) -> None:
    finish(start(tmp_path, "whole", *INLINE), 25)
    run = RunDir(tmp_path / "fenced")
    old = begin(*INLINE)
    wait_for(lambda: last_step(run) >= 50 and of_attempt(run, 1), 25, "step 50 and a commit")
    os.killpg(old.pid, signal.SIGSTOP)
    finish(begin(*INLINE), 25)
    summary, before = read_json(run.summary), of_attempt(run, 1)
    assert before
    os.killpg(old.pid, signal.SIGCONT)
    assert_gave_way(old, run)
    assert of_attempt(run, 1) == before
    assert read_json(run.summary) == summary
    assert losses_of(tmp_path, "fenced") == losses_of(tmp_path, "whole")
    assert_same(tmp_path, "fenced", "whole")


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_one_frozen_between_its_last_look_and_the_commit_finds_its_place_taken(
    tmp_path: Path, begin: Begin, monkeypatch: pytest.MonkeyPatch, asynchronous: str
) -> None:
    run = RunDir(tmp_path / "fenced")
    mark = tmp_path / "frozen"
    fault = {"point": "checkpoint.manifest", "do": "freeze", "once": str(mark)}
    monkeypatch.setenv(VARIABLE, json.dumps([fault]))
    keys = (*INLINE, "train.steps=300", f"checkpoint.asynchronous={asynchronous}")
    old = begin(*keys)
    wait_for(mark.exists, 25, "a commit")
    wait_for(lambda: frozen_in(old.pid) is not None, 5, "a frozen process")
    writer = frozen_in(old.pid)
    assert writer is not None
    os.killpg(old.pid, signal.SIGSTOP)
    finish(begin(*keys), 25)
    assert [e["checkpoint"] for e in merged_ledger(run) if e["event"] == "skipped_checkpoint"] == ["step-00000007-0001"]
    os.kill(writer, signal.SIGCONT)
    os.killpg(old.pid, signal.SIGCONT)
    assert_gave_way(old, run)
    assert of_attempt(run, 1) == set()
    assert max(of_attempt(run, 2)) == 300


def assert_gave_way(old: subprocess.Popen[str], run: RunDir) -> None:
    output, _ = old.communicate(timeout=20)
    assert old.returncode == 1, output
    assert "Attempt 2 has taken fenced over" in output
    assert read_lines(run.attempts_in_order()[0].ledger)[-2]["event"] == "superseded"
    assert overview(run, [])["attempts"][0]["cause"] == "superseded"


def frozen_in(driver: int) -> int | None:
    """The process, of a driver and its children, that is stopped."""
    children = Path(f"/proc/{driver}/task").glob("*/children")
    pids = [driver, *(int(pid) for each in children for pid in each.read_text().split())]
    return next(
        (pid for pid in pids if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"), None
    )
