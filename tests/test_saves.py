"""Saves beside the training and in its way: what goes wrong with one costs the run nothing but that checkpoint."""

import json
import os
import re
import signal
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_ranks import TOY_KEYS, EngineRun, losses_of, train_on
from hypothesis import given
from hypothesis import strategies as st
from ray_cluster import wait_for
from test_resume import KEYS, assert_same, finish, last_step, resumed_steps, start

from lwray.cli import main
from lwray.config.schema import CheckpointSection
from lwray.engine.interval import FIRST_S, OVERHEAD, PRIOR_S, RETRY_S, Interval, auto_seconds, count_losses
from lwray.errors import ExitCode
from lwray.faults import POINTS, VARIABLE, Fault
from lwray.tracking.journal import merged_ledger, merged_metrics
from lwray.tracking.rundir import RunDir

INLINE = ("--launcher=inline", *KEYS, "train.steps=200", "checkpoint.every_steps=20", "checkpoint.keep=100")


def train(storage: Path, name: str, *keys: str) -> int:
    (storage / "toy.toml").touch()
    options = [f"--storage={storage}", f"run.name={name}", *INLINE, *keys]
    return main(["train", str(storage / "toy.toml"), *options])


def events(storage: Path, name: str, *kinds: str) -> list[dict[str, Any]]:
    return [event for event in merged_ledger(RunDir(storage / name)) if event["event"] in kinds]


def inject(monkeypatch: pytest.MonkeyPatch, **fault: object) -> None:
    monkeypatch.setenv(VARIABLE, json.dumps([fault]))


