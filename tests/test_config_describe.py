"""The configuration as people and editors read it."""

from pathlib import Path

from lwray.config import load
from lwray.config.describe import json_schema, keys, keys_table, values_table


def test_every_key_is_described() -> None:
    rows = {row.key: row for row in keys()}
    assert all(row.why and row.type and row.kind in ("maths", "speed", "place") for row in rows.values())
    assert rows["optim.schedule"].type == "cosine | wsd | linear | onecycle | constant"
    assert rows["parallel.workers"].type == "integer | [integer, integer] | auto"
    assert rows["checkpoint.every_seconds"].type == "time such as 30min"
    assert (rows["eval.stop_below"].type, rows["eval.stop_below"].default) == ("number", "(not set)")
    assert rows["model.context"].unit == "tokens"
    assert rows["env"].kind == "place"


def test_the_table_of_keys_has_one_line_a_key() -> None:
    lines = keys_table().splitlines()
    assert len(lines) == len(keys())
    [line] = [line for line in lines if line.startswith("optim.lr = ")]
    assert line.split() == ["optim.lr", "=", "0.001", "number", "maths", "peak", "learning", "rate"]


def test_the_values_of_a_run_come_with_kind_and_origin(tmp_path: Path) -> None:
    path = tmp_path / "gpt.toml"
    path.write_text('[optim]\nlr = 0.5\n[train]\nsteps = "2ep"\n[env]\nA = "1"\n')
    lines = [" ".join(line.split()) for line in values_table(load(path, ["batch.global_size=8"])).splitlines()]
    assert f"optim.lr = 0.5 maths {path}" in lines
    assert f"train.steps = 2ep maths {path}" in lines
    assert "batch.global_size = 8 maths command line" in lines
    assert 'run.name = "gpt" place the file\'s name' in lines
    assert "run.seed = 0 maths default" in lines
    assert f'env.A = "1" place {path}' in lines


def test_the_schema_keeps_kind_and_unit_and_allows_what_the_loader_allows() -> None:
    sections = json_schema()["$defs"]
    lr = sections["OptimSection"]["properties"]["lr"]
    assert (lr["kind"], lr["exclusiveMinimum"]) == ("maths", 0)
    context = sections["ModelSection"]["properties"]["context"]
    assert context["unit"] == "tokens"
    assert {"type": "string"} in context["anyOf"]
    assert {"type": "string"} in sections["DataSection"]["properties"]["source"]["anyOf"]
    assert any(form.get("pattern") for form in sections["ParallelSection"]["properties"]["workers"]["anyOf"])
    assert sections["OptimSection"]["additionalProperties"] is False
