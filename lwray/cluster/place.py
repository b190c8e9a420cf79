"""How many workers, on what, with how many cores: from `[parallel]` and what the cluster has."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lwray.config.schema import ParallelSection
from lwray.errors import UserError

Node = Mapping[str, float]
"""Resources of one node: CPU, GPU."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The workers of one attempt."""

    workers: int
    device: str
    """`cpu` or `cuda`."""
    cpus: float
    """CPU cores that each worker is given."""

    @property
    def threads(self) -> int:
        """CPU threads of a worker."""
        return max(1, int(self.cpus))


def this_machine() -> Node:
    """The cores this process may use and the GPUs that torch sees."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {"CPU": float(len(os.sched_getaffinity(0))), "GPU": float(gpus)}


def place_workers(parallel: ParallelSection, nodes: Sequence[Node]) -> Placement:
    """The workers that `[parallel]` asks for. Raises UserError where these nodes can never give them."""
    gpus = int(sum(node.get("GPU", 0.0) for node in nodes))
    device = parallel.device if parallel.device != "auto" else ("cuda" if gpus else "cpu")
    if device == "cuda" and not gpus:
        raise UserError("parallel.device = cuda, but there is no GPU here. Use parallel.device=cpu or auto.")
    return _on_gpus(parallel, nodes, gpus) if device == "cuda" else _on_cpus(parallel, nodes)


def _on_gpus(parallel: ParallelSection, nodes: Sequence[Node], gpus: int) -> Placement:
    with_gpu = [node for node in nodes if node.get("GPU")]
    each = parallel.cpus_per_worker
    if each == "auto":
        workers = _count(parallel.workers, gpus, gpus, f"{gpus} GPUs (one worker each)")
        # whole cores where there are enough, else the share that Ray can still place
        share = min(node.get("CPU", 0.0) / node["GPU"] for node in with_gpu)
        return Placement(workers, "cuda", float(int(share)) if share >= 1 else int(share * 100) / 100)
    if each <= 0:
        raise UserError("parallel.cpus_per_worker must be more than 0 cores.")
    capacity = sum(min(int(node["GPU"]), int(node.get("CPU", 0.0) / each + 1e-9)) for node in with_gpu)
    workers = _count(parallel.workers, capacity, capacity, f"{gpus} GPUs on nodes with {each:g} cores for each worker")
    return Placement(workers, "cuda", each)


def _on_cpus(parallel: ParallelSection, nodes: Sequence[Node]) -> Placement:
    cores = [node.get("CPU", 0.0) for node in nodes if node.get("CPU")]
    if parallel.cpus_per_worker != "auto":
        each = parallel.cpus_per_worker
        if each <= 0:
            raise UserError("parallel.cpus_per_worker must be more than 0 cores.")
        capacity = sum(int(node / each + 1e-9) for node in cores)
        what = f"{sum(cores):g} CPU cores on {len(cores)} node(s), at {each:g} a worker"
        workers = _count(parallel.workers, capacity, min(len(cores), capacity), what)
        return Placement(workers, "cpu", each)
    # without a size of their own workers share the cores, fractions of one included
    workers = _count(
        parallel.workers, capacity=int(sum(cores)) * 8, default=len(cores), what=f"{sum(cores):g} CPU cores"
    )
    return Placement(workers, "cpu", _largest_share(cores, workers))


def _count(wanted: int | tuple[int, int] | str, capacity: int, default: int, what: str) -> int:
    if isinstance(wanted, tuple):
        low, high = wanted
    else:
        low, high = (wanted, wanted) if isinstance(wanted, int) else (1, default)
    if low > capacity:
        raise UserError(
            f"parallel.workers asks for {low} workers, but there are {what}: at most {capacity}. "
            "Lower parallel.workers or parallel.cpus_per_worker, or join a larger cluster."
        )
    return min(high, capacity)


def _largest_share(cores: Sequence[float], workers: int) -> float:
    """The most cores a worker such that `workers` fit on the nodes; whole cores from one up."""
    candidates = sorted({node / k for node in cores for k in range(1, workers + 1)}, reverse=True)
    share = next(c for c in candidates if sum(int(node / c + 1e-9) for node in cores) >= workers)
    return float(int(share)) if share >= 1 else int(share * 100) / 100