def only(found: list[dict[str, Any]]) -> dict[str, Any]:
    (one,) = found
    return one


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The storage of an undisturbed run, `whole`."""
    storage = tmp_path_factory.mktemp("whole")
    assert train(storage, "whole") == 0
    return storage


def assert_undisturbed(storage: Path, name: str, whole: Path) -> None:
    (storage / "whole").symlink_to(whole / "whole")
    assert_same(storage, name, "whole")


@pytest.mark.parametrize("asynchronous", ["true", "false"])
@pytest.mark.parametrize("point", ["checkpoint.write", "checkpoint.manifest"])
def test_no_room_in_the_middle_of_a_save_costs_that_checkpoint_alone(
    tmp_path: Path,
    whole: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    point: str,
    asynchronous: str,
) -> None:
    inject(monkeypatch, point=point, do="no-space", once=str(tmp_path / "struck"))
    assert train(tmp_path, "full", f"checkpoint.asynchronous={asynchronous}") == 0
    failed = only(events(tmp_path, "full", "checkpoint_failed"))
    assert failed["cause"] == "periodic"
    assert "No space left on device" in failed["reason"]
    assert f"The checkpoint of step {failed['step']} was not written" in caplog.text
    assert not list((tmp_path / "full" / "checkpoints").glob(f"step-{failed['step']:08d}-*/manifest.json"))
    assert events(tmp_path, "full", "checkpoint")[-1]["step"] == 200
    assert_undisturbed(tmp_path, "full", whole)


def test_a_last_save_that_finds_no_room_is_tried_again_and_then_fails_the_run_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], whole: Path
) -> None:
    monkeypatch.setattr("lwray.engine.save.PAUSE_S", 0.01)
    inject(monkeypatch, point="checkpoint.write", do="no-space", step=200)
    assert train(tmp_path, "full") == ExitCode.FAILED
    assert "The state of step 200 could not be saved ([Errno 28] No space left" in capsys.readouterr().err
    assert len(events(tmp_path, "full", "checkpoint_failed")) == 3
    monkeypatch.delenv(VARIABLE)
    assert train(tmp_path, "full") == 0
    assert_undisturbed(tmp_path, "full", whole)


def test_a_writer_process_that_dies_costs_its_checkpoint_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, point="checkpoint.write", do="kill", once=str(tmp_path / "struck"))
    assert train(tmp_path, "bereft", "task.options.pause=0.005", "train.steps=600") == 0
    failed = only(events(tmp_path, "bereft", "checkpoint_failed"))
    assert failed["reason"] == "the writer process ended with code -9"
    causes = [event["cause"] for event in events(tmp_path, "bereft", "checkpoint")]
    assert "periodic" in causes
    assert causes[-1] == "final"


def test_a_save_that_hangs_is_given_up_at_its_deadline_and_the_next_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(monkeypatch, point="checkpoint.write", do="hang", once=str(tmp_path / "struck"))
    keys = ("task.options.pause=0.005", "train.steps=600", "checkpoint.deadline=1")
    assert train(tmp_path, "stuck", *keys) == 0
    failed = events(tmp_path, "stuck", "checkpoint_failed")[0]
    assert failed["reason"] == "it was not done in time"
    following = events(tmp_path, "stuck", "checkpoint")[0]
    assert following["blocked_s"] == pytest.approx(following["total_s"], rel=0.2)


def test_a_writer_that_hangs_when_the_run_ends_is_given_up_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, point="checkpoint.write", do="hang", once=str(tmp_path / "struck"))
    assert train(tmp_path, "stuck", "checkpoint.deadline=1") == 0
    assert events(tmp_path, "stuck", "checkpoint")[-1]["cause"] == "final"


def test_a_save_that_was_written_in_time_is_not_given_up_for_a_long_evaluation(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(monkeypatch, point="evaluate", do="delay", seconds=3.5)
    keys = ("checkpoint.deadline=3", "checkpoint.every_steps=49", "eval.every_steps=100")
    assert train(tmp_path, "patient", *keys) == 0
    assert not events(tmp_path, "patient", "checkpoint_failed")
    assert_undisturbed(tmp_path, "patient", whole)


def test_a_storage_that_fails_at_the_start_ends_the_start_and_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path, "unread", "train.max_hours=1e-9") == 0

    def fails(*arguments: object) -> bytes:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("lwray.checkpoint.find.checksum", fails)
        assert train(tmp_path, "unread") == ExitCode.FAILED
    assert "checkpoints cannot be read: [Errno 5] Input/output error. Repair the storage" in capsys.readouterr().err
    assert train(tmp_path, "unread") == 0
    assert list(resumed_steps(tmp_path, "unread"))


def test_a_run_none_of_whose_checkpoints_is_whole_does_not_begin_anew_in_silence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path, "torn", "train.max_hours=1e-9") == 0
    (part,) = (tmp_path / "torn" / "checkpoints").glob("*/rank-*")
    part.unlink()
    assert train(tmp_path, "torn") == ExitCode.FAILED
    assert "No checkpoint of the run is whole (step-" in capsys.readouterr().err


def test_a_state_that_is_no_number_is_not_committed_when_the_hours_are_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ("optim.lr=1e30", "optim.clip=0", "train.log_every=1000", "eval.every_steps=0", "train.max_hours=1e-5")
    assert train(tmp_path, "nan", *keys, "checkpoint.every_steps=0") == ExitCode.FAILED
    assert "training has diverged" in capsys.readouterr().err
    assert not list((tmp_path / "nan" / "checkpoints").glob("*/manifest.json"))


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_run_started_over_takes_its_name_from_an_old_driver_that_still_lives(
    tmp_path: Path, asynchronous: str
) -> None:
    run = RunDir(tmp_path / "renewed")
    keys = (*INLINE, "task.options.pause=0.005", f"checkpoint.asynchronous={asynchronous}")
    old = start(tmp_path, "renewed", *keys)
    wait_for(lambda: last_step(run) >= 50, 25, "step 50")
    os.killpg(old.pid, signal.SIGSTOP)
    finish(start(tmp_path, "renewed", *INLINE, "--fresh", "cluster.lease_s=1"), 25)
    summary, checkpoints = run.summary.read_bytes(), sorted(run.checkpoints.glob("*/manifest.json"))
    os.killpg(old.pid, signal.SIGCONT)
    output, _ = old.communicate(timeout=20)
    assert old.returncode == ExitCode.FAILED, output
    assert (run.summary.read_bytes(), sorted(run.checkpoints.glob("*/manifest.json"))) == (summary, checkpoints)
    assert {attempt.number for attempt in run.attempts_in_order()} == {2}


def test_parameters_that_lie_otherwise_in_memory_keep_their_moments(tmp_path: Path) -> None:
    source = (Path(__file__).parent / "tasks" / "toy.py").read_text()
    task = tmp_path / "lying.py"
    before = "        return nn.Sequential("
    assert before in source
    task.write_text(
        source.replace(before, "        model = nn.Sequential(")
        + """

