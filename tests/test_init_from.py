"""`init.from`: a run starts from weights that exist already, and is a run of its own from then on."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from door import Door, contents, own_process, process_as_it_was  # noqa: F401
from engine_ranks import TASKS, lines_of, losses_of, weights_of
from safetensors.torch import save_file
from test_foreign import Touch
from torch import Tensor

from lwray.cli import main
from lwray.config import load
from lwray.errors import ExitCode
from lwray.tracking.journal import merged_ledger
from lwray.tracking.rundir import RunDir, config_toml

CONSTANT = f"{TASKS / 'constant.py'}:Constant"
KEYS = (
    f"task.name={CONSTANT}",
    "batch.global_size=8",
    "optim.lr=0.01",
    "optim.schedule=constant",
    "optim.warmup_steps=0",
    "eval.every_steps=5",
    "checkpoint.every_steps=5",
    # beside the training a save may come some steps later
    "checkpoint.asynchronous=false",
    "checkpoint.keep=9",
    "tracking.enabled=false",
)
STANDS_STILL = ("optim.lr=1e-30", "train.steps=1")
"""A run that ends with the weights that it began with: no float32 moves by so little."""


def train(storage: Path, name: str, *keys: str) -> int:
    file = storage.parent / "run.toml"
    file.touch()
    options = ("--launcher=inline", f"--storage={storage}", f"run.name={name}")
    return main(["train", str(file), *options, *KEYS, *keys])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A storage with the run `a`, of 20 steps."""
    storage = tmp_path_factory.mktemp("init") / "runs"
    with process_as_it_was():
        assert train(storage, "a", "train.steps=20") == ExitCode.FINISHED
    return storage


@pytest.fixture
def storage(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "runs")
    (tmp_path / "run.toml").touch()
    return tmp_path / "runs"


def started(storage: Path, name: str) -> dict[str, Any]:
    [event] = [event for event in merged_ledger(RunDir(storage / name)) if event["event"] == "started"]
    return event


def params_of(storage: Path, name: str) -> dict[str, Tensor]:
    found = weights_of(storage, name).items()
    return {key.partition("/")[2]: tensor for key, tensor in found if key.startswith(("param/", "buffer/"))}


def params_at(storage: Path, step: int) -> dict[str, Tensor]:
    """The weights of `a` after `step` updates, by way of a run that stands still there."""
    name = f"still-{step}"
    assert train(storage, name, f"init.from=a@{step}", *STANDS_STILL) == ExitCode.FINISHED
    return params_of(storage, name)


def refused(storage: Path, capsys: pytest.CaptureFixture[str], name: str, *keys: str) -> str:
    """The message of an exit with code 2 that left nothing behind."""
    capsys.readouterr()
    before = contents(storage)
    assert train(storage, name, *keys) == ExitCode.BAD_INPUT
    assert contents(storage) == before
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


# from another run


@pytest.mark.parametrize(("which", "step"), [("a@10", 10), ("a", 20), ("a@newest", 20), ("a@best", 0), ("{}/a@5", 5)])
def test_a_run_starts_with_the_weights_of_another(storage: Path, which: str, step: int) -> None:
    theirs = {line["step"] + 1: line["val_loss"] for line in lines_of(storage, "a").values() if "val_loss" in line}
    step = step or min(theirs, key=lambda each: theirs[each])
    assert train(storage, "b", f"init.from={which.format(storage)}", *STANDS_STILL) == ExitCode.FINISHED
    assert lines_of(storage, "b")[0]["val_loss"] == theirs[step]
    # all rows are the same: the first loss is that of their next step, if there was one
    assert step == 20 or lines_of(storage, "b")[0]["loss"] == losses_of(storage, "a")[step]
    init = started(storage, "b")["init"]
    assert (init["text"], init["step"]) == (which.format(storage), step)
    assert len(init["checksum"]) == 16


def test_options_of_the_task_may_be_others_where_the_shapes_are_the_same(storage: Path) -> None:
    assert train(storage, "b", "init.from=a", "task.options.remark=other", *STANDS_STILL) == ExitCode.FINISHED


