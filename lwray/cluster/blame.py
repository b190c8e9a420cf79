"""Which nodes lose workers again and again: later groups are placed elsewhere."""

from collections.abc import Iterable, Set

from lwray.cluster.capacity import NodeView, fits
from lwray.cluster.group import GONE, failures_of, raised_by
from lwray.tracking.journal import Line

STEPS = 100
"""A node that lost workers twice with fewer steps between is not trusted any more."""


def blamed(failure: Exception, place: Line | None) -> list[str]:
    """Ray's ids of the nodes whose workers are gone; of those that only lost the link to them, not."""
    gone = [rank for rank, each in failures_of(failure).items() if isinstance(raised_by(each), GONE)]
    return sorted({place["nodes"][rank] for rank in gone}) if place else []


def failing(ledger: Iterable[Line]) -> set[str]:
    """Nodes that failed twice within STEPS steps, by an attempt's events in order."""
    last: dict[str, int] = {}
    found = set()
    for event in ledger:
        if event["event"] != "lost":
            continue
        for node in event["nodes"]:
            if node in last and event["step"] - last[node] < STEPS:
                found.add(node)
            last[node] = event["step"]
    return found


def trusted(nodes: list[NodeView], failing: Set[str], need: dict[str, float], least: int) -> list[NodeView]:
    """The nodes without those that fail; but all, where the others even if free could not hold the `least` workers."""
    others = [node for node in nodes if node.id not in failing]
    room = sum(fits(node.total, need) for node in others if node.stays)
    return others if room >= least else nodes
