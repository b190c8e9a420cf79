"""From run file, site file and command line to one Config; what is wrong in them is said."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lwray.config import Config, Length, load
from lwray.config.units import parse_bytes, parse_count, parse_length, parse_seconds
from lwray.errors import UserError


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "gpt.toml"
    path.write_text('[optim]\nlr = 0.5\n[task]\noptions = { depth = 1, width = 2 }\n[env]\nA = "1"\n')
    return path


def _config(path: Path, *overrides: str) -> Config:
    return load(path, overrides).config


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_the_command_line_lies_over_the_site_file_over_the_run_file(run_file: Path, tmp_path: Path) -> None:
    site = _written(tmp_path / "site.toml", '[parallel]\nworkers = 4\n[tracking]\nuri = "x"\n[env]\nB = "2"\n')
    resolved = load(run_file, ["parallel.workers=2"], site)
    config, origins = resolved.config, resolved.origins
    assert (config.parallel.workers, config.tracking.uri, config.optim.lr) == (2, "x", 0.5)
    assert config.env == {"A": "1", "B": "2"}
    assert origins["parallel.workers"] == "command line"
    assert origins["tracking.uri"] == str(site)
    assert origins["optim.lr"] == str(run_file)
    assert "run.seed" not in origins


def test_a_site_file_may_not_change_the_mathematics(run_file: Path, tmp_path: Path) -> None:
    site = _written(tmp_path / "site.toml", "[parallel]\nworkers = 4\n[optim]\nlr = 0.1\n")
    with pytest.raises(UserError, match=r"site\.toml .*optim\.lr would change its mathematics"):
        load(run_file, (), site)


@pytest.mark.parametrize("override", [(), ("run.name=",), ('run.name=""',)])
def test_a_run_without_a_name_is_called_after_its_file(run_file: Path, override: tuple[str, ...]) -> None:
    assert _config(run_file, *override).run.name == "gpt"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optim.lrr=1", r"command line: unknown key optim\.lrr; did you mean optim\.lr\?"),
        ("optim.seed=1", r"unknown key optim\.seed; did you mean run\.seed\?"),
        ("model.n_layers=1", r"did you mean model\.layers\?"),
        ("optim.zzz=1", r"unknown key optim\.zzz\. `lwray"),
        ("optm.lr=1", r"unknown section \[optm\]; did you mean optim\?"),
        ("optim.lr=fast", r"command line: optim\.lr: .*valid number.*peak learning rate"),
        ("optim.lr=0", r"optim\.lr: .*greater than 0"),
        ("optim.schedule=cosin", r"optim\.schedule: .*'cosine', 'wsd'"),
        ("model.context=1.5", r"model\.context: 1\.5 is not a whole number .*in tokens"),
        ("checkpoint.every_seconds=5parsec", r"unknown unit 'parsec' in '5parsec'; known units: ms, s"),
        ("data.max_bytes=7GBit", r"unknown unit 'GBit'"),
        ("train.steps=5%", r"train\.steps: give steps \(1000\) or epochs"),
        ("train.steps=inf", r"train\.steps: .*not a finite number"),
        ("optim.warmup_steps=150%", r"more than the whole run"),
        ("optim.warmup_steps=-5", r"less than nothing"),
        ("parallel.workers=8-2", r"min no larger than max"),
        ("parallel.workers=0", r"at least one worker"),
        ("parallel.workers=two", r"neither a number, a range such as 2-8, nor auto"),
        ("run.name=../x", r"run\.name: .*pattern"),
        ("lr=1", r"'lr=1' is not section\.key=value"),
        ("optim.lr", r"is not section\.key=value"),
    ],
)
def test_a_wrong_override_is_named(run_file: Path, override: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load(run_file, [override])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[optim]\nlearning_rate = 1\n", r"bad\.toml: unknown key optim\.learning_rate"),
        ("[optimizer]\nlr = 1\n", r"unknown section \[optimizer\]; did you mean optim\?"),
        ("optim = 3\n", r"\[optim\] is a section"),
        ("[optim\n", r"bad\.toml is not valid TOML"),
        ("[env]\nA = 1\n", r"bad\.toml: env\.A: .*valid string"),
        ("[batch]\nglobal_size = true\n", r"batch\.global_size: true and false are no value"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load(_written(tmp_path / "bad.toml", text))


def test_a_missing_file_and_a_directory_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no configuration file .*nowhere\.toml"):
        load(tmp_path / "nowhere.toml")
    with pytest.raises(UserError, match="Cannot read"):
        load(tmp_path)


def test_all_mistakes_are_told_at_once(run_file: Path) -> None:
    with pytest.raises(UserError) as caught:
        load(run_file, ["optim.lr=-1", "model.layers=0"])
    assert len(str(caught.value).splitlines()) == 2


def test_text_on_the_command_line_needs_no_quotes(run_file: Path) -> None:
    config = _config(
        run_file,
        "run.name=2024",
        "tracking.experiment=1.5",
        "env.THREADS=1",
        "env.B=true",
        "data.source=a.txt",
    )
    assert (config.run.name, config.tracking.experiment) == ("2024", "1.5")
    assert config.env == {"A": "1", "THREADS": "1", "B": "true"}
    assert config.data.source == ["a.txt"]
    assert _config(run_file, 'data.source=["a", "b"]', 'run.name="x"').data.source == ["a", "b"]
    assert _config(run_file, "data.source=2024").data.source == ["2024"]


def test_one_option_of_a_task_can_be_changed_alone(run_file: Path) -> None:
    assert _config(run_file, "task.options.depth=7").task.options == {"depth": 7, "width": 2}
    assert _config(run_file, "task.options={name = 'x'}").task.options["width"] == 2


@pytest.mark.parametrize(
    ("value", "workers"), [("2-8", (2, 8)), ("[2, 8]", (2, 8)), ("3", 3), ('"3"', 3), ("auto", "auto")]
)
def test_workers_are_a_number_a_range_or_auto(run_file: Path, value: str, workers: object) -> None:
    assert _config(run_file, f"parallel.workers={value}").parallel.workers == workers


def test_quantities_are_written_as_people_write_them() -> None:
    assert (parse_seconds("30min"), parse_seconds("1.5 h"), parse_seconds(90)) == (1800.0, 5400.0, 90.0)
    assert (parse_bytes("72GB"), parse_bytes("1.5GiB"), parse_bytes(8)) == (72 * 10**9, 3 * 2**29, 8)
    assert (parse_count("1.5M"), parse_count("1_000"), parse_count("1e3")) == (1_500_000, 1000, 1000)
    assert (parse_length("2ep"), parse_length("5%")) == (Length(2, "ep"), Length(0.05, "share"))
    assert (parse_length("10K"), parse_length("10 steps")) == (Length(10_000, "steps"), Length(10, "steps"))


@pytest.mark.parametrize("text", ["1.2.3", "", "-5", "1e400", "9" * 400, "1.0005K", "ten"])
def test_what_is_no_quantity_is_a_value_error(text: str) -> None:
    for parse in (parse_count, parse_length):
        with pytest.raises(ValueError):
            parse(text)


@given(st.integers(0, 10**9))
def test_decimal_counts_are_exact(thousandths: int) -> None:
    assert parse_count(f"{thousandths // 1000}.{thousandths % 1000:03d}K") == thousandths


@given(st.sampled_from(["ep", "share"]), st.floats(1e-9, 1.0))
def test_a_length_reads_back_as_it_was_written(unit: str, amount: float) -> None:
    assert parse_length(str(Length(amount, unit))) == Length(amount, unit)


def test_a_length_becomes_steps() -> None:
    assert parse_length("10K").steps() == 10_000
    assert parse_length("2ep").steps(rows=10, batch_rows=8) == 3
    assert parse_length("5%").steps(total_steps=1000) == 50