def test_with_the_optimiser_it_goes_on_as_the_other_did_bit_for_bit(storage: Path) -> None:
    assert train(storage, "b", "init.from=a@10", "init.optimizer=true", "train.steps=10") == ExitCode.FINISHED
    assert losses_of(storage, "b") == losses_of(storage, "a")[10:]
    theirs = weights_of(storage, "a")
    assert all(tensor.equal(theirs[key]) for key, tensor in weights_of(storage, "b").items())
    assert train(storage, "fresh", "init.from=a@10", "train.steps=10") == ExitCode.FINISHED
    assert losses_of(storage, "fresh")[0] == losses_of(storage, "a")[10]
    assert losses_of(storage, "fresh")[2] != losses_of(storage, "a")[12], "its moments are its own"


def test_a_chain_of_runs_counts_all_updates_of_the_optimiser(storage: Path) -> None:
    assert train(storage, "b", "init.from=a@5", "init.optimizer=true", "train.steps=5") == ExitCode.FINISHED
    assert train(storage, "c", "init.from=b@5", "init.optimizer=true", "train.steps=10") == ExitCode.FINISHED
    assert losses_of(storage, "c") == losses_of(storage, "a")[10:]


@pytest.mark.parametrize("optimizer", ["true", "false"])
def test_it_goes_on_bit_for_bit_after_the_other_run_is_gone(storage: Path, optimizer: str) -> None:
    keys = ("init.from=a", f"init.optimizer={optimizer}", "train.steps=7")
    assert train(storage, "whole", *keys) == ExitCode.FINISHED
    assert train(storage, "broken", *keys, "train.max_hours=1e-9") == ExitCode.FINISHED
    shutil.rmtree(storage / "a")
    assert train(storage, "broken", *keys, "train.max_hours=1") == ExitCode.FINISHED
    assert losses_of(storage, "broken") == losses_of(storage, "whole")
    whole = weights_of(storage, "whole")
    assert all(tensor.equal(whole[key]) for key, tensor in weights_of(storage, "broken").items())
    resumed = [event for event in merged_ledger(RunDir(storage / "broken")) if event["event"] == "resumed"]
    assert [0 < event["from_step"] < 7 for event in resumed] == [True]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("backend", ["ddp", "zero1", "zero2", "zero3"])
