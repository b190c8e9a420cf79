"""Looking at a run: on the terminal while it trains, as tables, JSON and a picture afterwards."""

import io
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lwray.errors import UserError
from lwray.tracking.journal import Journal
from lwray.tracking.plot import plot
from lwray.tracking.progress import Progress
from lwray.tracking.rundir import RunDir, write_json
from lwray.tracking.show import find_run, jsonl, overview, tables


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Killed at step 5, resumed from 4 by an attempt that failed once within and finished."""
    run = RunDir(tmp_path / "storage" / "gpt")
    first = Journal(run.new_attempt())
    first.event("started", time=1000.0, workers=2)
    for step in range(6):
        first.metrics(step=step, loss=5.0 - step / 10, lr=1e-3, tokens_per_second=5e4)
    first.metrics(step=3, val_loss=4.75)
    first.close()
    second = Journal(run.new_attempt())
    second.event("resumed", time=2000.0, from_step=4)
    second.event("failed", time=2010.0, cause="worker lost")
    second.event("resumed", time=2020.0, from_step=4)
    for step in range(4, 8):
        second.metrics(step=step, loss=4.0 - step / 10, lr=1e-3, tokens_per_second=5e4)
    second.metrics(step=6, val_loss=math.nan)
    second.metrics(step=7, val_loss=4.5)
    second.event("finished", time=2090.0, cause="steps")
    second.close()
    write_json(run.summary, {"baselines": {"bigram": 4.6}})
    return run


def _row(name: str, health: str, reason: str | None = None, **fields: Any) -> dict[str, Any]:
    """A row as `lwray.checkpoint.health` makes it, in which only what a name tells is known."""
    _, step, attempt = name.split("-")
    unknown = dict.fromkeys(("time", "bytes", "backend", "workers", "cause", "val_loss"))
    return {"name": name, "step": int(step), "attempt": int(attempt), "health": health, "reason": reason} | (
        unknown | fields
    )


def _by_workers(workers: int) -> dict[str, Any]:
    return {"time": time.time() - 7200, "bytes": 2_500_000, "backend": "zero2", "workers": workers, "cause": "best"}


@pytest.fixture
def checkpoints() -> list[dict[str, Any]]:
    """Made when they are shown, because their age is."""
    return [
        _row("step-00000004-0001", "not verified", **_by_workers(4), val_loss=4.75),
        _row("step-00000006-0001", "damaged", "rank-00002-5f0a1c2d.safetensors is missing", **_by_workers(1)),
        _row("step-00000008-0002", "unfinished"),
    ]


def _printed(run: RunDir, checkpoints: Sequence[Mapping[str, Any]] = ()) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(tables(run, checkpoints))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_overview_is_data(run: RunDir, checkpoints: list[dict[str, Any]]) -> None:
    data = overview(run, checkpoints)
    assert data["steps"] == 8
    assert data["last"] == {"step": 7, "loss": pytest.approx(3.3)}
    assert data["best_val"] == {"step": 7, "val_loss": 4.5}
    killed, finished = data["attempts"]
    assert (killed["start"], killed["ending"], killed["last_step"]) == (1000.0, None, 5)
    assert (finished["end"], finished["ending"], finished["cause"]) == (2090.0, "finished", "steps")
    assert data["checkpoints"] == checkpoints
    json.dumps(data)


def test_the_overview_as_tables(run: RunDir, checkpoints: list[dict[str, Any]]) -> None:
    text = _printed(run, checkpoints)
    assert "gpt: 8 steps, last loss 3.3000, best validation loss 4.5000 at step 7" in text
    assert "killed" in text
    assert "finished: steps" in text
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in text.splitlines() if line.startswith("step-")}
    assert lines["step-00000004-0001"] == "4 2.5 MB 2.0 h zero2 on 4 workers best 4.7500 not verified"
    assert lines["step-00000006-0001"] == "6 2.5 MB 2.0 h zero2 on 1 worker best damaged"
    assert lines["step-00000008-0002"] == "8 unfinished"
    assert lines["step-00000006-0001:"] == "rank-00002-5f0a1c2d.safetensors is missing"


def test_an_attempt_that_resumed_after_a_failure_has_not_ended(run: RunDir) -> None:
    third = Journal(run.new_attempt())
    third.event("failed", cause="worker lost")
    third.event("resumed")
    third.close()
    assert overview(run, [])["attempts"][-1]["ending"] is None
    assert "runs still, or was killed" in _printed(run)


def test_a_run_that_logged_nothing_yet_can_be_shown(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "new")
    run.new_attempt()
    assert overview(run, [])["best_val"] is None
    assert "new: 0 steps" in _printed(run)


def test_merged_files_are_json_lines(run: RunDir) -> None:
    assert [json.loads(line)["step"] for line in jsonl(run, "metrics")] == list(range(8))
    assert [json.loads(line)["event"] for line in jsonl(run, "ledger")][-1] == "finished"
    assert list(jsonl(run, "ids")) == []


def test_a_run_is_found_by_path_or_by_name(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_run(str(run.root)) == run
    monkeypatch.setenv("LWRAY_STORAGE", str(run.root.parent))
    assert find_run("gpt") == run
    with pytest.raises(UserError, match=r"no run gtp: the runs in .* are gpt\."):
        find_run("gtp")
    monkeypatch.setenv("LWRAY_STORAGE", str(run.root.parent / "nowhere"))
    with pytest.raises(UserError, match="holds no runs"):
        find_run("gpt")


def test_a_plot_is_written_whole(run: RunDir, tmp_path: Path) -> None:
    out = tmp_path / "plots" / "gpt.png"
    plot(run, out)
    assert out.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in out.parent.iterdir()] == ["gpt.png"]


def test_what_cannot_be_plotted_is_said(run: RunDir, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="suffix must be one of"):
        plot(run, tmp_path / "gpt.doc")
    with pytest.raises(UserError, match="no logged steps"):
        plot(RunDir(tmp_path), tmp_path / "gpt.png")


def _lines(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_without_a_terminal_progress_is_few_plain_lines() -> None:
    console = Console(file=io.StringIO(), width=40)
    with Progress(100, 20, "gpt", console) as progress:
        progress.note("[red] 2 workers")
        for step in range(20, 60):
            progress.metrics([{"step": step, "loss": 3.0, "lr": 1e-3, "tokens_per_second": 51234.0}])
        progress.metrics([{"step": 59, "val_loss": 2.5}])
        progress.metrics([{"step": 60, "loss": 2.25}])
    note, first, evaluation, last = _lines(console)
    assert note == "[red] 2 workers"
    assert first.startswith("step 21/100  loss 3.0000  lr 1.00e-03  51.2K tokens/s")
    assert evaluation.startswith("step 60/100  loss 3.0000  val 2.5000")
    assert last.startswith("step 61/100  loss 2.2500")


def test_on_a_terminal_progress_is_a_bar() -> None:
    console = Console(file=io.StringIO(), width=140, force_terminal=True)
    with Progress(100, 0, "gpt", console) as progress:
        progress.metrics([{"step": 41, "loss": 3.0, "samples_per_second": 12.0}])
    text = "".join(_lines(console))
    assert "42/100" in text
    assert "loss 3.0000" in text
    assert "12 samples/s" in text
