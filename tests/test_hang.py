"""Workers that hang: what the driver takes for one; a run with a rank that does goes on, and stays the run."""

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_ranks import TOY_KEYS, losses_of, rows_of
from ray_nodes import ray_nodes
from s3_server import BUCKET, ENVIRONMENT, s3_server

from lwray.cluster.hang import HEARD_S, STARTS, Vigil, last_sign, stack_of
from lwray.config import Config
from lwray.config.schema import CheckpointSection, ClusterSection
from lwray.engine.life import SAVES, TIMES, Life, Sign
from lwray.engine.run import mirrored
from lwray.tracking.journal import merged_ledger
from lwray.tracking.rundir import Attempt, RunDir

HANG_S = 2.0
CONFIG = Config(cluster=ClusterSection(hang_s=HANG_S), checkpoint=CheckpointSection(deadline=30.0))


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return Attempt(1, tmp_path)


@pytest.fixture
def session(attempt: Attempt) -> Any:
    return SimpleNamespace(config=CONFIG, attempt=attempt, run=RunDir(attempt.path))


def found_after(vigil: Vigil, begin: int = 0) -> int:
    """Seconds until the group is taken to hang; a look each second."""
    return next(second - begin for second in range(begin, 100_000) if vigil.look(1000.0 + second))


def test_a_group_that_trains_may_be_silent_for_the_set_time_and_at_its_start_for_much_longer(
    session: Any, attempt: Attempt
) -> None:
    assert found_after(Vigil(session)) == STARTS * HANG_S + 1
    life = Life(attempt.life, CONFIG)
    life.took(0.01)
    life.trains(7)
    vigil = Vigil(session)
    assert found_after(vigil) == HANG_S + 1
    hang = vigil.look(2000.0)
    assert hang is not None
    assert (hang.step, hang.doing) == (7, "train")


def test_slow_steps_are_no_hang_until_one_takes_ten_times_the_median(session: Any, attempt: Attempt) -> None:
    life = Life(attempt.life, CONFIG)
    for seconds in (90.0, 5.0, 5.0):
        life.took(seconds)
    life.trains(3)
    assert found_after(Vigil(session)) == TIMES * 5 + 1


def test_a_save_that_is_waited_for_has_its_own_time_and_training_after_it_again_its_own(
    session: Any, attempt: Attempt
) -> None:
    life = Life(attempt.life, CONFIG)
    life.took(0.01)
    life.trains(7)
    life.saves(7)
    vigil = Vigil(session)
    assert found_after(vigil) == SAVES * 30 + HANG_S + 1
    life.trains(7)
    assert vigil.look(2000.0) is None
    assert found_after(vigil, 1001) == HANG_S


def test_signs_come_once_a_second_and_at_once_where_something_else_is_done(session: Any, attempt: Attempt) -> None:
    life = Life(attempt.life, CONFIG)
    life.took(0.01)
    for step in range(100):
        life.trains(step)
    assert last_sign(session) == Sign(1, 0, "train", HANG_S)
    life.evaluates(100)
    assert last_sign(session) == Sign(2, 100, "evaluate", HANG_S)


def test_a_driver_that_was_stopped_itself_does_not_take_that_for_the_workers_silence(
    session: Any, attempt: Attempt
) -> None:
    vigil = Vigil(session)
    assert vigil.look(1000.0) is None
    assert HEARD_S < TIMES * HANG_S
    assert vigil.look(5000.0) is None


