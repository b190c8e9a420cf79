"""The worker groups of an attempt, one after the other: lost workers are replaced, room is taken, leavers are left.

Ray Train's own elastic group looks at a view of the cluster that may be 20 s old, asks for no checkpoint before a
resize and waits for a lost node until a time-out (2.60). Here each group has a fixed size. One that is to change is
asked to commit and end, as at any stop, and the next one goes on from there; one that lost a worker goes on from the
newest commit.
"""

import logging
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from lwray.checkpoint.find import committed
from lwray.cluster.capacity import NodeView, possible_workers, view
from lwray.cluster.group import Group, explain, had_no_room, is_machines_fault, worker_need
from lwray.cluster.growth import Growth
from lwray.cluster.place import Placement
from lwray.cluster.word import ask_to_end, bring_end, whereabouts
from lwray.cluster.worker import read_outcome
from lwray.config.schema import ClusterSection
from lwray.engine.session import REGROUP, Outcome, Session
from lwray.engine.stop import StopRequest
from lwray.errors import RunFailed, Superseded
from lwray.store import open_store
from lwray.tracking.journal import Journal, Line, events_of, last_lines

log = logging.getLogger(__name__)

TICK_S, LOOK_S = 0.1, 1.0
"""Seconds between looks at the group, and at the cluster."""
SAY_S = 60.0
"""Seconds after which a run that waits says so; then twice as long each time."""
FREED_S, GOAL_S = 2.0, 10.0
"""How long the room of a group that has ended may take to be free again; and where a larger one is to have it."""
FIRST_PAUSE_S = 15.0
"""What a new group costs, until one has been seen to start."""


