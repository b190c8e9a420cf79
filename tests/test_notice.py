"""A notice that leaves time: this state is saved at once, training goes on, and ends just before the machines do."""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray_cluster import wait_for
from test_resume import KEYS, assert_same, finish, last_step, start

from lwray.engine.leaving import LEAD_S, SPARE_S, Leaving
from lwray.engine.stop import Notice, StopRequest
from lwray.errors import ExitCode
from lwray.tracking.journal import merged_ledger, merged_metrics
from lwray.tracking.rundir import RunDir, read_json

STOP, SAVE, GO_ON = ({"stop": s, "notice": n} for s, n in ((1.0, 0.0), (0.0, 1.0), (0.0, 0.0)))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr("lwray.engine.leaving.time.time", lambda: now.seconds)
    return now


def asked(notice: Notice) -> StopRequest:
    stop = StopRequest(lambda name: notice)
    stop._signal = "TERM"
    return stop


def test_without_a_deadline_it_ends_with_this_step(clock: SimpleNamespace) -> None:
    assert Leaving(StopRequest(), None, lambda: 1.0).flags(evaluates=False) == GO_ON
    assert Leaving(asked(Notice("TERM")), None, lambda: 1.0).flags(evaluates=False) == STOP


def test_with_a_deadline_it_saves_once_goes_on_and_ends_when_one_more_step_and_save_just_fit(
    clock: SimpleNamespace,
) -> None:
    leaving = Leaving(asked(Notice("preempted", clock.seconds + 60)), None, lambda: 4.0)
    leaving.stepped(1.0)
    assert leaving.flags(evaluates=False) == SAVE
    leaving.heed()
    assert leaving.flags(evaluates=False) == GO_ON
    clock.seconds += 60 - 2 * 5 - SPARE_S - 0.1
    assert leaving.flags(evaluates=False) == GO_ON
    clock.seconds += 0.2
    assert leaving.flags(evaluates=False) == STOP


def test_where_time_is_too_short_for_two_saves_there_is_one(clock: SimpleNamespace) -> None:
    assert Leaving(asked(Notice("preempted", clock.seconds + 9)), None, lambda: 4.0).flags(evaluates=False) == STOP


def test_the_end_of_the_allocation_is_a_notice_once_it_is_near(clock: SimpleNamespace) -> None:
    end = clock.seconds + 1000
    leaving = Leaving(StopRequest(), end, lambda: 4.0)
    assert leaving.flags(evaluates=False) == GO_ON
    assert leaving.notice is None
    clock.seconds = end - LEAD_S
    assert leaving.flags(evaluates=False) == SAVE
    assert leaving.notice == Notice("time_limit", end)
    large = Leaving(StopRequest(), clock.seconds + 1000, lambda: 200.0)
    assert large.flags(evaluates=False) == SAVE, "what takes long to save is saved in time"


def test_the_end_of_the_allocation_stays_near_once_it_was_so(clock: SimpleNamespace) -> None:
    leaving = Leaving(StopRequest(), clock.seconds + 200, lambda: 0.2)
    leaving.stepped(100.0)
    assert leaving.flags(evaluates=False) == STOP
    leaving.stepped(1.0)
    assert leaving.notice == Notice("time_limit", clock.seconds + 200)
    assert leaving.flags(evaluates=False) == SAVE


def test_an_evaluation_that_is_due_must_fit_too(clock: SimpleNamespace) -> None:
    leaving = Leaving(asked(Notice("preempted", clock.seconds + 60)), None, lambda: 1.0)
    leaving.evaluated(40.0)
    assert leaving.flags(evaluates=False) == SAVE
    assert leaving.flags(evaluates=True) == STOP


def test_of_two_ends_the_earlier_one_counts(clock: SimpleNamespace) -> None:
    drain = Notice("drain", clock.seconds + 3600)
    leaving = Leaving(asked(drain), clock.seconds + 70, lambda: 1.0)
    leaving.flags(evaluates=False)
    assert leaving.notice == drain
    clock.seconds += 30
    leaving.flags(evaluates=False)
    assert leaving.notice == Notice("time_limit", clock.seconds + 40)


def test_a_later_word_takes_the_place_of_an_earlier_one_and_not_of_the_users(tmp_path: Path) -> None:
    stop, path = StopRequest(), tmp_path / "stop-01"
    stop.watch(path, interval=0.01)
    path.write_text(Notice("preempted", 5e9).text())
    wait_for(lambda: stop.cause == "preempted", 5, "the first word")
    path.write_text('{"cause": "TE')
    path.write_text(Notice("TERM").text())
    wait_for(lambda: stop.notice == Notice("TERM"), 5, "the second word")
    stop._signal = "USR1"
    assert stop.cause == "TERM"
    stop._signal = "INT"
    assert stop.cause == "INT"
    time.sleep(0.1)
    assert stop.cause == "INT", "an old word in the file does not come back"
    stop.close()


def events(run: RunDir) -> list[dict[str, Any]]:
    return [event for event in merged_ledger(run) if event["event"] in ("notice", "checkpoint", "stopped")]


INLINE = ("--launcher=inline", *KEYS, "train.steps=4000", "checkpoint.every_steps=0", "eval.every_steps=0")


def test_the_end_of_an_allocation_loses_no_step_and_asks_to_be_started_again(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "limited")
    began = time.time()
    process = start(tmp_path, "limited", *INLINE, "cluster.time_limit=12s", "train.steps=1000000")
    output, _ = process.communicate(timeout=40)
    assert process.returncode == ExitCode.PREEMPTED, output
    assert "Run the same command again to go on" in output
    told, first, last, stopped = events(run)
    assert (told["event"], told["cause"], first["cause"], last["cause"]) == ("notice", "time_limit", "notice", "final")
    assert told["step"] == first["step"] < last["step"] == stopped["step"] == last_step(run) + 1
    assert stopped["cause"] == read_json(run.summary)["cause"] == "time_limit"
    assert began + 6 < stopped["time"] < told["deadline"] < began + 30


def test_a_notice_by_signal_is_75_and_the_run_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    # each step is followed by an evaluation, for which the last one has no time: the next start makes up for it
    keys = (*INLINE, "train.steps=900", "eval.every_steps=1")
    finish(start(tmp_path, "whole", *keys), 30)
    process = start(tmp_path, "noticed", *keys)
    wait_for(lambda: last_step(RunDir(tmp_path / "noticed")) > 300, 30, "step 300")
    os.kill(process.pid, signal.SIGUSR1)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == ExitCode.PREEMPTED, output
    finish(start(tmp_path, "noticed", *keys), 30)
    assert_same(tmp_path, "noticed", "whole")
    evaluations = [
        {line["step"]: line["val_loss"] for line in merged_metrics(RunDir(tmp_path / name)) if "val_loss" in line}
        for name in ("whole", "noticed")
    ]
    assert evaluations[0] == evaluations[1]
    assert len(evaluations[0]) == 900
