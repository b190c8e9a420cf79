"""What all benches share: tables in Markdown, versions beside figures, and documents that a command fills."""

import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lwray.tracking.rundir import versions, write_text

REPOSITORY = Path(__file__).parent.parent
RESULTS = REPOSITORY / "bench" / "results"
PACKAGES = ("torch", "deepspeed", "ray")


def environment(device: str) -> dict[str, Any]:
    """What a figure depends on beside the code."""
    return {
        "versions": {**versions(PACKAGES), "python": platform.python_version()},
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "cores": len(os.sched_getaffinity(0)),
        "date": time.strftime("%Y-%m-%d"),
    }


def caption(results: dict[str, Any]) -> str:
    """Versions, device, cores and date, in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    return f"{versions}; {results['device']}, {results['cores']} cores; {results['date']}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown, aligned."""
    every = [header, *rows]
    widths = [max(len(cells[i]) for cells in every) for i in range(len(header))]
    lines = ["| " + " | ".join(f"{c:<{w}}" for c, w in zip(cells, widths, strict=True)) + " |" for cells in every]
    return "\n".join([lines[0], "| " + " | ".join("-" * w for w in widths) + " |", *lines[1:]])


def markers(name: str) -> tuple[str, str]:
    """Between these two lines of a document a command writes."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def fill(document: Path, name: str, block: str) -> None:
    """Put `block` between the markers of `name`."""
    begin, end = markers(name)
    before, rest = document.read_text(encoding="utf-8").split(begin)
    after = rest.split(end)[1]
    write_text(document, f"{before}{begin}\n{block}\n{end}{after}")
