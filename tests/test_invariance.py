"""The table of `bench/invariance.py`, shortened: a run stays the run on other workers and backends, and after kills."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from figures import markers
from invariance import DOCS, RESULTS, Proof, judge, main
from proof.claims import Claim, plan
from proof.compare import difference, wrong_starts
from proof.legs import Journey, Leg
from proof.table import Row, write_docs

from lwray.tracking.rundir import RunDir

QUICK = plan(quick=True)


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> Proof:
    """Each run is made once, when the first test asks for it or for one that is compared with it."""
    return Proof(QUICK, tmp_path_factory.mktemp("invariance"), seed=1)


def names(kind: str) -> list[str]:
    return [claim.journey.name for claim in QUICK if claim.kind == kind]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", names("close"))
def test_a_run_killed_and_continued_on_other_workers_and_backends_stays_the_run(proof: Proof, name: str) -> None:
    row = proof.row(name)
    assert not row.failure
    assert row.rows == row.steps
    assert len(row.kills) == len(row.legs) - 1
    assert row.bound is not None
    assert 0 <= row.worst <= row.bound


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", names("bits"))
def test_a_run_killed_on_one_layout_ends_in_the_same_bits(proof: Proof, name: str) -> None:
    row = proof.row(name)
    assert not row.failure
    assert len(row.kills) == 2
    assert (row.rows, row.worst, row.tensors_differ) == (row.steps, 0.0, 0)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_another_order_of_summation_shows_and_stays_far_below_the_bound(proof: Proof) -> None:
    row = proof.row("control")
    assert 0 < row.worst < 1e-5
    assert row.tensors_differ > 0


def change_line(run: RunDir, file: str, step: int, change: Callable[[dict[str, Any]], None]) -> None:
    path = run.attempts / "0001" / file
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    for line in lines:
        if line["step"] == step:
            change(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def more_loss(line: dict[str, Any]) -> None:
    line["loss"] *= 1 + 2e-5


def more_validation_loss(line: dict[str, Any]) -> None:
    if "val_loss" in line:
        line["val_loss"] *= 1 + 2e-5


def no_number(line: dict[str, Any]) -> None:
    line["loss"] = float("nan")


def no_validation(line: dict[str, Any]) -> None:
    line.pop("val_loss", None)


def another_row(line: dict[str, Any]) -> None:
    line["ids"][3] += 1


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("file", "step", "change", "failure"),
    [
        ("metrics.jsonl", 40, more_loss, "the losses differ by 2.0e-05"),
        ("metrics.jsonl", 40, no_number, "the losses differ by inf"),
        ("metrics.jsonl", 59, more_validation_loss, "the losses differ by 2.0e-05"),
        ("metrics.jsonl", 59, no_validation, "1 losses are missing, the first is of step 59 (val)"),
        ("sample_ids.jsonl", 40, another_row, "in 1 of 90 steps the model was fed other rows"),
    ],
)
def test_one_step_that_is_not_the_same_fails_the_claim(
    proof: Proof, tmp_path: Path, file: str, step: int, change: Callable[[dict[str, Any]], None], failure: str
) -> None:
    assert not proof.row("whole").failure
    whole = RunDir(proof.storage / "whole")
    run = RunDir(shutil.copytree(whole.root, tmp_path / "changed"))
    claim = Claim(Journey("changed", 90), "close", "whole")
    assert judge(claim, difference(run, whole, 90), 1e-5) == ""
    change_line(run, file, step, change)
    assert judge(claim, difference(run, whole, 90), 1e-5) == failure


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_weights_that_are_not_the_same_to_the_bit_fail_the_claim(proof: Proof) -> None:
    assert not proof.row("control").failure
    found = difference(RunDir(proof.storage / "control"), RunDir(proof.storage / "whole"), 90)
    claim = Claim(Journey("control", 90), "bits", "whole")
    assert "tensors differ, the first is exp_avg/" in judge(claim, found, found.worst)


def write_starts(run: RunDir, *events: dict[str, Any]) -> None:
    """A ledger for each attempt, with one event."""
    for event in events:
        attempt = run.new_attempt()
        attempt.ledger.write_text(json.dumps(event) + "\n")


def test_legs_that_were_not_run_or_began_anew_are_seen_in_the_ledger(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    began = {"event": "started", "workers": 2, "backend": "ddp"}
    went_on = {"event": "resumed", "workers": 3, "backend": "zero2", "from_step": 20}
    write_starts(run, began, went_on)
    assert wrong_starts(run, (Leg(2, "ddp"), Leg(3, "zero2"))) == ""
    assert "its ledger shows other legs" in wrong_starts(run, (Leg(2, "ddp"), Leg(3, "ddp")))
    write_starts(run, {**went_on, "workers": 1, "backend": "none"})
    assert "did not go on" in wrong_starts(run, (Leg(2, "ddp"), Leg(3, "zero2"), Leg()))


def test_a_claim_that_fails_is_the_exit_code_and_stands_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Claim(Journey("broken", 3, (Leg(),), ("optim.lr=-1",)), "whole")
    monkeypatch.setattr("invariance.plan", lambda quick, device: [broken])
    assert main(["--quick", f"--storage={tmp_path}", f"--json={tmp_path / 'out.json'}"]) == 1
    assert "FAILS: the last leg ended with code 2" in capsys.readouterr().out
    assert "optim.lr" in json.loads((tmp_path / "out.json").read_text())["rows"][0]["failure"]


def test_the_documents_show_the_recorded_results_and_every_one_holds(tmp_path: Path) -> None:
    recorded = [Row(**row) for row in json.loads(RESULTS.read_text())["rows"]]
    assert not [row.run for row in recorded if row.failure]
    assert {row.run for row in recorded} == {claim.journey.name for claim in plan()}
    copy = tmp_path / "invariants.md"
    copy.write_text(DOCS.read_text().replace("| holds", "| typed by hand"))
    write_docs(RESULTS, copy)
    assert copy.read_text() == DOCS.read_text()
    assert markers("invariance")[0] in copy.read_text()
