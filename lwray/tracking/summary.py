"""summary.json: how a run ended, in numbers; and the same for people."""

import math
import statistics
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lwray.tracking.journal import merged_metrics
from lwray.tracking.rundir import RunDir

STOPPED = ("INT", "TERM", "preempted", "time_limit")
"""Causes after which the same command goes on with the run."""


def summarise(
    run: RunDir,
    cause: str,
    facts: Mapping[str, Any],
    baselines: Mapping[str, float],
    bits_per_byte: float | None,
    wall_seconds: float,
) -> dict[str, Any]:
    """The document: `facts` (step, losses, seconds, …), rates from the metrics, baselines (nats), where things lie.

    `bits_per_byte` is what one nat of loss is worth; `wall_seconds` is this attempt's wall time.
    """
    lines = [line for line in merged_metrics(run) if "loss" in line]
    rate = "tokens_per_second" if lines and "tokens_per_second" in lines[-1] else "samples_per_second"
    document = {
        "run": run.root.name,
        "cause": cause,
        "time": time.time(),
        **facts,
        "attempts": len(run.attempts_in_order()),
        "wall_seconds": wall_seconds,
        f"median_{rate}": statistics.median(line[rate] for line in lines) if lines else None,
        "baselines": dict(baselines),
        "path": run.place,
    }
    if bits_per_byte is not None:
        nats = {"val": facts.get("best_val_loss"), **baselines}
        document["bits_per_byte"] = {name: n * bits_per_byte for name, n in nats.items() if n is not None}
    return document


def show_summary(summary: Mapping[str, Any], again: bool = False) -> None:
    """Print the summary; `again` when the run had finished before."""
    console = Console()
    verb = "had already finished" if again else "ended"
    after = f" after {summary['step']} steps" if "step" in summary else ""
    console.print(f"[bold]{summary['run']}[/bold] {verb}: {summary['cause']}{after}.")
    table = Table(show_header=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in _rows(summary):
        # an error's text may hold what rich takes for markup
        table.add_row(label, Text(text))
    console.print(table)
    if summary["cause"] in STOPPED and "error" not in summary:
        committed = "A checkpoint is committed. " if summary.get("step") else ""
        console.print(f"{committed}Run the same command again to go on.")


def _rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    per_byte = summary.get("bits_per_byte", {})
    if summary.get("best_val_loss") is not None:
        rows.append(("best validation loss", _loss(summary["best_val_loss"], per_byte.get("val"))))
    for name, nats in summary.get("baselines", {}).items():
        rows.append((f"{name} model, same text", _loss(nats, per_byte.get(name))))
    if summary.get("loss") is not None:
        rows.append(("last training loss", _loss(summary["loss"], None)))
    for unit in ("tokens", "samples"):
        if rate := summary.get(f"median_{unit}_per_second"):
            rows += [(f"{unit} / s (median)", f"{rate:,.0f}")]
    if summary.get("seconds") is not None:
        rows.append(("training time", f"{summary['seconds']:.0f} s in {summary['attempts']} attempt(s)"))
    if summary.get("error"):
        rows.append(("error", str(summary["error"])))
    if summary.get("mlflow_run_id"):
        rows.append(("MLflow", f"run {summary['mlflow_run_id']} at {summary['mlflow_uri']}"))
    rows.append(("run directory", summary["path"]))
    return rows


def _loss(nats: float, bits_per_byte: float | None) -> str:
    if not math.isfinite(nats):
        return str(nats)
    if bits_per_byte is None:
        return f"{nats:.4f}"
    return f"{nats:.4f} nats per token, {bits_per_byte:.4f} bits per byte"
