"""A task that breaks a law, or a number that stops being one, ends a run with the reason and commits nothing of it."""

import sys
from pathlib import Path

import pytest

from lwray.cli import main
from lwray.errors import ExitCode
from lwray.tracking.rundir import RunDir

TASKS = Path(__file__).parent / "tasks"


@pytest.fixture(autouse=True)
def toy_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """`broken.py` derives its tasks from the toy; a run's copy of the file finds it by this name."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("tests_toy", TASKS / "toy.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "tests_toy", module)
    spec.loader.exec_module(module)


def train(storage: Path, task: str, *keys: str) -> int:
    file = storage / "broken.toml"
    file.touch()
    defaults = ("batch.global_size=12", "train.steps=10", "tracking.enabled=false", "checkpoint.every_steps=1")
    options = ("--launcher=inline", f"--storage={storage}", f"task.name={TASKS / 'broken.py'}:{task}")
    return main(["train", str(file), *options, *defaults, *keys])


@pytest.mark.parametrize(
    ("task", "keys", "says"),
    [
        ("BatchStatistics", (), "BatchNorm1d: its statistics depend on how the batch is dealt"),
        ("NoRows", (), "no training rows"),
        ("Toy2", (), "no class Toy2"),
        ("Unfinished", (), "must define losses, model"),
        ("DrawsByHistory", ("eval.patience=2",), "could never act: eval.every_steps is 0"),
        ("DrawsByHistory", ("parallel.backend=none", "run.seed=9223372036854775808"), "run.seed"),
    ],
)
def test_what_breaks_a_law_is_refused_before_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str, keys: tuple[str, ...], says: str
) -> None:
    assert train(tmp_path, task, *keys) == ExitCode.BAD_INPUT
    assert says in capsys.readouterr().err
    assert not (tmp_path / "broken").exists()


def test_a_loss_that_draws_from_a_generators_history_is_refused_with_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path, "DrawsByHistory") == ExitCode.FAILED
    assert "nn.Dropout instead of F.dropout" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("Squeezed", "losses()['fit'] has shape [1, 1]; it must be [1] (by row)"),
        ("LosesATerm", "losses() differs in sign"),
        ("WeighsAnotherTerm", "weights() differs in cee"),
    ],
)
def test_a_loss_of_the_wrong_shape_or_terms_is_refused_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str, says: str
) -> None:
    assert train(tmp_path, task) == ExitCode.FAILED
    assert says in capsys.readouterr().err


def test_a_gradient_that_is_no_number_commits_nothing_though_the_loss_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path, "InfiniteGradient", "checkpoint.asynchronous=false") == ExitCode.FAILED
    assert "its gradient norm" in capsys.readouterr().err
    # the first pass finds out what the loss reaches, so the fourth is the third step
    assert max(path.name for path in RunDir(tmp_path / "broken").checkpoints.iterdir()) == "step-00000002-0001"


def test_held_out_rows_without_a_weight_are_no_validation_loss_of_zero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path, "NothingHeldOutCounts") == ExitCode.FAILED
    assert "no weight in any term" in capsys.readouterr().err
