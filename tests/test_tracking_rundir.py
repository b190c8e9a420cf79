"""Where a run's files lie, and what makes it the same run."""

import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lwray.config import load
from lwray.tracking.rundir import (
    Attempt,
    Identity,
    RunDir,
    config_toml,
    differing,
    env_record,
    maths_of,
    read_json,
    set_aside,
    write_json,
)

RUN_FILE = """
[run]
seed = 3
[task]
name = "my_task.py:MyTask"
options = { depth = 2, "odd key" = "é\\"'", nested = { a = [1, 2] } }
[data]
source = ["a # b.txt", "c\\td"]
[optim]
warmup_steps = 0.0333333333333
eps = 1e-12
[train]
steps = "1.7ep"
[checkpoint]
every_seconds = "90s"
[parallel]
workers = "2-8"
[env]
TOKENIZERS_PARALLELISM = "false"
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "my run.toml"
    path.write_text(RUN_FILE)
    return path


def test_attempts_are_numbered_after_the_largest(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "gpt")
    assert run.attempts_in_order() == []
    assert run.new_attempt().path == tmp_path / "gpt" / "attempts" / "0001"
    (run.attempts / "0011").mkdir()
    assert run.new_attempt().number == 12
    assert [attempt.number for attempt in run.attempts_in_order()] == [1, 11, 12]


def test_drivers_that_start_together_get_different_attempts(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "gpt")
    made: list[Attempt] = []
    threads = [threading.Thread(target=lambda: made.append(run.new_attempt())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(attempt.number for attempt in made) == list(range(1, 9))


def test_an_attempt_can_be_handed_to_a_worker(tmp_path: Path) -> None:
    attempt = RunDir(tmp_path).new_attempt()
    assert pickle.loads(pickle.dumps(attempt)) == attempt


def test_json_is_written_whole_and_leaves_no_draft(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": 1})
    write_json(tmp_path / "a.json", {"x": [1.5, None]})
    assert read_json(tmp_path / "a.json") == {"x": [1.5, None]}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_the_resolved_configuration_loads_again_to_the_same(run_file: Path, tmp_path: Path) -> None:
    resolved = load(run_file, ["run.name=again", "optim.betas=[0.9, 0.99]", "model.context=1K"])
    written = config_toml(resolved)
    copy = tmp_path / "config.toml"
    copy.write_text(written)
    assert load(copy).config == resolved.config


def test_the_resolved_configuration_says_where_each_value_comes_from(run_file: Path) -> None:
    written = config_toml(load(run_file, ["run.name=again", "model.layers=2"])).splitlines()
    by_key = {line.split(" = ")[0]: line for line in written}
    assert by_key["layers"].endswith("# command line (maths)")
    assert by_key["seed"].endswith(f"# {run_file} (maths)")
    assert by_key["keep"].endswith("# default (place)")
    assert any(line.startswith("# stop_below is not set") for line in written)


def test_a_file_name_with_a_line_break_stays_within_its_comment(tmp_path: Path) -> None:
    path = tmp_path / "a\nb.toml"
    path.write_text("[run]\nname = 'x'\n")
    copy = tmp_path / "copy.toml"
    copy.write_text(config_toml(load(path)))
    assert load(copy).config == load(path).config


def test_identity_holds_the_maths_keys_only_and_survives_the_disk(run_file: Path, tmp_path: Path) -> None:
    config = load(run_file, ["run.name=a"]).config
    identity = Identity(maths_of(config), "f00d", None, 12.5)
    assert identity.maths["run.seed"] == 3
    assert identity.maths["train.steps"] == "1.7ep"
    assert "parallel.workers" not in identity.maths
    assert "env" not in identity.maths
    identity.write(tmp_path / "run.json")
    assert Identity.read(tmp_path / "run.json") == identity


def test_only_a_changed_maths_key_makes_it_another_run(run_file: Path) -> None:
    old = maths_of(load(run_file, ["run.name=a"]).config)
    assert differing(old, maths_of(load(run_file, ["run.name=a", "parallel.workers=1"]).config)) == []
    new = maths_of(load(run_file, ["run.name=a", "optim.lr=0.5"]).config)
    assert differing(old, new) == [("optim.lr", 0.001, 0.5)]
    assert differing({}, {"a": 1}) == [("a", None, 1)]


def test_the_environment_is_recorded_without_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "hunter2")
    record = env_record(["lwray", "train", "my run.toml"])
    assert record["command"] == "lwray train 'my run.toml'"
    assert record["packages"]["torch"]
    assert "hunter2" not in str(record)


def test_the_commit_is_recorded_in_a_repository_and_absent_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    assert "git" not in env_record([])
    author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run(["git", *author, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    record = env_record([])["git"]
    assert len(record["commit"]) == 40
    assert record["changed"] is False


def test_a_run_set_aside_frees_its_name(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "gpt")
    run.new_attempt()
    aside = set_aside(run.root)
    assert aside.name.startswith("gpt.old-2")
    assert not run.root.exists()
    assert RunDir(aside).attempts_in_order()[0].number == 1


def test_the_engine_can_import_the_journal_without_heavy_packages() -> None:
    check = (
        "import sys, lwray.tracking.journal, lwray.config.describe;"
        "heavy = {'ray', 'mlflow', 'torch', 'rich', 'matplotlib'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", check], check=True)
