"""`lwray show`: what a run's directory says about it, as data and as tables."""

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from lwray.errors import UserError
from lwray.tracking.journal import Line, events_of, merged_ids, merged_ledger, merged_metrics, read_lines
from lwray.tracking.rundir import Attempt, RunDir, read_json
from lwray.tracking.storage import Storage, find_run_at, run_names

Merged = Literal["metrics", "ledger", "ids"]
MERGED = {"metrics": merged_metrics, "ledger": merged_ledger, "ids": merged_ids}
Checkpoint = Mapping[str, Any]
"""The fields of a `lwray.checkpoint.health.Row`: packages beside each other do not import each other."""
USABLE = ("whole", "not verified")
STARTS = ("started", "resumed")
NUMBERS = ("#", "step", "size", "val loss")
ENDINGS = ("finished", "stopped", "failed")


def find_run(name: str) -> RunDir:
    """A run by its directory's path, its URL, or by name in the storage (LWRAY_STORAGE, else ./runs).

    Of one on an object store the small files are brought here. Raises UserError listing the runs there are.
    """
    named = os.environ.get("LWRAY_STORAGE", "")
    if "://" in name or ("://" in named and not _is_run(Path(name))):
        return _find_on_object_store(name, named)
    storage = Path(os.environ.get("LWRAY_STORAGE") or "runs")
    for root in (Path(name), storage / name):
        if _is_run(root):
            return RunDir(root)
    there = [path.name for path in sorted(storage.iterdir()) if _is_run(path)] if storage.is_dir() else []
    known = f"the runs in {storage} are {', '.join(there)}" if there else f"{storage} holds no runs"
    raise UserError(f"There is no run {name}: {known}. Give a run's directory, or set LWRAY_STORAGE.")


def _find_on_object_store(name: str, storage: str) -> RunDir:
    place = name if "://" in name else f"{storage.rstrip('/')}/{name}"
    run = find_run_at(place, ids=True)
    if run is None:
        base = Storage.at(place.rstrip("/").rpartition("/")[0])
        known = ", ".join(run_names(base))
        raise UserError(f"There is no run {place}; in {base} there {f'are {known}' if known else 'is none'}.")
    return run


def jsonl(run: RunDir, what: Merged) -> Iterator[str]:
    """The attempts' metrics, ledger or sample ids as one: a JSON text a line."""
    return map(json.dumps, MERGED[what](run))


def overview(run: RunDir, checkpoints: Sequence[Checkpoint]) -> dict[str, Any]:
    """The run as JSON values: attempts, losses, `checkpoints`, summary; times are Unix seconds."""
    lines = merged_metrics(run)
    trained = [line for line in lines if "loss" in line]
    evaluated = [line for line in lines if math.isfinite(line.get("val_loss", math.nan))]
    return {
        "run": run.root.name,
        "path": run.place,
        "steps": trained[-1]["step"] + 1 if trained else 0,
        "last": _picked(trained[-1], "loss") if trained else None,
        "best_val": _picked(min(evaluated, key=lambda line: line["val_loss"]), "val_loss") if evaluated else None,
        "attempts": [_attempt(attempt, here=not run.url) for attempt in run.attempts_in_order()],
        "checkpoints": [dict(row) for row in checkpoints],
        "summary": read_json(run.summary) if run.summary.exists() else None,
    }


def tables(run: RunDir, checkpoints: Sequence[Checkpoint]) -> RenderableType:
    """The overview for people, to print with a rich Console."""
    data = overview(run, checkpoints)
    reasons = (Text.assemble((row["name"], "bold"), ": ", row["reason"]) for row in checkpoints if row["reason"])
    return Group(_headline(data), _attempts_table(data["attempts"]), _checkpoints_table(checkpoints), *reasons)


def _is_run(root: Path) -> bool:
    return (root / "attempts").is_dir() or (root / "run.json").is_file()


def _picked(line: Line, field: str) -> dict[str, Any]:
    return {"step": line["step"], field: line[field]}


