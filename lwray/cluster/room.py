"""Room for a run's workers: what there is, and waiting for more."""

import logging
import time
from collections.abc import Callable
from contextlib import closing

import ray.exceptions
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from lwray.cluster.blame import trusted
from lwray.cluster.capacity import NodeView, possible_workers, view
from lwray.config.schema import ClusterSection
from lwray.engine.stop import StopRequest
from lwray.errors import RunFailed

log = logging.getLogger(__name__)

LOOK_S = 0.1
SAY_S = 60.0
"""Seconds after which whoever waits says so; then twice as long each time."""


class Demand:
    """While there is no room for some workers: a placement that waits for it, which an autoscaler sees."""

    def __init__(self, need: dict[str, float], workers: int) -> None:
        self._bundles = [need] * workers
        self._waiting: PlacementGroup | None = None

    def while_short(self, short: bool) -> None:
        """Ask for room, or, once there is some, let go of what was asked for."""
        if short and self._waiting is None:
            self._waiting = placement_group(self._bundles)
        elif self._waiting is not None and self._waiting.wait(timeout_seconds=0):
            self.close()

    def close(self) -> None:
        """Ask for nothing any more."""
        if self._waiting is not None:
            remove_placement_group(self._waiting)
            self._waiting = None


class Room:
    """Waits until the cluster has room for between `least` and `most` workers of `need` each."""

    def __init__(
        self,
        need: dict[str, float],
        least: int,
        most: int,
        section: ClusterSection,
        stop: StopRequest,
        ends_at: float | None,
        say: Callable[[str], None],
    ) -> None:
        """`ends_at` is the end of the allocation in Unix seconds, if it has one."""
        self.need, self.least, self.most = need, least, most
        self.section, self.stop, self.ends_at, self.say = section, stop, ends_at, say
        self.failing: set[str] = set()
        """Ray's ids of nodes that are to be left out, where the others are enough."""

    def trusted(self, nodes: list[NodeView]) -> list[NodeView]:
        """Those for this run's workers."""
        return trusted(nodes, self.failing, self.need, self.least)

    def left_out(self) -> list[str]:
        """Ray's ids of the nodes where no worker is to be placed now."""
        if not self.failing:
            return []
        nodes = view({})
        return sorted({node.id for node in nodes} - {node.id for node in self.trusted(nodes)})

    def wait(self, wanted: int, patience: float) -> int | None:
        """As many workers as are `wanted`, or after `patience` seconds what there is room for, if it is enough.

        None where the run is stopped or its allocation ends while it waits; RunFailed after `cluster.give_up_after`.
        """
        began = said = time.monotonic()
        interval = SAY_S
        with closing(Demand(self.need, self.least)) as demand:
            while True:
                possible = self.possible()
                waited = time.monotonic() - began
                if possible >= wanted or (possible >= self.least and waited >= patience):
                    return possible
                if self.stop.cause or (self.ends_at is not None and time.time() >= self.ends_at):
                    return None
                if possible < self.least and 0 < self.section.give_up_after <= waited:
                    raise RunFailed(
                        f"For {waited:.0f} s there was room for {possible} worker(s), and the run needs {self.least}. "
                        "What was committed stands: run the same command again when machines are there."
                    )
                if time.monotonic() - said >= interval:
                    self.say(self.lack(self.least))
                    said, interval = time.monotonic(), 2 * interval
                demand.while_short(possible < self.least)
                time.sleep(LOOK_S)

    def possible(self) -> int:
        """Workers for which there is room now; none while the head does not answer."""
        try:
            return min(self.most, possible_workers(self.trusted(view({})), self.need))
        except ray.exceptions.RayError as error:
            log.warning("The cluster could not be looked at: %s", error)
            return 0

    def lack(self, workers: int) -> str:
        """Law 7: a run that cannot start yet says so."""
        free = ray.available_resources()
        each = f"{self.need['CPU']:g} CPU cores{' and a GPU' if 'GPU' in self.need else ''}"
        return (
            f"Waiting for {workers} worker(s) of {each} each; free now: {free.get('CPU', 0):g} CPU cores, "
            f"{free.get('GPU', 0):g} GPUs. Something else may hold the rest."
        )
