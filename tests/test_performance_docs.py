"""The documents show what the benches recorded, and nothing typed by hand."""

import json
from pathlib import Path

import checkpoint
from figures import fill


def test_what_a_checkpoint_costs_is_recorded_and_its_bounds_hold(tmp_path: Path) -> None:
    results = json.loads(checkpoint.RESULT.read_text())
    assert [row["figure"] for row in results["rows"] if row["held"] is not None] == [
        "stall, s",
        "that / no save under way",
    ]
    assert all(row["held"] is not False for row in results["rows"])
    copy = tmp_path / "performance.md"
    copy.write_text(checkpoint.DOCS.read_text().replace("| holds", "| typed by hand"))
    fill(copy, "checkpoint", checkpoint.block(results))
    assert copy.read_text() == checkpoint.DOCS.read_text()