def test_a_storage_that_does_not_answer_tells_nothing_of_the_workers(
    session: Any, attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(session: Any) -> Sign:
        raise OSError("it cannot be read")

    vigil = Vigil(session)
    monkeypatch.setattr("lwray.cluster.hang.last_sign", unreachable)
    assert not any(vigil.look(1000.0 + second) for second in range(1000))


def test_on_an_object_store_the_sign_travels_from_machine_to_machine_with_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on(machine: str) -> Any:
        run = RunDir(tmp_path / machine, f"s3://{BUCKET}/run")
        path = run.attempts / "0001"
        path.mkdir(parents=True)
        return SimpleNamespace(config=CONFIG, run=run, attempt=Attempt(1, path, group=3))

    driver, worker = on("driver"), on("worker")
    with s3_server() as endpoint:
        for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": endpoint}.items():
            monkeypatch.setenv(name, value)
        assert last_sign(driver) is None
        with closing(mirrored(worker) or pytest.fail("nothing brings it there")):
            Life(worker.attempt.life, CONFIG).trains(7)
        assert last_sign(driver) == Sign(1, 7, "train", TIMES * HANG_S)
        # a driver on rank 0's machine shares its files: what has not travelled yet is not undone
        newer = Sign(2, 8, "save", 99.0)
        worker.attempt.life.write_text(json.dumps(asdict(newer)))
        assert last_sign(worker) == newer
        assert Sign.of(worker.attempt.life.read_bytes()) == newer


def test_a_sign_that_is_not_all_there_is_none(session: Any, attempt: Attempt) -> None:
    attempt.life.write_text('{"count": 1, "st')
    assert last_sign(session) is None


def test_a_process_that_has_been_stopped_is_looked_into_too() -> None:
    code = "import time\ndef nap():\n    print('ready', flush=True)\n    time.sleep(60)\nnap()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            assert "nap" in stack_of(process.pid)
            process.send_signal(signal.SIGSTOP)
            assert "nap" in stack_of(process.pid)
        finally:
            process.kill()
    assert "No such file or directory" in stack_of(process.pid)


def test_without_a_time_nothing_is_written_and_nothing_is_a_hang(session: Any, attempt: Attempt) -> None:
    session.config = Config(cluster=ClusterSection(hang_s=0.0))
    Life(attempt.life, session.config).trains(1)
    assert not attempt.life.exists()
    assert not any(Vigil(session).look(1000.0 + second) for second in range(10_000))


KEYS = (
    "parallel.workers=2",
    "parallel.cpus_per_worker=1",
    "cluster.hang_s=3",
    "checkpoint.every_steps=5",
    "checkpoint.asynchronous=false",
)


def train(storage: Path, name: str, environment: dict[str, str], *keys: str) -> str:
    """What `lwray train` prints."""
    file = storage / "toy.toml"
    file.touch()
    command = [sys.executable, "-m", "lwray", "train", str(file), f"--storage={storage}", f"run.name={name}"]
    process = subprocess.Popen(
        [*command, *TOY_KEYS, "tracking.enabled=false", *keys],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=270)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(process.communicate()[0])
    assert process.returncode == 0, output
    return output


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_ranks_that_hang_are_looked_into_and_the_run_goes_on_as_if_they_had_not(tmp_path: Path) -> None:
    train(tmp_path, "whole", dict(os.environ), "--launcher=inline")
    faults = [
        {"point": "step.backward", "step": step, "rank": rank, "do": do, "once": str(tmp_path / do)}
        for step, rank, do in ((8, 1, "hang"), (14, 0, "freeze"))
    ]
    (tmp_path / "toy.toml").write_text(f"[env]\nLWRAY_FAULTS = '{json.dumps(faults)}'\n")
    run = RunDir(tmp_path / "hung")
    with ray_nodes() as nodes:
        nodes.add()
        nodes.add()
        output = train(tmp_path, "hung", nodes.environment, *KEYS)
    events = merged_ledger(run)
    hangs = [event for event in events if event["event"] == "hang"]
    assert [hang["doing"] for hang in hangs] == ["train", "train"]
    assert all(3 < hang["silent_s"] < 15 for hang in hangs)
    assert [event["from_step"] for event in events if event["event"] == "resumed"] == [5, 10]
    assert output.count("The workers hang") == 2
    assert str(run.attempts / "0001" / "stacks") in output
    # each file holds the rank of both groups
    first, second = ((run.attempts / "0001" / "stacks" / f"rank-0{rank}.txt").read_text() for rank in (0, 1))
    asleep, waiting = second.split("Group 2")
    assert "strike (lwray/faults.py" in asleep
    assert "strike" not in waiting
    assert "run_steps (lwray/engine/train.py" in waiting
    waiting, frozen = first.split("Group 2")
    assert "strike" not in waiting
    # it stands still a little later than where it was told to
    assert "run_steps (lwray/engine/train.py" in frozen
    assert rows_of(tmp_path, "hung") == rows_of(tmp_path, "whole")
    pairs = zip(losses_of(tmp_path, "whole"), losses_of(tmp_path, "hung"), strict=True)
    assert max(abs(a - b) / abs(a) for a, b in pairs) <= 1e-5
