"""How far one run is from another: rows, losses and final weights, from their run directories."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from lwray.checkpoint.find import pick
from lwray.checkpoint.read import Reader
from lwray.store import open_store
from lwray.tracking.journal import Line, merged_ids, merged_metrics, read_lines
from lwray.tracking.rundir import RunDir
from proof.legs import Leg

FIELDS = {"loss": "", "val_loss": " (val)"}
"""The losses that are compared, and how their steps are marked."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Between a run and the one it is compared with; rows and losses also of steps that a kill undid."""

    rows: int
    """Steps in which both fed the model the same rows, each time."""
    missing: tuple[str, ...]
    """Steps and evaluations whose loss is not recorded."""
    worst: float
    """Largest relative difference of a training or validation loss."""
    at: str
    """Where: a step, `(val)` for the evaluation after it."""
    tensors: tuple[str, ...]
    """Tensors of the final checkpoint (weights, moments) that are not the same to the bit."""


def difference(run: RunDir, other: RunDir, steps: int) -> Difference:
    """`run` of `steps` steps against `other`, which must be whole: one attempt from the first step to the end."""
    known, merged = losses(merged_metrics(other)), losses(merged_metrics(run))
    wanted = known.keys() | {str(step) for step in range(steps)}
    worst, at = 0.0, "-"
    # not merged: what was run again after a kill has to agree both times
    for attempt in run.attempts_in_order():
        for step, loss in losses(read_lines(attempt.metrics)).items():
            relative = relative_difference(loss, known.get(step))
            if relative > worst:
                worst, at = relative, step
    return Difference(
        rows=same_rows(run, other),
        missing=tuple(sorted(wanted - merged.keys())),
        worst=worst,
        at=at,
        tensors=tuple(differing_tensors(run, other)),
    )


def losses(lines: list[Line]) -> dict[str, float]:
    """Training losses by step, validation losses by `STEP (val)`."""
    return {f"{line['step']}{mark}": line[field] for line in lines for field, mark in FIELDS.items() if field in line}


def same_rows(run: RunDir, other: RunDir) -> int:
    """The steps in which every attempt of `run` that came so far fed the rows that `other` did."""
    expected = {line["step"]: line["ids"] for line in merged_ids(other)}
    fed = [line for attempt in run.attempts_in_order() for line in read_lines(attempt.ids)]
    wrong = {line["step"] for line in fed if line["ids"] != expected.get(line["step"])}
    return len({line["step"] for line in fed} - wrong)


def relative_difference(loss: float, expected: float | None) -> float:
    """Infinite where there is nothing to compare with, or a loss is no number."""
    if expected is None:
        return math.inf
    relative = abs(loss - expected) / abs(expected)
    return math.inf if math.isnan(relative) else relative


def differing_tensors(run: RunDir, other: RunDir) -> Iterator[str]:
    """Names of the newest checkpoints' tensors that are missing on one side or differ in any bit."""
    found, expected = newest_tensors(run.checkpoints), newest_tensors(other.checkpoints)
    for key in sorted(found.keys() | expected.keys()):
        if key not in found or key not in expected or not same_bits(found[key], expected[key]):
            yield key


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()


def newest_tensors(checkpoints: Path) -> dict[str, Tensor]:
    """Every tensor of the newest checkpoint, by `kind/name`."""
    store = open_store(str(checkpoints))
    reader = Reader(store, pick(store, "newest"))
    return {key: reader.whole(key) for key in reader.manifest.tensors}


@dataclass(frozen=True, slots=True)
class Start:
    """A start of a run as its ledger tells it."""

    workers: int
    backend: str
    from_step: int
    """0 for a start from nothing."""


def starts(run: RunDir) -> list[Start]:
    """Every time that workers began, in order."""
    events = [event for attempt in run.attempts_in_order() for event in read_lines(attempt.ledger)]
    return [
        Start(event["workers"], event["backend"], event.get("from_step", 0))
        for event in events
        if event["event"] in ("started", "resumed")
    ]


def wrong_starts(run: RunDir, legs: tuple[Leg, ...]) -> str:
    """Why the run was not taken over these legs, each going on from the state of the one before; empty if it was."""
    found = starts(run)
    if [(start.workers, start.backend) for start in found] != [(leg.workers, leg.backend) for leg in legs]:
        return "its ledger shows other legs: " + ", ".join(f"{s.workers} {s.backend}" for s in found)
    steps = [start.from_step for start in found]
    if steps[0] != 0 or sorted(set(steps)) != steps:
        return f"a leg did not go on from the one before: they began at {steps}"
    return ""