def test_every_backend_takes_the_optimiser_and_goes_on_with_it(storage: Path, backend: str) -> None:
    """Two workers, stopped and started again, have the losses of the run that they branch off from."""
    lwray = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "lwray", "train")
    run = (storage.parent / "run.toml", "--launcher=torchrun", f"--storage={storage}", "run.name=b", *KEYS)
    keys = ("init.from=a@10", "init.optimizer=true", "train.steps=10", f"parallel.backend={backend}")
    for hours in ("1e-9", "1"):
        command = [sys.executable, *lwray, *map(str, run), *keys, "parallel.device=cpu", f"train.max_hours={hours}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert losses_of(storage, "b") == pytest.approx(losses_of(storage, "a")[10:], rel=1e-5)
    theirs = weights_of(storage, "a")
    for key, tensor in weights_of(storage, "b").items():
        torch.testing.assert_close(tensor, theirs[key], rtol=1e-4, atol=1e-7)


def test_what_it_starts_from_is_settled_at_the_first_start(
    storage: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(storage, "c", "train.steps=20", "run.seed=4", "train.max_hours=1e-9") == ExitCode.FINISHED
    [first] = (storage / "c/checkpoints").iterdir()
    monkeypatch.setenv("LWRAY_FAULTS", json.dumps([{"point": "step.update", "do": "fail", "step": 0}]))
    with pytest.raises(RuntimeError, match="injected failure"):
        train(storage, "b", "init.from=c", *STANDS_STILL)
    monkeypatch.delenv("LWRAY_FAULTS")
    assert train(storage, "c", "train.steps=20", "run.seed=4", "train.max_hours=1") == ExitCode.FINISHED
    aside = shutil.copytree(storage / "b", storage / "copy")
    assert train(storage, "b", "init.from=c", *STANDS_STILL) == ExitCode.FINISHED
    inits = [e["init"] for e in merged_ledger(RunDir(storage / "b")) if e["event"] == "started"]
    assert [init["checkpoint"] for init in inits] == [first.name, first.name]

    shutil.rmtree(storage / "b")
    aside.rename(storage / "b")
    shutil.rmtree(first)
    assert "that is changed or gone" in refused(storage, capsys, "b", "init.from=c", *STANDS_STILL)
    assert train(storage, "b", "init.from=c", *STANDS_STILL, "--fresh") == ExitCode.FINISHED
    assert started(storage, "b")["init"]["step"] == 20


def test_another_init_is_another_run(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(storage, "b", "init.from=a@5", *STANDS_STILL, "train.max_hours=1e-9") == ExitCode.FINISHED
    capsys.readouterr()
    for keys in (("init.from=a@10",), ("init.from=a@5", "init.optimizer=true"), ()):
        assert train(storage, "b", *keys, *STANDS_STILL) == ExitCode.BAD_INPUT
    said = capsys.readouterr().err
    assert "init.from: 'a@5' became 'a@10'" in said
    assert "init.optimizer: False became True" in said
    assert "init.from: 'a@5' became ''" in said


# from what other programs wrote


def as_dcp(state: dict[str, Any], path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": state, "step": 3}, checkpoint_id=path / "dcp", no_dist=True)
    return path / "dcp"


def as_pt(state: dict[str, Any], path: Path) -> Path:
    torch.save({"model_state_dict": {f"module.{name}": t for name, t in state.items()}, "epoch": 3}, path / "x.pt")
    return path / "x.pt"


def as_safetensors(state: dict[str, Any], path: Path) -> Path:
    save_file(state, path / "x.safetensors")
    return path / "x.safetensors"


def as_directory(state: dict[str, Any], path: Path) -> Path:
    (path / "exported").mkdir()
    save_file(state, path / "exported" / "model.safetensors")
    (path / "exported" / "config.json").write_text("{}")
    return path / "exported"


FORMS = pytest.mark.parametrize("written", [as_dcp, as_pt, as_safetensors, as_directory])


def whole_state(storage: Path) -> dict[str, Tensor]:
    """All that the network has: the trained of `a` after 10 updates, and another base than the seed's."""
    state = params_at(storage, 10)
    shapes = {"base.weight": (4, 4), "base.bias": (4,), "unused.weight": (2, 2), "unused.bias": (2,)}
    return state | {name: torch.full(shape, 9.0) for name, shape in shapes.items()}


@FORMS
def test_weights_of_other_programs_are_taken_but_what_is_frozen_is_the_tasks(
    storage: Path, tmp_path: Path, written: Callable[[dict[str, Any], Path], Path]
) -> None:
    path = written(whole_state(storage), tmp_path)
    assert train(storage, "b", f"init.from={path}", *STANDS_STILL) == ExitCode.FINISHED
    # with another base it would be another loss
    assert lines_of(storage, "b")[0]["val_loss"] == lines_of(storage, "a")[9]["val_loss"]
    expected = params_at(storage, 10)
    found = params_of(storage, "b")
    assert found.keys() == expected.keys() == {"up.weight", "up.bias", "down.weight", "down.bias", "scale"}
    assert all(tensor.equal(expected[name]) for name, tensor in found.items())


def test_another_dtype_becomes_the_networks(storage: Path, tmp_path: Path) -> None:
    state = {name: tensor.to(torch.bfloat16) for name, tensor in whole_state(storage).items()}
    assert train(storage, "b", f"init.from={as_pt(state, tmp_path)}", *STANDS_STILL) == ExitCode.FINISHED
    found = params_of(storage, "b")
    assert all(t.dtype == torch.float32 and t.equal(state[name].float()) for name, t in found.items())


@FORMS
def test_wrong_names_and_shapes_are_refused_before_anything_is_started(
    storage: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    written: Callable[[dict[str, Any], Path], Path],
) -> None:
    state = whole_state(storage)
    state["up.weight"] = torch.ones(6, 4)
    state["more.weight"] = state.pop("down.bias")
    message = refused(storage, capsys, "b", f"init.from={written(state, tmp_path)}")
    assert "missing: down.bias; unexpected: more.weight; of another shape: up.weight ([6, 4], here [5, 4])" in message


def test_another_network_names_four_of_each_and_the_keys_of_the_runs(
    storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(storage, capsys, "b", "init.from=a", "task.options.width=6")
    assert "of another shape: up.weight ([5, 4], here [6, 4]), up.bias ([5], here [6]), down.weight" in message
    assert "That run has task.options = {}, here {'width': 6}." in message
    many = {f"extra.{index}": torch.ones(1) for index in range(9)}
    torch.save(many, storage.parent / "many.pt")
    message = refused(storage, capsys, "b", f"init.from={storage.parent / 'many.pt'}")
    assert "unexpected: extra.0, extra.1, extra.2, extra.3 and 5 more" in message
    # what no loss reaches is frozen, but only the workers find that out
    assert "missing: up.weight, up.bias, down.weight, down.bias and 3 more" in message


def test_malicious_files_are_refused_and_run_nothing(
    storage: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = tmp_path / "evil"
    evil.mkdir()
    (evil / ".metadata").write_bytes(pickle.dumps(Touch(tmp_path / "ran")))
    assert "it names posix.mkdir" in refused(storage, capsys, "b", f"init.from={evil}")
    torch.save({"model": {"w": torch.ones(1)}, "x": Touch(tmp_path / "ran")}, tmp_path / "evil.pt")
    assert "it names posix.mkdir" in refused(storage, capsys, "b", f"init.from={tmp_path / 'evil.pt'}")
    assert not (tmp_path / "ran").exists()


def test_a_damaged_checkpoint_is_refused(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [file] = (storage / "a/checkpoints/step-00000010-0001").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert "is corrupt: its checksum differs" in refused(storage, capsys, "b", "init.from=a@10")


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (("init.from=nobody",), "the runs in {} are a."),
        (("init.from=nobody@10",), "init.from = 'nobody@10' is none of RUN, RUN@STEP"),
        (("init.from=a@11",), "there is no checkpoint of step 11; there are those of 20, 15, 10, 5"),
        (("init.from=b",), "init.from = 'b' is none of"),
        (("init.from={}/x.pt", "init.optimizer=true"), "init.optimizer = true is for another run"),
        (("init.optimizer=true",), "name it in init.from"),
    ],
)
def test_what_is_no_source_of_weights_is_refused(
    storage: Path, capsys: pytest.CaptureFixture[str], keys: tuple[str, ...], says: str
) -> None:
    torch.save({"w": torch.ones(1)}, storage / "x.pt")
    message = refused(storage, capsys, "b", *(key.format(storage) for key in keys))
    assert says.format(storage) in message


def test_a_run_cannot_start_from_itself(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is the run itself" in refused(storage, capsys, "a", "init.from=a", "--fresh")


# the language model


def test_an_exported_language_model_is_trained_on(tmp_path: Path) -> None:
    door = Door(tmp_path).write()
    assert door.train() == ExitCode.FINISHED
    exported = tmp_path / "exported"
    assert main(["export", str(door.storage / "tiny"), "--out", str(exported)]) == ExitCode.FINISHED
    assert door.train("run.name=next", f"init.from={exported}", *STANDS_STILL) == ExitCode.FINISHED
    last = lines_of(door.storage, "tiny")[5]["val_loss"]
    # the rows of the tables that no token has are not exported
    assert lines_of(door.storage, "next")[0]["val_loss"] == pytest.approx(last, abs=0.05)
    assert door.train("run.name=other", f"init.from={exported}", "model.width=64") == ExitCode.BAD_INPUT


# the key


def test_the_key_goes_through_file_command_line_and_record(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[init]\nfrom = "a@10"\n')
    resolved = load(file, ["init.optimizer=true"])
    assert (resolved.config.init.source, resolved.config.init.optimizer) == ("a@10", True)
    (tmp_path / "again.toml").write_text(config_toml(resolved))
    assert load(tmp_path / "again.toml", ["run.name=run"]).config == resolved.config
    assert os.linesep + "[init]" in config_toml(resolved)
