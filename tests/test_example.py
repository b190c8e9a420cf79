"""The example of a task of the user's own, and what the README promises."""

import csv
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from door import process_as_it_was

from lwray.cli import main
from lwray.config import Config, dotted
from lwray.tracking.journal import read_lines

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
FENCES = re.findall(r"^```\w*\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
COMMANDS = [
    line.partition("#")[0].strip()
    for fence in FENCES
    for line in fence.splitlines()
    if re.match(r"lwray (config|show|--help)\b", line.strip())
]


@pytest.fixture(autouse=True)
def as_a_user_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in the repository's root, in this process."""
    monkeypatch.chdir(REPOSITORY)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A noisy line in two columns; a third of the rows has no target."""
    path = tmp_path_factory.mktemp("table") / "table.csv"
    draw = random.Random(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["a", "b", "target"])
        for row in range(120):
            a, b = draw.gauss(0, 1), draw.gauss(0, 1)
            writer.writerow([a, b, "" if row % 3 == 0 else 2 * a - b + draw.gauss(0, 0.1)])
    return path


def train(storage: Path, *keys: str) -> int:
    fixed = ("--launcher", "inline", "--storage", str(storage), "tracking.enabled=false", "parallel.device=cpu")
    with process_as_it_was():
        return main(["train", "examples/my_task.toml", *fixed, *keys])


def series(storage: Path, name: str, field: str) -> list[float]:
    lines = read_lines(storage / name / "attempts" / "0001" / "metrics.jsonl")
    return [line[field] for line in lines if field in line]


def test_the_example_learns_the_users_table(tmp_path: Path, table: Path) -> None:
    assert train(tmp_path, f"task.options.csv={table}", "train.steps=60", "eval.every_steps=2") == 0
    losses = series(tmp_path, "my_task", "val_loss")
    assert len(losses) == 30
    # the targets' variance is 5, their noise 0.01
    assert losses[0] > 1
    assert losses[-1] < 0.1


def test_the_example_learns_the_table_that_it_makes(tmp_path: Path) -> None:
    assert train(tmp_path, "train.steps=100") == 0
    losses = series(tmp_path, "my_task", "val_loss")
    assert losses[-1] < losses[0]


def test_the_example_is_the_same_at_any_micro_batch(tmp_path: Path, table: Path) -> None:
    for micro in (1, 4, 32):
        keys = (f"task.options.csv={table}", f"run.name=micro-{micro}", f"batch.micro_size={micro}", "train.steps=12")
        assert train(tmp_path, *keys) == 0
    one, four, whole = (series(tmp_path, f"micro-{micro}", "loss") for micro in (1, 4, 32))
    assert len(one) == 12
    assert one == pytest.approx(four, rel=1e-5)
    assert one == pytest.approx(whole, rel=1e-5)


def test_a_row_without_a_target_counts_neither_in_the_loss_nor_in_its_mean(tmp_path: Path) -> None:
    """All rows are alike, so their mean is the same however many count; with the others in it, it would be smaller."""
    for name, every in (("all", 1), ("few", 3)):
        rows = [f"1,{3 if row % every == 0 else ''}" for row in range(60)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["x,y", *rows]) + "\n")
        keys = (f"task.options.csv={tmp_path}/{name}.csv", f"run.name={name}", "task.options.dropout=0.0")
        assert train(tmp_path, *keys, "train.steps=3") == 0
    for field in ("loss", "val_loss"):
        assert series(tmp_path, "all", field) == pytest.approx(series(tmp_path, "few", field), rel=1e-5)


def test_the_example_refuses_what_it_does_not_know(
    tmp_path: Path, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path, "task.options.widht=3") == 2
    assert "widht" in capsys.readouterr().err
    assert train(tmp_path, "task.options.csv=nowhere.csv") == 2
    assert "nowhere.csv" in capsys.readouterr().err


def test_a_run_is_bound_to_the_table_that_it_started_with(
    tmp_path: Path, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.csv"
    shutil.copy(table, own)
    keys = (f"task.options.csv={own}", "train.max_hours=1e-9")
    assert train(tmp_path, *keys) == 0
    own.write_text(own.read_text() + "1,1,1\n")
    assert train(tmp_path, f"task.options.csv={own}") == 2
    assert "has changed" in capsys.readouterr().err


def test_the_readme_shows_commands_that_this_file_runs() -> None:
    assert {shlex.split(command)[1] for command in COMMANDS} >= {"config", "show", "--help"}


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A storage with a short run that has the name of the README's."""
    storage = tmp_path_factory.mktemp("runs")
    keys = ("train.steps=2", "data.max_bytes=200KB", "batch.global_tokens=1024", "eval.rows=8", "run.name=quickstart")
    options = ("--launcher", "inline", "--storage", str(storage), "tracking.enabled=false")
    with process_as_it_was():
        assert main(["train", str(REPOSITORY / "configs/quickstart.toml"), *options, *keys]) == 0
    return storage


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_readme_runs(command: str, quickstart: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", *shlex.split(command)]
    # what a command draws must not land in the repository
    words = [str(tmp_path / word) if word.endswith((".png", ".svg")) else word for word in words]
    environment = os.environ | {"LWRAY_STORAGE": str(quickstart)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_every_key_that_the_readme_names_exists() -> None:
    known = {key for key, _ in dotted(Config())}
    sections = {key.partition(".")[0] for key in known}
    written = re.findall(r"(?<![\w./-])([a-z]+)\.([a-z_]+)\b(?![/(.])", README)
    named = {f"{section}.{name}" for section, name in written if section in sections}
    files = {"run.json", "run.png"}
    assert named - files, "the README names no key at all"
    assert named - files <= known


def test_every_link_and_test_that_the_documents_name_exists() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "tests").glob("test_*.py"))
    for page in (REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
        for name in re.findall(r"`(test_[a-z_0-9]+)`", text):
            assert f"def {name}(" in tests, f"{page.name}: {name}"
        for path in re.findall(r"`((?:lwray|tests|configs|examples|cluster)/[\w/.]+)`", text):
            assert (REPOSITORY / path).exists(), f"{page.name}: {path}"
