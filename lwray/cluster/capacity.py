"""What a cluster can hold now: a fresh view of its nodes, without those that leave or whose room others have."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class NodeView:
    """A live node, and what is free of it (CPU, GPU, by Ray's names)."""

    id: str
    address: str
    free: Mapping[str, float]
    leaves_at: float | None = None
    """Unix seconds by which a draining node is gone; 0 where nobody said; None where it stays."""
    held: int = field(default=0)
    """Workers of this run that are on it."""
    total: Mapping[str, float] = field(default_factory=dict)
    """What it has, by the same names."""

    @property
    def stays(self) -> bool:
        return self.leaves_at is None


def view(held: Mapping[str, int]) -> list[NodeView]:
    """Every live node of the cluster, as of now; `held` counts this run's workers by node id.

    Ray's own elastic policy asks a coordinator whose answer is up to 20 s old, counts totals, and counts nodes that
    are draining (2.60, `train/v2/_internal/execution/scaling_policy/elastic.py`).
    """
    import ray
    from ray._private import state

    free = state.available_resources_per_node()
    draining = state.state.get_draining_nodes()
    return [
        NodeView(
            id=node["NodeID"],
            address=node["NodeManagerAddress"],
            free=free.get(node["NodeID"], {}),
            leaves_at=draining[node["NodeID"]] / 1000 if node["NodeID"] in draining else None,
            held=held.get(node["NodeID"], 0),
            total=node["Resources"],
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def fits(room: Mapping[str, float], need: Mapping[str, float]) -> int:
    """Workers of `need` that fit into `room`."""
    return min(int(room.get(name, 0.0) / amount + 1e-9) for name, amount in need.items() if amount > 0)


def possible_workers(nodes: Iterable[NodeView], need: Mapping[str, float]) -> int:
    """Workers that the nodes which stay could hold: those there are, and what still fits beside them."""
    return sum(node.held + fits(node.free, need) for node in nodes if node.stays)
