"""What a checkpoint costs the training: how long it stands still, and how much slower it runs while one is written.

`python bench/checkpoint.py` trains a model whose state (weights and two moments, fp32) is 1 GB or more for a few steps
with one CPU thread, saving now and then beside the training, then again saving while it stands still, and copies as
many bytes in memory. It prints a table, writes bench/results/checkpoint.json, and exits 1 where a bound is not held:
stall at most twice one plain copy plus 50 ms, and at least 0.95 of the steps a second while a save is under way.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from figures import REPOSITORY, RESULTS, caption, environment, fill, table

from lwray.cli import main as lwray
from lwray.tracking.journal import merged_ledger, merged_metrics
from lwray.tracking.rundir import RunDir, write_json

RESULT = RESULTS / "checkpoint.json"
DOCS = REPOSITORY / "docs" / "performance.md"
COPIES, SLACK_S, STEPS_RATIO = 2.0, 0.05, 0.95
MODEL = """
[data]
source = "python:stdlib"
max_bytes = "1MB"
tokenizer = "bytes"

[model]
layers = {layers}
width = 1024
heads = 16
context = 32

[batch]
global_size = 2

[eval]
rows = 2
baseline = false

[tracking]
enabled = false
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure with its bound; `held` is None where there is none."""

    figure: str
    value: float
    lowest: float
    highest: float
    bound: float | None
    held: bool | None


def train(storage: Path, name: str, layers: int, steps: int, every: int, asynchronous: bool, device: str) -> RunDir:
    """A run in this process; its directory."""
    file = storage / "model.toml"
    file.write_text(MODEL.format(layers=layers))
    keys = [f"run.name={name}", f"train.steps={steps}", f"checkpoint.every_steps={every}", "checkpoint.every_seconds=0"]
    keys += [f"checkpoint.asynchronous={str(asynchronous).lower()}", "checkpoint.keep=1", "parallel.cpus_per_worker=1"]
    keys += [f"parallel.device={device}"]
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        code = lwray(["train", str(file), *keys, "--launcher=inline", f"--storage={storage}"])
    if code:
        sys.exit(f"the run {name} ended with {code}")
    return RunDir(storage / name)


def saves_of(run: RunDir) -> list[dict[str, float]]:
    """The events of saves in the middle of a run."""
    return [e for e in merged_ledger(run) if e["event"] == "checkpoint" and e["cause"] == "periodic"]


def step_seconds(run: RunDir) -> tuple[list[float], list[float]]:
    """Seconds of the steps with no save under way, and of those that were all within one; stalls left out."""
    spans = [(e["time"] - e["total_s"] + e["blocked_s"], e["time"]) for e in saves_of(run)]
    apart, within = [], []
    for line in merged_metrics(run)[2:]:
        if "step_seconds" not in line:
            continue
        begun, ended = line["time"] - line["step_seconds"], line["time"]
        if any(start <= begun and ended <= end for start, end in spans):
            within.append(line["step_seconds"])
        elif all(ended <= start or end <= begun for start, end in spans):
            apart.append(line["step_seconds"])
    return apart, within


def copy_seconds(size: int, rounds: int = 9) -> list[float]:
    """One plain copy of `size` bytes between two pieces of memory that have been touched before."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started)
    return seconds


def row(figure: str, values: list[float], bound: float | None = None, at_least: bool = False) -> Row:
    value = statistics.median(values)
    held = None if bound is None else (value >= bound if at_least else value <= bound)
    return Row(figure, value, min(values), max(values), bound, held)


def measure(layers: int, steps: int, every: int, device: str) -> tuple[int, list[Row]]:
    """Bytes of the state, and the figures."""
    with tempfile.TemporaryDirectory() as directory:
        storage = Path(directory)
        beside = train(storage, "beside", layers, steps, every, True, device)
        standing = train(storage, "standing", layers, steps // 2, every, False, device)
        size = int(saves_of(beside)[0]["bytes"])
        copies = copy_seconds(size)
        stalls = [e["blocked_s"] for e in saves_of(beside)]
        synchronous = [e["blocked_s"] for e in saves_of(standing)]
        apart, within = step_seconds(beside)
        totals = [e["total_s"] for e in saves_of(beside)]
    copy, without = statistics.median(copies), statistics.median(apart)
    return size, [
        row("plain copy, s", copies),
        row("stall, s", stalls, COPIES * copy + SLACK_S),
        row("stall / plain copy", [stall / copy for stall in stalls]),
        row("save while training stands still, s", synchronous),
        row("stall / that", [stall / statistics.median(synchronous) for stall in stalls]),
        row("save beside the training, s", totals),
        row("steps/s, no save under way", [1 / seconds for seconds in apart]),
        row("steps/s, one under way", [1 / seconds for seconds in within]),
        row("that / no save under way", [without / seconds for seconds in within], STEPS_RATIO, at_least=True),
    ]


def block(results: dict[str, Any]) -> str:
    """The table of a results file, and what it was measured on."""
    rows = []
    for each in (Row(**row) for row in results["rows"]):
        sign = "≥" if each.figure.startswith("that") else "≤"
        bound = "-" if each.bound is None else f"{sign} {each.bound:.3f}"
        verdict = "-" if each.held is None else "holds" if each.held else "FAILS"
        rows.append((each.figure, *(f"{v:.3f}" for v in (each.value, each.lowest, each.highest)), bound, verdict))
    size = results["bytes"] / 1e9
    header = ("", "median", "lowest", "highest", "bound", "verdict")
    return f"{table(header, rows)}\n\nState of {size:.2f} GB, one thread. {caption(results)}."


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--layers", type=int, default=7, help="transformer blocks of width 1024; 7 make 1 GB")
    arguments.add_argument("--steps", type=int, default=80)
    arguments.add_argument("--every", type=int, default=10, help="steps between saves")
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments.add_argument("--json", type=Path, help="default: bench/results/checkpoint.json, on a CPU")
    arguments.add_argument("--write-docs", action="store_true", help="run nothing; put the results into the documents")
    options = arguments.parse_args()
    if options.write_docs:
        fill(DOCS, "checkpoint", block(json.loads((options.json or RESULT).read_text())))
        return 0
    size, rows = measure(options.layers, options.steps, options.every, options.device)
    results = {**environment(options.device), "bytes": size, "rows": [asdict(each) for each in rows]}
    target = options.json or (RESULT if options.device == "cpu" else None)
    print(block(results))
    if target:
        target.parent.mkdir(exist_ok=True)
        write_json(target, results)
    return int(any(each.held is False for each in rows))


if __name__ == "__main__":
    sys.exit(main())
