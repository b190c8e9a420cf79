"""Before a run starts: wait for machines where more may come, and say at once where they never will."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing

from lwray.cluster.capacity import fits
from lwray.cluster.place import Node, Placement, place_workers
from lwray.cluster.room import SAY_S, Demand
from lwray.config import Config
from lwray.errors import RunFailed, UserError

LOOK_S = 1.0


def most_ever() -> Node | None:
    """What the cluster's autoscaler may bring it to (resources by Ray's names); None where it has no autoscaler."""
    from ray._private.state import state

    most: Mapping[str, float] | None = state.get_max_resources_from_cluster_config()
    return most


def await_machines(config: Config, nodes: Callable[[], Sequence[Node]], say: Callable[[str], None]) -> Placement:
    """The workers of a run on a cluster. Raises UserError where it will never hold them, RunFailed after a while.

    More machines may come where the cluster has an autoscaler, which is then asked, or where `cluster.grows` says so.
    """
    there = nodes()
    try:
        return place_workers(config.parallel, there)
    except UserError as lacking:
        most = most_ever()
        need, least = asked_for(config, most or {})
        if not config.cluster.grows and (most is None or fits(most, need) < least):
            raise
        say(f"{lacking} Waiting for machines to join.")
    with closing(Demand(need, least)) as demand:
        demand.while_short(True)
        return await_joined(config, nodes, say)


def await_joined(config: Config, nodes: Callable[[], Sequence[Node]], say: Callable[[str], None]) -> Placement:
    """The workers, once the machines for the fewest are there. Raises RunFailed after `cluster.give_up_after`."""
    began = said = time.monotonic()
    interval, limit = SAY_S, config.cluster.give_up_after
    while True:
        time.sleep(LOOK_S)
        there = nodes()
        try:
            return place_workers(config.parallel, there)
        except UserError as lacking:
            waited = time.monotonic() - began
            if 0 < limit <= waited:
                raise RunFailed(f"No machines came for {waited:.0f} s. {lacking}") from None
            if time.monotonic() - said >= interval:
                say(f"Still waiting for machines to join, for {waited:.0f} s.")
                said, interval = time.monotonic(), 2 * interval


def asked_for(config: Config, most: Node) -> tuple[dict[str, float], int]:
    """What the fewest workers need, as far as it can be told before there are machines."""
    parallel = config.parallel
    cpus = 1.0 if parallel.cpus_per_worker == "auto" else parallel.cpus_per_worker
    on_gpus = parallel.device == "cuda" or (parallel.device == "auto" and most.get("GPU", 0) > 0)
    wanted = parallel.workers
    least = wanted[0] if isinstance(wanted, tuple) else wanted if isinstance(wanted, int) else 1
    return {"CPU": cpus} | ({"GPU": 1.0} if on_gpus else {}), least
