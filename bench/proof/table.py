"""What came of the claims, as a table for people and as a block in the documents."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import caption, fill, table

COLUMNS = ("run", "legs", "kills at (went on from)", "rows", "worst relative difference", "at step", "bound", "verdict")


@dataclass(frozen=True, slots=True)
class Row:
    """What came of one claim."""

    run: str
    kind: str
    against: str
    steps: int
    legs: list[str]
    kills: list[int]
    """The last step that was recorded when it was killed."""
    resumed: list[int]
    """The step from which it went on after each kill."""
    rows: int
    worst: float
    at: str
    bound: float | None
    """None where none is set: the run that others are compared with, a control."""
    tensors_differ: int
    """Of the final checkpoint, to the bit."""
    seconds: float
    failure: str
    """Empty where the claim holds."""

    def cells(self) -> tuple[str, ...]:
        """As the table shows it."""
        kills = ", ".join(f"{at} ({begun})" for at, begun in zip(self.kills, self.resumed, strict=False))
        bound = "-" if self.bound is None else f"{self.bound:.0e}" if self.bound else "0, weights too"
        holds = {"whole": "reference", "control": "control", "close": "holds", "bits": "holds"}[self.kind]
        return (
            self.run,
            legs_text(self.legs),
            kills or "-",
            f"{self.rows} of {self.steps}",
            f"{self.worst:.1e}" if self.worst else "0",
            self.at,
            bound,
            f"FAILS: {self.failure.splitlines()[0]}" if self.failure else holds,
        )


def legs_text(legs: Sequence[str]) -> str:
    """`4 ddp → 2 ddp → 1`; the same one several times as `3 × 2 ddp`."""
    alike = len(legs) > 1 and len(set(legs)) == 1
    return f"{len(legs)} × {legs[0]}" if alike else " → ".join(legs)


def block(results: dict[str, Any]) -> str:
    """The table of a results file, and what it was measured on."""
    rows = [Row(**row).cells() for row in results["rows"]]
    return f"{table(COLUMNS, rows)}\n\n{caption(results)}, seed {results['seed']}."


def write_docs(results: Path, docs: Path) -> None:
    """Put the table of a results file into the document."""
    fill(docs, "invariance", block(json.loads(results.read_text(encoding="utf-8"))))
