"""The commands beside a first `lwray train`: help, config, show, and what a second start does."""

import gc
import json
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from door import Door, contents, copy_of_trained, fresh_door, own_process, trained_run  # noqa: F401
from mlflow.tracking import MlflowClient

from lwray import __version__
from lwray.cli import main, parse
from lwray.config import Config, dotted
from lwray.errors import ExitCode
from lwray.tracking.mlflow_run import default_uri
from lwray.tracking.rundir import Identity, RunDir

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.toml"
COMMANDS = ("train", "prepare", "config", "show", "export", "submit", "ls", "logs", "stop")


def attempts(door: Door, run: str = "tiny") -> list[str]:
    return sorted(path.name for path in (door.storage / run / "attempts").iterdir())


def summary(door: Door, run: str = "tiny") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((door.storage / run / "summary.json").read_text())
    return found


def mlflow_run(door: Door, run: str = "tiny") -> tuple[MlflowClient, Any]:
    client = MlflowClient(f"sqlite:///{door.storage / 'mlflow.db'}")
    return client, client.get_run(summary(door, run)["mlflow_run_id"])


# help and version


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)], ids=["lwray", *COMMANDS])
def test_help_names_every_command_and_ends_well(capsys: pytest.CaptureFixture[str], command: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in (command or COMMANDS))


def test_the_process_prints_its_version() -> None:
    ended = subprocess.run([sys.executable, "-m", "lwray", "--version"], capture_output=True, text=True, check=True)
    assert ended.stdout == f"lwray {__version__}\n"


# lwray config


