"""The journal of an attempt, and the attempts of a run read as one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lwray.errors import UserError
from lwray.tracking.journal import (
    Journal,
    Span,
    last_lines,
    merged_ids,
    merged_ledger,
    merged_metrics,
    read_lines,
    spans,
)
from lwray.tracking.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "gpt")


def test_a_line_can_be_read_as_soon_as_it_is_written(run: RunDir) -> None:
    journal = Journal(run.new_attempt())
    journal.metrics(step=0, loss=6.5)
    journal.event("started", workers=2)
    journal.ids(0, [3, 5])
    attempt = journal.attempt
    assert read_lines(attempt.metrics) == [{"step": 0, "loss": 6.5}]
    assert read_lines(attempt.ids) == [{"step": 0, "ids": [3, 5]}]
    [event] = read_lines(attempt.ledger)
    assert (event["event"], event["workers"]) == ("started", 2)
    assert event["time"] > 1.7e9
    journal.close()


def test_files_that_were_not_written_to_do_not_exist(run: RunDir) -> None:
    journal = Journal(run.new_attempt())
    journal.metrics(step=0, loss=1.0)
    journal.close()
    assert not journal.attempt.ids.exists()
    assert read_lines(journal.attempt.ids) == []


def test_a_torn_last_line_is_left_out_and_a_torn_line_elsewhere_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "lo')
    assert read_lines(path) == [{"step": 0}]
    path.write_text('{"step": 0}\n{"step": 1, "lo\n{"step": 2}\n')
    with pytest.raises(UserError, match="line 2 is not JSON"):
        read_lines(path)


def test_a_restarted_worker_appends_after_the_last_whole_line(run: RunDir) -> None:
    attempt = run.new_attempt()
    attempt.metrics.write_text('{"step": 0}\n{"step": 1, "lo')
    journal = Journal(attempt)
    journal.metrics(step=1, loss=2.0)
    journal.close()
    assert read_lines(attempt.metrics) == [{"step": 0}, {"step": 1, "loss": 2.0}]


def test_two_processes_may_append_to_one_ledger(run: RunDir) -> None:
    attempt = run.new_attempt()
    code = (
        "import sys; from pathlib import Path; from lwray.tracking.journal import Journal;"
        "from lwray.tracking.rundir import Attempt; journal = Journal(Attempt(1, Path(sys.argv[1])));"
        "[journal.event('checkpoint', text='x' * 2000) for _ in range(300)]; journal.close()"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, attempt.path]) for _ in range(2)]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert len(read_lines(attempt.ledger)) == 600


def test_attempts_are_merged_each_step_once_and_the_later_line_wins(run: RunDir) -> None:
    first, second = Journal(run.new_attempt()), Journal(run.new_attempt())
    for step in range(4):
        first.metrics(step=step, loss=10.0 + step, old=True)
        first.ids(step, [step])
    first.metrics(step=3, val_loss=9.0)
    for step in (2, 3, 4):
        second.metrics(step=step, loss=20.0 + step)
        second.ids(step, [10 * step])
    second.metrics(step=4, val_loss=8.0)
    merged = merged_metrics(run)
    assert [line["step"] for line in merged] == [0, 1, 2, 3, 4]
    assert merged[1] == {"step": 1, "loss": 11.0, "old": True}
    assert merged[3] == {"step": 3, "loss": 23.0}
    assert merged[4] == {"step": 4, "loss": 24.0, "val_loss": 8.0}
    assert [line["ids"] for line in merged_ids(run)] == [[0], [1], [20], [30], [40]]
    assert spans(run) == [Span(1, 0, 3), Span(2, 2, 4)]
    first.close()
    second.close()


def test_a_later_evaluation_alone_keeps_the_step_it_belongs_to(run: RunDir) -> None:
    first, second = Journal(run.new_attempt()), Journal(run.new_attempt())
    first.metrics(step=9, loss=1.0)
    second.metrics(step=9, val_loss=2.0)
    assert merged_metrics(run) == [{"step": 9, "loss": 1.0, "val_loss": 2.0}]
    first.close()
    second.close()


def test_the_ledger_is_merged_in_time_order_with_attempts(run: RunDir) -> None:
    first, second = Journal(run.new_attempt()), Journal(run.new_attempt())
    second.event("started", time=20.0)
    first.event("started", time=10.0)
    first.event("failed", time=30.0)
    merged = merged_ledger(run)
    assert [(line["time"], line["attempt"]) for line in merged] == [(10.0, 1), (20.0, 2), (30.0, 1)]
    first.close()
    second.close()


def test_the_last_lines_of_a_long_file_are_read_without_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert last_lines(path) == []
    with path.open("w") as file:
        file.writelines(json.dumps({"step": step, "loss": 0.5}) + "\n" for step in range(20_000))
        file.write('{"step": 200')
    found = last_lines(path)
    assert found[-1] == {"step": 19_999, "loss": 0.5}
    assert 100 < len(found) < 5000
