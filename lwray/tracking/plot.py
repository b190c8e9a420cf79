"""A run as one picture: losses above, throughput and learning rate below, its attempts as bands."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from lwray.errors import UserError
from lwray.tracking.journal import Line, merged_metrics, spans
from lwray.tracking.rundir import RunDir, read_json

BLUE, ORANGE, GREEN, GREY = "#2f6db3", "#d9541e", "#3b8f5a", "#6b7280"
MOST_LABELS = 8
"""Resume points are labelled as long as there is room for their labels."""


def plot(run: RunDir, out: Path) -> None:
    """Draw the run into `out`; its suffix (.png, .svg, .pdf) says how.

    Raises UserError if nothing was logged yet, or the suffix is unknown.
    """
    lines = merged_metrics(run)
    if not any("loss" in line for line in lines):
        raise UserError(f"{run.root} has no logged steps to plot yet.")
    suffix = out.suffix.removeprefix(".").lower()
    figure = Figure(figsize=(9.0, 6.2), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    known = sorted(canvas.get_supported_filetypes())
    if suffix not in known:
        raise UserError(f"Cannot plot to {out}: its suffix must be one of {', '.join(known)}.")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(5, 3))
    _losses(above, lines, _bigram(run))
    _pace(below, lines)
    for axes in (above, below):
        _attempts(axes, run, labels=axes is above)
    figure.suptitle(run.root.name, fontsize=12, fontweight="bold", x=0.01, ha="left")
    figure.align_ylabels([above, below])
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.with_name(out.name + ".tmp")
    figure.savefig(draft, dpi=150, format=suffix)
    draft.replace(out)


def _losses(axes: Axes, lines: list[Line], bigram: float | None) -> None:
    steps, losses = _series(lines, "loss")
    axes.plot(steps, losses, color=BLUE, linewidth=0.9, alpha=0.85, label="training loss")
    steps, losses = _series(lines, "val_loss")
    if steps:
        axes.plot(steps, losses, color=ORANGE, marker="o", markersize=4, linestyle="none", label="validation loss")
    if bigram is not None:
        axes.axhline(bigram, color=GREY, linestyle="--", linewidth=1, label=f"bigram model, {bigram:.3f}")
    axes.set_ylabel("loss")
    _clean(axes)
    axes.legend(frameon=False, loc="upper right", fontsize=9)


def _pace(axes: Axes, lines: list[Line]) -> None:
    unit = "tokens" if any("tokens_per_second" in line for line in lines) else "samples"
    axes.plot(*_series(lines, f"{unit}_per_second"), color=GREEN, linewidth=0.9)
    axes.set_ylabel(f"{unit} / second", color=GREEN)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _clean(axes)
    rate = axes.twinx()
    rate.plot(*_series(lines, "lr"), color=GREY, linewidth=1.2, linestyle=(0, (4, 2)))
    rate.set_ylabel("learning rate", color=GREY)
    rate.set_ylim(bottom=0)
    rate.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
    rate.spines[["top", "left"]].set_visible(False)
    rate.margins(x=0.01)


def _attempts(axes: Axes, run: RunDir, labels: bool) -> None:
    """Every second attempt is shaded; a dotted line stands where one resumed."""
    all_spans = spans(run)
    ends = [span.first for span in all_spans[1:]] + [max(span.last for span in all_spans)]
    for index, (span, end) in enumerate(zip(all_spans, ends, strict=True)):
        if index % 2:
            axes.axvspan(span.first, end, color=BLUE, alpha=0.06, linewidth=0)
        if index:
            axes.axvline(span.first, color=GREY, linestyle=":", linewidth=1)
        if index and labels and len(all_spans) <= MOST_LABELS:
            axes.annotate(
                f"attempt {span.attempt}",
                (span.first, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(3, 2),
                textcoords="offset points",
                fontsize=8,
                color=GREY,
            )


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)


def _series(lines: list[Line], field: str) -> tuple[list[int], list[float]]:
    chosen = [line for line in lines if line.get(field) is not None]
    return [line["step"] for line in chosen], [line[field] for line in chosen]


def _bigram(run: RunDir) -> float | None:
    if not run.summary.exists():
        return None
    summary: dict[str, Any] = read_json(run.summary)
    baselines: dict[str, float] = summary.get("baselines") or {}
    return baselines.get("bigram")