def test_config_keys_lists_every_key_of_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--keys"]) == 0
    listed = [line.split(" = ")[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == [key for key, _ in dotted(Config())]


@pytest.fixture
def schema(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["config", "--schema"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(found)
    return found


def test_the_schema_takes_run_files(schema: dict[str, Any], trained: Path) -> None:
    resolved = trained / "runs/tiny/attempts/0001/config.toml"
    for file in (QUICKSTART, trained / "tiny.toml", resolved):
        jsonschema.validate(tomllib.loads(file.read_text()), schema)


@pytest.mark.parametrize("text", ["[optim]\nlrr = 1", "[optm]\nlr = 1", "[optim]\nlr = 'fast'", "optim = 1"])
def test_the_schema_refuses_what_load_refuses(schema: dict[str, Any], text: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tomllib.loads(text), schema)


def test_config_shows_value_kind_and_origin(fresh: Door, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", str(fresh.config), "optim.lr=1e-4"]) == 0
    rows = {line.split(" = ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert rows["optim.lr"].split() == ["optim.lr", "=", "0.0001", "maths", "command", "line"]
    assert rows["model.width"].split() == ["model.width", "=", "32", "maths", str(fresh.config)]
    assert rows["parallel.workers"].split() == ["parallel.workers", "=", '"auto"', "speed", "default"]
    assert rows["run.name"].split(maxsplit=4)[2:] == ['"tiny"', "place", "the file's name"]
    assert not fresh.storage.exists()


def test_config_alone_says_what_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == ExitCode.BAD_INPUT
    assert capsys.readouterr().err == "lwray: Give a run file, or --keys, or --schema.\n"


# lwray show


def test_show_prints_attempts_and_checkpoints(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["show", str(trained / "runs/tiny")]) == 0
    printed = capsys.readouterr().out
    assert "tiny: 6 steps, last loss" in printed
    newest = next(line for line in printed.splitlines() if line.startswith("step-00000006-0002"))
    assert "none on 1 worker" in newest
    assert newest.rstrip().endswith("not verified")
    assert "step-00000002-0001" in printed


def show(door: Door, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    """Exit code, output and errors of `lwray show` on the run."""
    capsys.readouterr()
    code = main(["show", str(door.storage / "tiny"), *options])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def checkpoints(door: Door, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, dict[str, Any]]:
    """What `lwray show --json` says of each, by name."""
    _, out, _ = show(door, capsys, "--json", *options)
    return {row["name"]: row for row in json.loads(out)["checkpoints"]}


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


OLDER, NEWEST = "step-00000002-0001", "step-00000006-0002"


def test_show_verify_names_a_checkpoint_with_one_wrong_byte(
    door: Door, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    code, printed, error = show(door, capsys, "--verify")
    assert (code, error) == (ExitCode.FINISHED, "")
    assert printed.count(" whole") == 2
    (file,) = (door.storage / "tiny/checkpoints" / NEWEST).glob("*.safetensors")
    flip(file, -1)
    code, printed, error = show(door, capsys, "--verify")
    assert code == ExitCode.FAILED
    assert f"{NEWEST}: {file.name} is corrupt: its checksum differs" in printed
    assert printed.count(" whole") == 1
    assert error.startswith(f"lwray: Damaged: {NEWEST}. ")
    # without it, no tensor is read
    assert show(door, capsys)[0] == ExitCode.FINISHED


def test_show_verify_lists_every_damaged_checkpoint_as_json_too(door: Door, capsys: pytest.CaptureFixture[str]) -> None:
    directories = [door.storage / "tiny/checkpoints" / name for name in (OLDER, NEWEST)]
    flip(directories[0] / "manifest.json", 100)
    (file,) = directories[1].glob("*.safetensors")
    file.unlink()
    code, printed, error = show(door, capsys, "--json", "--verify")
    assert code == ExitCode.FAILED
    assert f"Damaged: {OLDER}, {NEWEST}." in error
    rows = {row["name"]: (row["health"], row["reason"]) for row in json.loads(printed)["checkpoints"]}
    assert rows[OLDER][0] == "manifest unreadable"
    assert rows[NEWEST] == ("damaged", f"{file.name} is missing")
    assert show(door, capsys, "--json")[0] == ExitCode.FINISHED


def test_show_json_has_what_the_table_has(door: Door, capsys: pytest.CaptureFixture[str]) -> None:
    rows = checkpoints(door, capsys, "--verify")
    assert list(rows) == [OLDER, NEWEST]
    newest = rows[NEWEST]
    # evaluated at its end, where the hours ran out it was not
    assert newest.pop("val_loss") == pytest.approx(summary(door)["val_loss"])
    assert rows[OLDER]["val_loss"] is None
    assert abs(newest.pop("time") - time.time()) < 600
    manifest = door.storage / "tiny/checkpoints" / NEWEST / "manifest.json"
    assert newest == {
        "name": NEWEST,
        "step": 6,
        "attempt": 2,
        "health": "whole",
        "reason": None,
        "bytes": json.loads(manifest.read_text())["bytes"],
        "backend": "none",
        "workers": 1,
        "cause": "final",
    }


def test_a_checkpoint_that_was_never_finished_is_no_damage_and_the_next_attempt_gives_it_up(
    fresh: Door, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fresh.train("train.max_hours=1e-9") == ExitCode.FINISHED
    unfinished = fresh.storage / "tiny/checkpoints/step-00000003-0001"
    unfinished.mkdir()
    (unfinished / "rank-00000-00000000.safetensors").write_bytes(b"half")
    assert show(fresh, capsys, "--verify")[0] == ExitCode.FINISHED
    assert checkpoints(fresh, capsys)[unfinished.name]["health"] == "unfinished"
    assert fresh.train("train.max_hours=1") == ExitCode.FINISHED
    assert show(fresh, capsys, "--verify")[0] == ExitCode.FINISHED
    row = checkpoints(fresh, capsys, "--verify")[unfinished.name]
    assert (row["health"], row["step"], row["attempt"]) == ("given up", 3, 1)
    assert row["reason"] == "it was never finished; attempt 2 has given it up"


def test_show_verify_is_of_the_overview_alone(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(trained / "runs/tiny"), "--metrics", "--verify"]) == ExitCode.BAD_INPUT
    assert "--verify is of the overview and --json" in capsys.readouterr().err


def test_show_loads_nothing_heavy(trained: Path) -> None:
    code = (
        "import sys, lwray.cli; lwray.cli.main(['show', sys.argv[1], '--verify']);"
        "print(*{'torch', 'ray', 'mlflow', 'numpy', 'fsspec'} & set(sys.modules), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, str(trained / "runs/tiny")]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stderr.split() == []


def test_show_finds_a_run_by_name_in_the_storage(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LWRAY_STORAGE", str(trained / "runs"))
    assert main(["show", "tiny", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["steps"] == 6
    assert [row["cause"] for row in data["attempts"]] == ["max_hours", "finished"]
    assert data["summary"]["cause"] == "finished"


@pytest.mark.parametrize("what", ["--metrics", "--ids"])
def test_show_merges_the_attempts_each_step_once(trained: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    assert main(["show", str(trained / "runs/tiny"), what]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["step"] for line in lines] == list(range(6))
    assert all(("loss" in line) if what == "--metrics" else (len(line["ids"]) == 8) for line in lines)


def test_show_merges_the_ledger_in_the_order_of_events(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(trained / "runs/tiny"), "--ledger"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(event["attempt"], event["event"]) for event in events] == [
        (1, "started"),
        (1, "checkpoint"),
        (1, "finished"),
        (2, "resumed"),
        (2, "checkpoint"),
        (2, "finished"),
    ]
    assert events[3]["from_step"] == 2


def test_show_plots_a_picture(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "run.png"
    assert main(["show", str(trained / "runs/tiny"), "--plot", str(picture)]) == 0
    assert capsys.readouterr().out == f"{picture}\n"
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")


def test_an_unknown_run_lists_those_there_are(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LWRAY_STORAGE", str(trained / "runs"))
    assert main(["show", "tinny"]) == ExitCode.BAD_INPUT
    assert f"There is no run tinny: the runs in {trained / 'runs'} are tiny." in capsys.readouterr().err


# lwray train


def test_the_backend_that_was_chosen_is_said_and_not_the_one_asked_for(
    fresh: Door, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fresh.train("parallel.backend=zero2") == ExitCode.FINISHED
    printed = capsys.readouterr().out
    assert printed.count("The workers train on backend none.") == 1
    assert "zero2" not in printed


# lwray train, again


def test_a_finished_run_says_so_and_starts_nothing(
    door: Door, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert door.train() == ExitCode.FINISHED
    before = contents(door.storage)
    capsys.readouterr()
    assert door.train() == ExitCode.FINISHED
    printed = capsys.readouterr().out
    assert "tiny had already finished: finished after 6 steps." in printed
    assert str(door.storage / "tiny") in printed
    assert contents(door.storage) == before
    assert attempts(door) == ["0001", "0002"]


def test_a_narrow_terminal_shows_the_whole_path(
    door: Door, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert door.train() == ExitCode.FINISHED
    printed = capsys.readouterr().out
    assert str(door.storage / "tiny") in printed.replace("\n", "").replace(" ", "")


def test_fresh_sets_the_old_run_aside(door: Door) -> None:
    old = contents(door.storage / "tiny")
    assert door.train("--fresh", "optim.lr=3e-4") == ExitCode.FINISHED
    aside = [path for path in door.storage.iterdir() if path.name.startswith("tiny.old-")]
    assert len(aside) == 1
    assert contents(aside[0]) == old
    # the numbers go on, so that a driver of the old run which still lives knows that it has lost the name
    assert attempts(door) == ["0003"]
    assert summary(door)["attempts"] == 1


def test_overrides_stand_before_between_and_after_the_options(fresh: Door) -> None:
    command = ["train", str(fresh.config), "optim.lr=2e-3", "--launcher", "inline", "train.steps=2"]
    assert main([*command, "--storage", str(fresh.storage), "run.name=mixed"]) == ExitCode.FINISHED
    kept = tomllib.loads((fresh.storage / "mixed/attempts/0001/config.toml").read_text())
    assert kept["optim"]["lr"] == 2e-3
    assert kept["train"]["steps"] in (2, "2")


def test_storage_is_the_option_over_the_environment_over_the_file(fresh: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    named = {name: fresh.root / name for name in ("option", "environment", "file")}
    in_file = ["train", str(fresh.config), "--launcher", "inline", "train.steps=1", f"run.storage={named['file']}"]
    assert main(in_file) == ExitCode.FINISHED
    monkeypatch.setenv("LWRAY_STORAGE", str(named["environment"]))
    assert main(in_file) == ExitCode.FINISHED
    assert main([*in_file, "--storage", str(named["option"])]) == ExitCode.FINISHED
    for storage in named.values():
        assert [path.name for path in (storage / "tiny/attempts").iterdir()] == ["0001"]


def test_a_diverging_run_fails_with_its_step_and_the_record_says_failed(
    fresh: Door, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fresh.train("optim.lr=1e9", "optim.clip=0", "tracking.enabled=true") == ExitCode.FAILED
    gc.collect()
    assert "lwray: The loss of step 1 is nan, its gradient norm nan: training has diverged" in capsys.readouterr().err
    assert summary(fresh)["cause"] == "failed"
    assert "training has diverged" in summary(fresh)["error"]
    assert mlflow_run(fresh)[1].info.status == "FAILED"


def test_a_run_that_diverges_between_logged_steps_fails_too(fresh: Door) -> None:
    assert fresh.train("optim.lr=1e9", "optim.clip=0", "train.log_every=100") == ExitCode.FAILED


def test_two_attempts_are_one_mlflow_run_with_a_point_a_step(fresh: Door) -> None:
    assert fresh.train("tracking.enabled=true", "train.max_hours=1e-9") == ExitCode.FINISHED
    first = summary(fresh)
    assert first["cause"] == "max_hours"
    assert fresh.train("tracking.enabled=true", "train.max_hours=1") == ExitCode.FINISHED
    client, run = mlflow_run(fresh)
    assert run.info.run_id == first["mlflow_run_id"]
    assert run.info.status == "FINISHED"
    for metric in ("train/loss", "optim/lr"):
        assert [point.step for point in client.get_metric_history(run.info.run_id, metric)] == list(range(6))
    assert run.data.params["model.width"] == "32"
    runs = client.search_runs([run.info.experiment_id])
    assert [each.info.run_id for each in runs] == [run.info.run_id]


@pytest.mark.parametrize(
    "words",
    [
        ["train", "run.toml", "--fresh", "optim.lr=1", "--launcher", "inline", "run.seed=2"],
        ["train", "optim.lr=1", "run.toml", "--fresh", "run.seed=2", "--launcher=inline"],
        ["train", "--launcher=inline", "--fresh", "optim.lr=1", "run.seed=2", "run.toml"],
    ],
)
def test_overrides_may_stand_anywhere(words: list[str]) -> None:
    arguments = parse(words)
    assert arguments.config == Path("run.toml")
    assert arguments.overrides == ["optim.lr=1", "run.seed=2"]
    assert arguments.fresh


def test_prepare_takes_its_keys_after_the_options_too() -> None:
    arguments = parse(["prepare", "corpus/*.jsonl.gz", "--out", "/x", "data.vocab_size=32K"])
    assert arguments.source == ["corpus/*.jsonl.gz", "data.vocab_size=32K"]


def test_points_that_a_killed_driver_had_no_time_to_record_are_there_after_the_next_start(fresh: Door) -> None:
    assert fresh.train("tracking.enabled=true", "train.max_hours=1e-9") == ExitCode.FINISHED
    run = RunDir(fresh.storage / "tiny")
    with run.attempts_in_order()[0].metrics.open("a") as metrics:
        for step in (2, 3):
            metrics.write(json.dumps({"step": step, "loss": 5.0, "lr": 1e-3}) + "\n")
    assert fresh.train("tracking.enabled=true") == ExitCode.FINISHED
    client = MlflowClient(default_uri(fresh.storage))
    points = client.get_metric_history(Identity.read(run.identity).mlflow_run_id, "train/loss")
    assert sorted(point.step for point in points) == list(range(6))
    assert [point.value for point in points if point.step == 3] == [5.0]