class Lying(Toy):
    def model(self) -> nn.Module:
        model = super().model()
        model[0].weight = nn.Parameter(model[0].weight.detach().t().contiguous().t())
        return model
"""
    )
    text = task.read_text().replace("nn.Tanh(), nn.Linear(7, 2))", "nn.Tanh(), nn.Linear(7, 2))\n        return model")
    task.write_text(text)
    keys = (f"task.name={task}:Lying", "checkpoint.asynchronous=false")
    assert train(tmp_path, "whole", *keys) == 0
    assert train(tmp_path, "parts", *keys, "train.max_hours=1e-7") == 0
    assert train(tmp_path, "parts", *keys) == 0
    assert list(resumed_steps(tmp_path, "parts"))
    assert_same(tmp_path, "parts", "whole")


def test_a_second_save_waits_for_the_first_and_the_last_one_for_all(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(monkeypatch, point="checkpoint.write", do="delay", seconds=0.2)
    assert train(tmp_path, "slow", "checkpoint.every_steps=1") == 0
    saves = events(tmp_path, "slow", "checkpoint")
    assert len(saves) >= 2
    spans = [(event["time"] - event["total_s"], event["time"]) for event in saves]
    assert all(earlier[1] <= later[0] + 0.01 for earlier, later in pairwise(spans))
    assert [event["step"] for event in saves] == sorted(event["step"] for event in saves)
    assert saves[-1]["cause"] == "final"
    assert all(event["blocked_s"] < event["total_s"] / 2 for event in saves[:-1])
    assert_undisturbed(tmp_path, "slow", whole)


def test_one_rank_that_cannot_write_keeps_all_from_committing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, point="checkpoint.write", do="no-space", step=4, rank=1)
    keys = (*TOY_KEYS, "checkpoint.every_steps=4", "checkpoint.keep=100")
    train_on(2, tmp_path, [EngineRun("halved", keys), EngineRun("zero", (*keys, "parallel.backend=zero2"))])
    for name in ("halved", "zero"):
        assert [event["step"] for event in events(tmp_path, name, "checkpoint_failed")] == [4]
        assert events(tmp_path, name, "checkpoint")[-1]["step"] == 20
        assert not list((tmp_path / name / "checkpoints").glob("step-00000004-*/manifest.json"))


@pytest.mark.parametrize("point", [point for point in POINTS if point != "checkpoint.manifest"])
def test_a_rank_that_fails_at_any_point_of_a_step_ends_the_run_and_the_next_start_goes_on(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    # the step whose update is the hundredth; a checkpoint counts updates
    step = 100 if point.startswith("checkpoint") else 99
    inject(monkeypatch, point=point, do="fail", step=step, once=str(tmp_path / "mark"))
    # saves in the training's own process: a writer's failure would be no failure of the rank
    keys = () if point == "checkpoint.copy" else ("checkpoint.asynchronous=false",)
    with pytest.raises(RuntimeError, match=f"injected failure at {point}"):
        train(tmp_path, "struck", *keys, *(("checkpoint.every_steps=100",) if point == "checkpoint.copy" else ()))
    assert train(tmp_path, "struck", *keys) == 0
    assert_undisturbed(tmp_path, "struck", whole)


def test_one_flipped_byte_of_the_newest_checkpoint_and_the_run_goes_on_from_the_one_before(
    tmp_path: Path, whole: Path
) -> None:
    process = start(tmp_path, "flipped", *INLINE, "checkpoint.asynchronous=false")
    run = RunDir(tmp_path / "flipped")
    wait_for(lambda: last_step(run) >= 100, 25, "step 100")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    whole_ones = sorted(path.parent for path in run.checkpoints.glob("*/manifest.json"))
    (part,) = whole_ones[-1].glob("rank-*.safetensors")
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    finish(start(tmp_path, "flipped", *INLINE), 25)
    skipped = {event["checkpoint"]: event["reason"] for event in events(tmp_path, "flipped", "skipped_checkpoint")}
    assert skipped[whole_ones[-1].name] == f"{part.name} is corrupt: its checksum differs"
    assert [f"step-{step:08d}-0001" for step in resumed_steps(tmp_path, "flipped")] == [whole_ones[-2].name]
    assert_undisturbed(tmp_path, "flipped", whole)


def test_a_run_that_is_stopped_while_a_save_is_under_way_finishes_it_and_saves_its_last_state(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(monkeypatch, point="checkpoint.write", do="delay", seconds=0.5, step=20)
    process = start(tmp_path, "stopped", *INLINE, "task.options.pause=0.005")
    wait_for(lambda: last_step(RunDir(tmp_path / "stopped")) >= 25, 25, "step 25")
    os.kill(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == ExitCode.TERMINATED, output
    periodic, last = events(tmp_path, "stopped", "checkpoint")
    assert (periodic["step"], periodic["cause"], last["cause"]) == (20, "periodic", "final")
    monkeypatch.delenv(VARIABLE)
    finish(start(tmp_path, "stopped", *INLINE, "task.options.pause=0.005"), 25)
    assert losses_of(tmp_path, "stopped") == losses_of(whole, "whole")


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_the_best_state_is_saved_when_it_is_evaluated_and_kept(tmp_path: Path, asynchronous: str) -> None:
    keys = ("optim.lr=1.0", "eval.every_steps=5", "checkpoint.every_steps=3", "checkpoint.keep=1")
    assert train(tmp_path, "best", *keys, "checkpoint.keep_best=1", f"checkpoint.asynchronous={asynchronous}") == 0
    lines = merged_metrics(RunDir(tmp_path / "best"))
    evaluated = {line["step"] + 1: line["val_loss"] for line in lines if "val_loss" in line}
    best = min(evaluated, key=lambda step: evaluated[step])
    assert best != 200
    names = sorted(path.name for path in (tmp_path / "best" / "checkpoints").iterdir())
    assert names == [f"step-{best:08d}-0001", "step-00000200-0001"]


def test_with_auto_the_interval_follows_what_a_save_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lwray.engine.interval.FIRST_S", 0.02)
    monkeypatch.setattr("lwray.engine.interval.PRIOR_S", 0.001)
    keys = ("checkpoint.every=auto", "checkpoint.every_steps=0", "train.steps=1500", "eval.every_steps=0")
    assert train(tmp_path, "auto", *keys) == 0
    saves = events(tmp_path, "auto", "checkpoint")
    assert len(saves) >= 2
    assert saves[0]["cause"] == "periodic"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr("lwray.engine.interval.time.monotonic", lambda: now.seconds)
    return now


def test_the_clock_of_the_interval(clock: SimpleNamespace) -> None:
    given = Interval(CheckpointSection(every_seconds=100), losses=0, seconds=0.0)
    clock.seconds += 99
    assert not given.is_due()
    clock.seconds += 1
    assert given.is_due()
    given.begun()
    given.measured(blocked=50.0, total=300.0)
    clock.seconds += 99
    assert not given.is_due(), "an interval that is given stays"
    given.failed()
    clock.seconds += RETRY_S
    assert given.is_due(), "a save that failed is tried again soon"
    never = Interval(CheckpointSection(every_seconds=0), losses=0, seconds=0.0)
    clock.seconds += 1e9
    assert not never.is_due()
    never.failed()
    clock.seconds += RETRY_S
    assert never.is_due()


def test_the_clock_of_an_automatic_interval(clock: SimpleNamespace) -> None:
    auto = Interval(CheckpointSection(every="auto"), losses=3, seconds=0.0)
    assert auto.between_losses == PRIOR_S / 4
    clock.seconds += FIRST_S
    assert auto.is_due()
    auto.begun()
    clock.seconds += 30
    auto.measured(blocked=2.0, total=30.0)
    due = auto_seconds(2.0, 30.0, PRIOR_S / 4)
    clock.seconds += due - 31
    assert not auto.is_due()
    clock.seconds += 1
    assert auto.is_due(), "counted from when the save began"


def test_only_what_no_last_save_preceded_counts_as_a_loss() -> None:
    started, resumed = {"event": "started"}, {"event": "resumed"}
    periodic, final = ({"event": "checkpoint", "cause": cause} for cause in ("periodic", "final"))
    assert count_losses([started, periodic, final, resumed, final, resumed]) == 0, "stopped, drained, resized"
    assert count_losses([started, periodic, resumed, final, resumed, periodic, {"event": "stopped"}, resumed]) == 2


@given(st.floats(0.001, 100), st.floats(0.001, 1000), st.floats(1, 1e6))
def test_auto_never_costs_more_than_its_share_and_never_asks_for_two_at_once(
    blocked: float, total: float, between_losses: float
) -> None:
    seconds = auto_seconds(blocked, total, between_losses)
    assert blocked / seconds <= OVERHEAD * 1.000001
    assert seconds >= total
    assert auto_seconds(blocked, total, between_losses * 2) >= seconds


def test_frozen_weights_that_changed_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path, "taught", "task.options.teacher=true", "train.max_hours=1e-9") == 0
    capsys.readouterr()
    monkeypatch.setenv("TEACHER_SEED", "2")
    assert train(tmp_path, "taught", "task.options.teacher=true") == ExitCode.FAILED
    assert "The frozen weights of teacher are not those that step-" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("nn.Linear(8, 31)", "nn.Linear(8, 31, bias=False)", "holds another network (0.bias"),
        ("31", "30", "holds 0.weight of shape [31, 8], the network's is [30, 8]"),
    ],
)
def test_a_network_that_changed_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], before: str, after: str, says: str
) -> None:
    source = (Path(__file__).parent / "tasks" / "toy.py").read_text()
    task = tmp_path / "mine.py"
    task.write_text(source)
    assert train(tmp_path, "changed", f"task.name={task}:Toy", "train.max_hours=1e-9") == 0
    task.write_text(source.replace(before, after))
    assert train(tmp_path, "changed", f"task.name={task}:Toy") == ExitCode.FAILED
    printed = capsys.readouterr()
    assert says in printed.err
    assert "mine.py has changed since attempt 1" in printed.out


def test_deterministic_kernels_change_nothing_on_a_cpu(tmp_path: Path, whole: Path) -> None:
    try:
        assert train(tmp_path, "deterministic", "train.deterministic=true") == 0
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert_undisturbed(tmp_path, "deterministic", whole)


def test_a_checkpoint_of_a_newer_version_stops_the_run_instead_of_being_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from lwray.checkpoint import manifest

    assert train(tmp_path, "later", "train.max_hours=1e-9") == 0
    capsys.readouterr()
    (written,) = (tmp_path / "later" / "checkpoints").glob("*/manifest.json")
    document = json.loads(written.read_text()) | {"format": manifest.FORMAT + 1}
    del document["xxh3"]
    written.write_bytes(manifest._signed(document))
    assert train(tmp_path, "later") == ExitCode.BAD_INPUT
    assert re.search(r"step-\S+ .* format 2, .* up to 1\. Go on with the version", capsys.readouterr().err)


def test_a_fault_names_a_point_that_there_is() -> None:
    with pytest.raises(ValueError, match=r"'step.forward' is no point of a step; there are step.data, "):
        Fault("step.forward", "fail")
