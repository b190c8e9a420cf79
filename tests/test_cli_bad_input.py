"""Bad input: one sentence that says what to do, exit code 2, nothing started and nothing overwritten."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import ray
from door import Door, contents, own_process, trained_run  # noqa: F401

from lwray.cli import main
from lwray.errors import ExitCode


@pytest.fixture(scope="module")
def root(trained: Path) -> Path:
    """The directory of the run `tiny`, with what bad input needs."""
    return write_bad_files(trained)


@pytest.fixture
def door(root: Path, monkeypatch: pytest.MonkeyPatch) -> Door:
    # relative paths in the cases below are files of write_bad_files
    monkeypatch.chdir(root)
    return Door(root)


def write_bad_files(root: Path) -> Path:
    (root / "empty.txt").touch()
    (root / "binary.txt").write_bytes(b"\x7fELF\0\0\0\0" * 100)
    (root / "latin.txt").write_bytes(b"plain\n" * 10 + "café\n".encode("latin-1") * 100)
    (root / "one_line.txt").write_text("hello\n")
    (root / "empty_directory").mkdir()
    (root / "bare.bin").write_bytes(b"abc")
    np.save(root / "large_ids.npy", np.full(5000, 600, dtype=np.uint16))
    np.save(root / "negative_ids.npy", np.full(5000, -1, dtype=np.int16))
    np.save(root / "table.npy", np.zeros((50, 2), dtype=np.uint16))
    (root / "broken.jsonl").write_text("{\n")
    (root / "other_key.jsonl").write_text('{"body": "text"}\n')
    (root / "no_task.py").write_text("class MyTask: pass\n")
    return root


def refused(door: Door, capsys: pytest.CaptureFixture[str], *arguments: str, launcher: str = "inline") -> str:
    """The message of a command that must change nothing, neither in the run of that name nor beside it."""
    runs = {path.name for path in door.storage.iterdir()}
    before = contents(door.storage / "tiny")
    capsys.readouterr()
    assert door.train(*arguments, launcher=launcher) == ExitCode.BAD_INPUT
    printed = capsys.readouterr()
    assert printed.out == "", "something was started"
    assert {path.name for path in door.storage.iterdir()} == runs
    assert contents(door.storage / "tiny") == before
    assert printed.err.startswith("lwray: ")
    return printed.err.removeprefix("lwray: ").rstrip("\n")


KEYS = {
    "unknown key": ("optim.lrr=1", "unknown key optim.lrr; did you mean optim.lr?"),
    "key of another section": ("train.lr=1", "unknown key train.lr; did you mean optim.lr?"),
    "unknown section": ("optm.lr=1", "unknown section [optm]; did you mean optim?"),
    "text for a number": ("optim.lr=fast", "command line: optim.lr: Input should be a valid number"),
    "list for a number": ("model.layers=[1]", "model.layers: Input should be a valid integer"),
    "fraction for a count": ("eval.rows=1.5", "eval.rows: 1.5 is not a whole number"),
    "unknown time unit": ("checkpoint.every_seconds=5parsec", "unknown unit 'parsec'", "known units: ms, s"),
    "unknown byte unit": ("data.max_bytes=3fathoms", "unknown unit 'fathoms'", "known units: B, KB"),
    "unknown length unit": ("train.steps=5km", "unknown unit 'km'", "write steps (1000), epochs (2ep)"),
    "steps as a share": ("train.steps=5%", "give steps (1000) or epochs (2ep)"),
    "no section": ("lr=1", "'lr=1' is not section.key=value, such as optim.lr=3e-4."),
    "slash in the name": (
        "run.name=a/b",
        "run.name: not the pattern of a name; use letters, digits, '.', '_' and '-' only",
    ),
    "name that leaves the storage": ("run.name=..", "run.name: not the pattern of a name; use letters, digits"),
    "fp8 is not there yet": ("precision.mode=fp8", "precision.mode: Input should be 'fp32' or 'bf16'"),
    "negative batch": ("batch.global_size=-1", "batch.global_size", "greater than or equal to 0"),
    "no steps": ("train.steps=0", "give steps (1000) or epochs (2ep), more than none"),
    "no layers": ("model.layers=0", "model.layers: Input should be greater than or equal to 1"),
    "no learning rate": ("optim.lr=0", "optim.lr: Input should be greater than 0"),
    "negative hours": ("train.max_hours=-1", "train.max_hours: Input should be greater than or equal to 0"),
    "no checkpoint kept": ("checkpoint.keep=0", "checkpoint.keep: Input should be greater than or equal to 1"),
    "no worker": ("parallel.workers=0", "parallel.workers: at least one worker"),
    "workers upside down": ("parallel.workers=4-2", "min no larger than max"),
    "workers in words": ("parallel.workers=a-b", "'a-b' is neither a number, a range such as 2-8, nor auto"),
}

DATA = {
    "no such file": ("data.source=gone/x.txt", "no file matches 'gone/x.txt'", "correct data.source"),
    "no such held-out file": ("data.val_source=gone.txt", "no file matches 'gone.txt'", "data.val_source"),
    "no source at all": ("data.source=[]", "data.source is empty; name files"),
    "empty file": ("data.source=empty.txt", "empty.txt is empty; remove it from the source"),
    "empty directory": ("data.source=empty_directory", "no file under 'empty_directory' has a known suffix"),
    "binary file": ("data.source=binary.txt", "binary.txt is a binary file (a zero byte at 4)"),
    "not UTF-8": ("data.source=latin.txt", "latin.txt is not UTF-8 at byte 63; convert it"),
    "broken JSONL": ("data.source=broken.jsonl", "broken.jsonl, line 1 is not JSON"),
    "other JSONL key": ("data.source=other_key.jsonl", "set data.text_key to one of its keys: 'body'"),
    "not Parquet": ("data.source=text.txt data.format=parquet", "text.txt is not a Parquet file"),
    "not prepared": ("data.source=empty_directory data.format=prepared", "is not a prepared data set"),
    "tokens without a header": ("data.source=bare.bin", "bare.bin has no token header"),
    "ids beyond the vocabulary": (
        "data.source=large_ids.npy",
        "token id 600, outside the vocabulary of 512",
        "data.vocab_size",
    ),
    "negative ids": ("data.source=negative_ids.npy", "token id -1, outside the vocabulary of 512"),
    "tokens in a table": ("data.source=table.npy", "holds uint16 of shape (50, 2)", "one-dimensional"),
    "a line of text": ("data.source=one_line.txt", "too short: it leaves nothing to hold out", "data.val_source"),
    "shorter than a window": (
        "model.context=100000",
        "shorter than one window of model.context + 1 = 100001",
        "a shorter context",
    ),
    "no such tokeniser": ("data.tokenizer=gone.json", "data.tokenizer 'gone.json' is none of bpe, bytes"),
    "not a tokeniser": ("data.tokenizer=text.txt", "text.txt is not a tokenizer.json"),
}

SHAPE = {
    "no task file": ("task.name=gone.py:MyTask", "task.name: there is no file", "gone.py"),
    "no task class": ("task.name=no_task.py:MyTask", "no_task.py has no class MyTask that derives from"),
    "unknown task": ("task.name=llm", "There is no task 'llm': task.name is lm or path/to/file.py:Class."),
    "width over heads": ("model.heads=3", "model.width = 32 over model.heads = 3 must be an even head dimension"),
    "heads over kv_heads": ("model.heads=4 model.kv_heads=3", "model.heads = 4 is no multiple of model.kv_heads = 3"),
    "no batch": ("batch.global_size=0", "Give one of batch.global_size (rows a step) and batch.global_tokens"),
    "two batches": ("batch.global_tokens=256", "Give one of batch.global_size (rows a step) and batch.global_tokens"),
    "half a row": (
        "batch.global_size=0 batch.global_tokens=100",
        "batch.global_tokens = 100 is no whole number of rows of 32 tokens",
    ),
    "no micro-step": ("batch.accumulation=0", "batch.accumulation = 0: at least 1 micro-step"),
    "negative micro-batch": ("batch.micro_size=-2", "batch.micro_size = -2 must be a positive multiple"),
    "accumulation divides nothing": ("batch.accumulation=3", "8 rows / 1 workers / 3 micro-steps is no whole number"),
    "accumulation times micro": (
        "batch.accumulation=3 batch.micro_size=2",
        "2 x accumulation 3 x workers 1 = 6",
        "batch.global_size = 8",
    ),
    "workers in one process": (
        "parallel.workers=2",
        "parallel.workers asks for 2, but --launcher inline is one process",
    ),
    "no cores": ("parallel.cpus_per_worker=0", "parallel.cpus_per_worker must be more than 0 cores."),
    "no room on the disk": (
        "model.width=1048576 model.heads=8192",
        "GB free, and one checkpoint of",
        "choose another with --storage",
    ),
}


@pytest.mark.parametrize(("overrides", "says"), [(c[0], c[1:]) for c in KEYS.values()], ids=list(KEYS))
def test_a_bad_value_is_refused_and_named(
    door: Door, capsys: pytest.CaptureFixture[str], overrides: str, says: tuple[str, ...]
) -> None:
    check_refusal(door, capsys, overrides, says)


@pytest.mark.parametrize(("overrides", "says"), [(c[0], c[1:]) for c in DATA.values()], ids=list(DATA))
def test_bad_data_is_refused_and_named(
    door: Door, capsys: pytest.CaptureFixture[str], overrides: str, says: tuple[str, ...]
) -> None:
    check_refusal(door, capsys, overrides, says)


@pytest.mark.parametrize(("overrides", "says"), [(c[0], c[1:]) for c in SHAPE.values()], ids=list(SHAPE))
def test_what_cannot_train_is_refused_with_its_numbers(
    door: Door, capsys: pytest.CaptureFixture[str], overrides: str, says: tuple[str, ...]
) -> None:
    check_refusal(door, capsys, overrides, says)


def check_refusal(door: Door, capsys: pytest.CaptureFixture[str], overrides: str, says: tuple[str, ...]) -> None:
    """Under a new name, and as a fresh start of a run that exists: the old one must not be set aside."""
    for how in ("run.name=new", "--fresh"):
        # a case about the name itself comes later, and wins
        message = refused(door, capsys, how, *overrides.split())
        assert "\n" not in message
        for part in says:
            assert part in message


@pytest.mark.parametrize(
    "overrides",
    [
        "optim.lr=true",
        "optim.lr=inf",
        "optim.betas=[1.5,0.9]",
        "parallel.cpus_per_worker=nan",
        "parallel.workers=[2,4]",
    ],
)
def test_what_is_no_number_of_its_kind_is_refused(
    door: Door, capsys: pytest.CaptureFixture[str], tmp_path: Path, overrides: str
) -> None:
    door.storage = tmp_path
    (tmp_path / "tiny").mkdir()
    refused(door, capsys, "run.name=new", "train.steps=1", overrides)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[run\n", "is not valid TOML: Expected ']'"),
        ("[run]\nname = 'caf\xe9'\n", "is not valid TOML: 'utf-8' codec"),
        ("lr = 3\n", "lr stands in no section; `lwray config --keys` lists all keys by section."),
        ("run = 3\n", "[run] is a section; write run.KEY = … or a table."),
        ("[optim]\nlrr = 1\n", "unknown key optim.lrr; did you mean optim.lr?"),
        ("[optim]\nlr = 'fast'\n", "optim.lr: Input should be a valid number"),
    ],
)
def test_a_bad_run_file_is_named(
    tmp_path: Path, door: Door, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    bad = Door(door.root)
    bad.config = tmp_path / "bad.toml"
    bad.config.write_bytes(text.encode("latin-1" if "\xe9" in text else "utf-8"))
    message = refused(bad, capsys)
    assert str(bad.config) in message
    assert says in message


def test_a_missing_run_file_is_named(door: Door, capsys: pytest.CaptureFixture[str]) -> None:
    door.config = door.root / "gone.toml"
    assert refused(door, capsys) == f"There is no configuration file {door.config}."


def test_a_run_file_whose_name_is_no_run_name_says_so(door: Door, capsys: pytest.CaptureFixture[str]) -> None:
    spaced = door.root / "my run.toml"
    shutil.copy(door.config, spaced)
    door.config = spaced
    assert "the file's name: run.name: not the pattern of a name; use letters, digits" in refused(door, capsys)


def test_another_mathematics_under_the_same_name_lists_old_and_new(
    door: Door, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(door, capsys, "optim.lr=3e-4", "model.layers=2", "train.log_every=2")
    assert "optim.lr: 0.001 became 0.0003" in message
    assert "model.layers: 1 became 2" in message
    assert "train.log_every" not in message, "not a key of the mathematics"
    assert "Choose another run.name, or start over with --fresh (the old run is set aside, not deleted)." in message


def test_a_key_that_the_first_starts_version_did_not_have_was_at_its_default(
    door: Door, capsys: pytest.CaptureFixture[str]
) -> None:
    identity = door.storage / "tiny" / "run.json"
    document = json.loads(identity.read_text())
    del document["maths"]["model.norm_eps"]
    identity.write_text(json.dumps(document))
    assert door.train() == ExitCode.FINISHED
    assert "model.norm_eps: 0.0 became 1e-05" in refused(door, capsys, "model.norm_eps=1e-5")


def test_an_empty_option_and_a_url_with_one_slash_are_no_storage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fresh = Door(tmp_path).write()
    for storage, says in (("", "--storage is empty"), ("s3:/bucket/runs", "write s3://bucket/runs")):
        assert main(["train", str(fresh.config), "--launcher=inline", "--storage", storage]) == ExitCode.BAD_INPUT
        assert says in capsys.readouterr().err


def test_a_secret_in_the_run_file_is_refused_on_any_storage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Door(tmp_path).write().train("env.AWS_SECRET_ACCESS_KEY=hush") == ExitCode.BAD_INPUT
    printed = capsys.readouterr().err
    assert "[env] holds AWS_SECRET_ACCESS_KEY" in printed
    assert "hush" not in printed


def test_a_damaged_file_of_a_run_is_named_and_weights_of_another_model_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    door = Door(tmp_path).write()
    assert door.train() == ExitCode.FINISHED
    assert door.train("run.name=branch", "init.from=tiny", "model.heads=4") == ExitCode.BAD_INPUT
    assert "model.heads = 2, here 4" in capsys.readouterr().err
    assert door.train("run.name=branch", "init.from=tiny", "model.dropout=0.1") == ExitCode.FINISHED
    (door.storage / "tiny" / "summary.json").write_text("{")
    assert door.train() == ExitCode.BAD_INPUT
    assert "summary.json is damaged" in capsys.readouterr().err


def test_a_range_of_workers_may_hold_no_size_that_the_batch_cannot_be_dealt_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    door = Door(tmp_path).write()
    assert door.train("parallel.workers=[1,3]", "batch.global_size=2") == ExitCode.BAD_INPUT
    assert (
        "parallel.workers = [1, 3] may come to 3 workers: 3 workers cannot share 2 row groups"
        in capsys.readouterr().err
    )


def test_data_changed_under_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    door = Door(tmp_path).write()
    assert door.train("train.max_hours=1e-9") == ExitCode.FINISHED
    door.text.write_text(door.text.read_text() + "epsilon\n")
    message = refused(door, capsys, "train.max_hours=1")
    assert f"The data of {door.storage / 'tiny'} has changed since the run started." in message
    assert "another run.name" in message
    assert "--fresh" in message


@pytest.mark.parametrize(
    ("storage", "says"),
    [
        ("text.txt/runs", "cannot be written: Not a directory. Choose another with --storage."),
        ("text.txt", "cannot be written: File exists. Choose another with --storage."),
    ],
)
def test_a_storage_that_cannot_be_written_is_refused(
    door: Door, capsys: pytest.CaptureFixture[str], storage: str, says: str
) -> None:
    assert says in refused(door, capsys, "--storage", storage)


def test_more_workers_than_the_machine_has_cores_says_what_it_has(
    door: Door, capsys: pytest.CaptureFixture[str]
) -> None:
    over = ("--fresh", "parallel.device=cpu", "parallel.cpus_per_worker=1", "parallel.workers=100000")
    message = refused(door, capsys, *over, launcher="ray")
    assert re.search(r"asks for 100000 workers, but there are (\d+) CPU cores on 1 node.*: at most \1\. Lower", message)
    assert not ray.is_initialized()


def test_more_workers_than_rows_is_refused(door: Door, capsys: pytest.CaptureFixture[str]) -> None:
    over = ("--fresh", "parallel.device=cpu", "parallel.workers=2", "batch.global_size=1")
    message = refused(door, capsys, *over, launcher="ray")
    assert "2 workers cannot share 1 row groups (batch.global_size = 1, 1 a group): use at most 1 workers" in message
    assert not ray.is_initialized()


def test_micro_times_accumulation_times_workers_is_shown(door: Door, capsys: pytest.CaptureFixture[str]) -> None:
    over = ("parallel.device=cpu", "parallel.workers=2", "batch.micro_size=2", "batch.accumulation=3")
    message = refused(door, capsys, "--fresh", *over, launcher="ray")
    assert "micro_size 2 x accumulation 3 x workers 2 = 12, but batch.global_size = 8." in message
    assert not ray.is_initialized()


def test_a_relative_storage_is_refused_before_a_cluster_is_joined(
    door: Door, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # nothing listens there: joining would fail, after a long time
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    message = refused(door, capsys, "--storage", "relative/runs", launcher="ray")
    assert "'relative/runs' is a relative path, and this run joins a cluster" in message
    assert "Give an absolute path that every node sees" in message
    assert not Path("relative").exists()


def test_torchrun_outside_torchrun_says_how_to_start_it(door: Door, capsys: pytest.CaptureFixture[str]) -> None:
    assert "start it as `torchrun --nproc-per-node N -m lwray train …`" in refused(door, capsys, launcher="torchrun")


def test_an_unreachable_mlflow_server_is_refused(
    door: Door, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    message = refused(door, capsys, "run.name=new", "tracking.enabled=true", "tracking.uri=http://127.0.0.1:9")
    assert "Cannot record the run in MLflow at http://127.0.0.1:9" in message
    assert "Set tracking.uri to a server that answers, or train without it: tracking.enabled=false." in message


def test_a_fresh_start_that_cannot_be_tracked_leaves_the_old_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    door = Door(tmp_path).write()
    assert door.train("train.steps=1") == ExitCode.FINISHED
    refused(door, capsys, "--fresh", "tracking.enabled=true", "tracking.uri=http://127.0.0.1:9")


@pytest.mark.parametrize("stray", ["nonsense", "--frsh"])
def test_a_stray_argument_is_refused(door: Door, capsys: pytest.CaptureFixture[str], stray: str) -> None:
    with pytest.raises(SystemExit) as ended:
        door.train(stray)
    assert ended.value.code == ExitCode.BAD_INPUT
    assert f"unrecognized arguments: {stray}" in capsys.readouterr().err


def test_the_process_ends_with_the_same_code_and_no_traceback(door: Door) -> None:
    command = [sys.executable, "-m", "lwray", "train", str(door.config), "optim.lrr=1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == ExitCode.BAD_INPUT
    assert ended.stdout == ""
    assert ended.stderr.count("\n") == 1
    assert "did you mean optim.lr?" in ended.stderr