class Groups:
    """One attempt's workers. `say` tells the person at the terminal."""

    def __init__(
        self,
        session: Session,
        placement: Placement,
        stop: StopRequest,
        say: Callable[[str], None],
    ) -> None:
        self.session, self.placement, self.stop, self.say = session, placement, stop, say
        self.section: ClusterSection = session.config.cluster
        self.need = worker_need(placement)
        self.least, self.most = limits(session, placement)
        self.pause = FIRST_PAUSE_S
        self.goal = 0
        """The size for which a group was asked to make way."""

    def run(self) -> Outcome:
        """Group after group, until one comes to an end that is the run's. Raises RunFailed."""
        number, size_before = 0, 0
        while True:
            size = self.await_room(first=number == 0)
            if size is None:
                return self.stopped()
            number += 1
            session = replace(self.session, attempt=replace(self.session.attempt, group=number))
            if number > 1:
                self.record("resized", from_workers=size_before, to_workers=size)
            outcome = self.train(session, size)
            if self.stop.cause and (outcome is None or outcome.cause in REGROUP):
                return self.stopped()
            if outcome is not None and outcome.cause not in REGROUP:
                return outcome
            size_before = size

    def train(self, session: Session, size: int) -> Outcome | None:
        """What a group of `size` workers came to; None where it was lost. Raises RunFailed where none may follow."""
        began = looked = time.monotonic()
        group = Group(session, replace(self.placement, workers=size))
        growth, asked, started, said = Growth(size), "", False, False
        while group.runs(TICK_S):
            now = time.monotonic()
            if self.stop.cause and not started and not whereabouts(session):
                return self.stopped()
            if self.stop.cause and asked != self.stop.cause:
                asked = self.ask(session, self.stop.cause)
            if asked or now - looked < LOOK_S:
                continue
            looked = now
            place = whereabouts(session)
            if place is None:
                if not said and now - began > SAY_S:
                    self.say(self.what_is_awaited(size))
                    said = True
                continue
            if not started:
                started, self.pause = True, now - began
            asked = self.change(session, place, growth)
        bring_end(session, failed=group.failure is not None)
        if group.failure is not None:
            self.judge(group.failure, session)
            return None
        try:
            return read_outcome(session.attempt.outcome)
        except Superseded:
            raise
        except RunFailed as error:
            if asked != "resize":
                raise
            # it was well, and was asked to end; that it could not save then is no reason to end the run
            self.lose(str(error))
            return None

    def change(self, session: Session, place: Line, growth: Growth) -> str:
        """Ask the group to end where it should give way to another; what was asked, or nothing."""
        held: dict[str, int] = {}
        for node in place["nodes"]:
            held[node] = held.get(node, 0) + 1
        try:
            nodes = view(held)
        except Exception as error:
            # Ray's head may be away for a while; a group that trains is not ended for that
            log.warning("The cluster could not be looked at: %s", error)
            return ""
        if leaving := [node for node in nodes if node.held and not node.stays]:
            if asked := self.ask(session, "drain"):
                self.record("notice", cause="drain", nodes=[n.address for n in leaving], deadline=earliest(leaving))
            return asked
        possible = min(self.most, possible_workers(nodes, self.need))
        if size := growth.decide(time.monotonic(), possible, self.remaining, self.pause):
            self.goal = size
            return self.ask(session, "resize")
        return ""

    def ask(self, session: Session, cause: str) -> str:
        """Leave a request to commit and end where rank 0 looks for it."""
        return cause if ask_to_end(session, cause) else ""

    def judge(self, failure: Exception, session: Session) -> None:
        """Raises RunFailed where the failure is not the machines', or too many came without a commit between."""
        reason = explain(failure, session)
        if had_no_room(failure):
            self.say(f"{reason} The room was taken by something else; waiting for it.")
        elif is_machines_fault(failure):
            self.lose(reason)
        else:
            raise RunFailed(reason)

    def lose(self, reason: str) -> None:
        """Go on after a lost group. Raises RunFailed after too many in this attempt without a commit between."""
        self.record("lost", error=reason)
        lost = losses_since_progress(events_of(self.session.attempt))
        if lost > self.section.max_failures:
            raise RunFailed(
                f"{reason} Workers were lost {lost} times without a commit between (cluster.max_failures = "
                f"{self.section.max_failures})."
            )
        self.say(f"{reason} Going on from the newest checkpoint ({lost} of {self.section.max_failures} restarts).")

    def remaining(self) -> float:
        """Seconds of training left at the speed of the last logged step; none is known before it."""
        lines = [line for line in last_lines(self.session.attempt.metrics) if "step_seconds" in line]
        return float((self.session.total_steps - lines[-1]["step"] - 1) * lines[-1]["step_seconds"]) if lines else 0.0

    def await_room(self, *, first: bool) -> int | None:
        """Workers to start with: as many as are wanted, or after a while what there is room for, if it is enough.

        None where the run is stopped while it waits. Raises RunFailed after `cluster.give_up_after`.
        """
        wanted, patience = self.goal or self.most, FREED_S
        if first or self.goal:
            # the room of the group that made way for a larger one is about to be free
            patience = self.section.wait_s if first else GOAL_S
        self.goal = 0
        began = time.monotonic()
        said, interval = began, SAY_S
        with closing(Demand(self.need, self.least)) as demand:
            while True:
                possible = min(self.most, possible_workers(view({}), self.need))
                waited = time.monotonic() - began
                if possible >= wanted or (possible >= self.least and waited >= patience):
                    return possible
                if self.stop.cause:
                    return None
                if possible < self.least and 0 < self.section.give_up_after <= waited:
                    raise RunFailed(
                        f"For {waited:.0f} s there was room for {possible} worker(s), and the run needs {self.least}. "
                        "What was committed stands: run the same command again when machines are there."
                    )
                if time.monotonic() - said >= interval:
                    self.say(self.what_is_awaited(self.least))
                    said, interval = time.monotonic(), 2 * interval
                demand.while_short(possible < self.least)
                time.sleep(TICK_S)

    def what_is_awaited(self, workers: int) -> str:
        """Law 7: a run that cannot start yet says so."""
        free = ray.available_resources()
        each = f"{self.placement.cpus:g} CPU cores{' and a GPU' if self.placement.device == 'cuda' else ''}"
        return (
            f"Waiting for {workers} worker(s) of {each} each; free now: {free.get('CPU', 0):g} CPU cores, "
            f"{free.get('GPU', 0):g} GPUs. Something else may hold the rest."
        )

    def stopped(self) -> Outcome:
        """The user's stop, at a moment when no workers are there to write it down: the newest commit stands."""
        _, newest = next(committed(open_store(self.session.run.checkpoints_place)), (None, None))
        outcome = Outcome.before_any_step(self.stop.cause or "TERM")
        if newest is not None:
            names = ("step", "loss", "val_loss", "best_val_loss", "seconds")
            outcome = replace(outcome, **{name: newest.progress[name] for name in names})
        self.record("stopped", cause=outcome.cause, step=outcome.step)
        return outcome

    def record(self, event: str, **fields: object) -> None:
        with closing(Journal.of_driver(self.session.run, self.session.attempt)) as journal:
            journal.event(event, **fields)


def limits(session: Session, placement: Placement) -> tuple[int, int]:
    """Least and most workers: a range as it is given, anything else is the number found at the start."""
    wanted = session.config.parallel.workers
    return wanted if isinstance(wanted, tuple) else (placement.workers, placement.workers)


class Demand:
    """While there is no room for the least workers: a placement that waits for it, which an autoscaler sees."""

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


def earliest(leaving: list[NodeView]) -> float | None:
    """Unix seconds by which the first of them is gone; None where nobody said."""
    return min((node.leaves_at for node in leaving if node.leaves_at), default=None)


def losses_since_progress(ledger: list[Line]) -> int:
    """Groups that were lost one after the other, with no checkpoint committed between."""
    count = 0
    for event in ledger:
        if event["event"] == "lost":
            count += 1
        elif event["event"] == "checkpoint":
            count = 0
    return count