def _attempt(attempt: Attempt, *, here: bool) -> dict[str, Any]:
    """A row of the overview; where the files were not written `here`, their own times say nothing."""
    events, metrics = events_of(attempt), read_lines(attempt.metrics)
    steps = [line["step"] for line in metrics if "loss" in line]
    ending = last_ending(events)
    # an attempt without an ending runs still or was killed: its end is its last sign of life
    files = [path for path in (attempt.ledger, attempt.metrics) if path.exists()]
    signs = [path.stat().st_mtime for path in files] if here else _times(events + metrics)
    return {
        "attempt": attempt.number,
        "start": events[0]["time"] if events else None,
        "end": ending["time"] if ending else max(signs, default=None),
        "ending": ending["event"] if ending else None,
        "cause": ending.get("cause") if ending else None,
        "first_step": min(steps, default=None),
        "last_step": max(steps, default=None),
    }


def _times(lines: list[Line]) -> list[float]:
    return [line["time"] for line in lines if "time" in line]


def last_ending(events: list[Line]) -> Line | None:
    """The event that ended the attempt; a failure that it resumed from did not."""
    for event in reversed(events):
        if event["event"] in ENDINGS:
            return event
        if event["event"] in STARTS:
            return None
    return None


def _headline(data: dict[str, Any]) -> Text:
    parts = [f"{data['steps']} steps"]
    if data["last"]:
        parts.append(f"last loss {data['last']['loss']:.4f}")
    if data["best_val"]:
        parts.append(f"best validation loss {data['best_val']['val_loss']:.4f} at step {data['best_val']['step']}")
    return Text.assemble((data["run"], "bold"), ": ", ", ".join(parts), "\n", (data["path"], "dim"), "\n")


def _attempts_table(attempts: list[dict[str, Any]]) -> Table:
    table = titled("Attempts", "#", "started", "ran for", "steps", "end")
    for row in attempts:
        superseded = row is not attempts[-1]
        table.add_row(
            str(row["attempt"]),
            date(row["start"]),
            span(row["start"], row["end"]),
            "" if row["first_step"] is None else f"{row['first_step']} to {row['last_step']}",
            _ending(row, superseded),
        )
    return table


def _checkpoints_table(checkpoints: Sequence[Checkpoint]) -> Table:
    table = titled("Checkpoints", "name", "step", "size", "age", "written by", "cause", "val loss", "health")
    for row in checkpoints:
        table.add_row(
            row["name"],
            str(row["step"]),
            "" if row["bytes"] is None else decimal(row["bytes"]),
            span(row["time"], time.time()),
            _layout(row),
            row["cause"] or "",
            "" if row["val_loss"] is None else f"{row['val_loss']:.4f}",
            row["health"],
            style=None if row["health"] in USABLE else "dim",
        )
    return table


def _layout(row: Checkpoint) -> str:
    if row["workers"] is None:
        return ""
    return f"{row['backend']} on {row['workers']} worker{'' if row['workers'] == 1 else 's'}"


def titled(title: str, *columns: str) -> Table:
    """An empty table in the manner of all of them."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in columns:
        justify: Literal["right", "left"] = "right" if column in NUMBERS else "left"
        table.add_column(column, header_style="dim", justify=justify, no_wrap=column == "name")
    return table


def _ending(row: dict[str, Any], superseded: bool) -> str:
    if row["ending"] is None:
        return "killed" if superseded else "none recorded: it runs still, or was killed"
    if row["cause"] == "superseded":
        return "superseded by a later attempt"
    return f"{row['ending']}: {row['cause']}" if row["cause"] else str(row["ending"])


def date(seconds: float | None) -> str:
    """Unix seconds as this machine's clock shows them; nothing for None."""
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def span(start: float | None, end: float | None) -> str:
    """The time between, in one unit; nothing where one of them is not known."""
    if start is None or end is None:
        return ""
    seconds = end - start
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
