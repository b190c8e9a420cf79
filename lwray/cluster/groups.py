"""The worker groups of an attempt, one after the other: lost workers are replaced, room is taken, leavers are left.

Ray Train's own elastic group looks at a view of the cluster that may be 20 s old, asks for no checkpoint before a
resize and waits for a lost node until a time-out (2.60). Here each group has a fixed size. One that is to change is
asked to commit and end, as at any stop, and the next one goes on from there; one that lost a worker goes on from the
newest commit.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import takewhile

from lwray.checkpoint.find import committed
from lwray.cluster.blame import STEPS, blamed, failing
from lwray.cluster.capacity import NodeView, possible_workers, view
from lwray.cluster.group import Group, explain, had_no_room, is_machines_fault, worker_need
from lwray.cluster.growth import Growth
from lwray.cluster.hang import ENDS_S, Hang, Vigil, kill_group, take_stacks
from lwray.cluster.place import Placement
from lwray.cluster.room import SAY_S, Room
from lwray.cluster.word import ask_to_end, bring_end, whereabouts
from lwray.cluster.worker import read_outcome
from lwray.config.schema import ClusterSection
from lwray.engine.session import REGROUP, Outcome, Session
from lwray.engine.stop import Notice, StopRequest
from lwray.errors import RunFailed, Superseded
from lwray.store import open_store
from lwray.tracking.journal import Journal, Line, events_of, last_lines

log = logging.getLogger(__name__)

TICK_S, LOOK_S = 0.1, 1.0
"""Seconds between looks at the group, and at the cluster."""
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
        self.room = Room(self.need, self.least, self.most, self.section, stop, session.ends_at, say)
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
        group = Group(session, replace(self.placement, workers=size), self.room.left_out())
        growth, started, said = Growth(size), False, False
        asked: Notice | None = None
        vigil, hang = Vigil(session), None
        while group.runs(TICK_S):
            now = time.monotonic()
            if self.stop.cause and not started and not whereabouts(session):
                return self.stopped()
            if self.stop.notice and asked != self.stop.notice:
                asked = self.ask(session, self.stop.notice)
            if now - looked < LOOK_S:
                continue
            looked = now
            place = whereabouts(session)
            if place is None:
                if not said and now - began > SAY_S:
                    self.say(self.room.lack(size))
                    said = True
                continue
            if not started:
                started, self.pause = True, now - began
            if hang is None:
                if hang := vigil.look(now):
                    self.end_hung(session, place, hang)
                elif asked is None or asked.cause == "drain":
                    asked = self.change(session, place, growth, asked)
            elif now - hang.found > ENDS_S:
                raise RunFailed(f"{hang}. They were killed, and Ray has not ended them within {ENDS_S:.0f} s.")
        bring_end(session, failed=group.failure is not None)
        # a worker or node that goes once the end is written down takes nothing with it
        if group.failure is not None and not session.attempt.outcome.exists():
            if hang:
                self.lose(f"{hang}. What each rank was at: {session.attempt.stacks}.")
            else:
                self.judge(group.failure, session)
            return None
        try:
            return read_outcome(session.attempt.outcome)
        except Superseded:
            raise
        except RunFailed as error:
            if asked is None or asked.cause != "resize":
                raise
            # it was well, and was asked to end; that it could not save then is no reason to end the run
            self.lose(str(error))
            return None

    def change(self, session: Session, place: Line, growth: Growth, asked: Notice | None) -> Notice | None:
        """Ask the group to end where it should give way to another; what was asked, now or before, or nothing."""
        held: dict[str, int] = {}
        for node in place["nodes"]:
            held[node] = held.get(node, 0) + 1
        try:
            nodes = view(held)
        except Exception as error:
            # Ray's head may be away for a while; a group that trains is not ended for that
            log.warning("The cluster could not be looked at: %s", error)
            return asked
        possible = min(self.most, possible_workers(self.room.trusted(nodes), self.need))
        if leaving := [node for node in nodes if node.held and not node.stays]:
            deadline = earliest(leaving)
            # where those that stay can go on, they do so at once; else what is left of the time is used
            notice = Notice("drain", deadline if possible < self.least else None)
            if notice == asked:
                return asked
            if heard := self.ask(session, notice):
                self.record("drain", nodes=[node.address for node in leaving], deadline=deadline)
            return heard or asked
        if asked is not None:
            return asked
        if size := growth.decide(time.monotonic(), possible, self.remaining, self.pause):
            self.goal = size
            return self.ask(session, Notice("resize"))
        return None

    def end_hung(self, session: Session, place: Line, hang: Hang) -> None:
        """Write down what every rank of the group is at, and kill it."""
        try:
            self.record("hang", silent_s=hang.silent_s, step=hang.step, doing=hang.doing)
            take_stacks(session, place, hang)
        except OSError as error:
            # a storage that fails may be why it hangs
            log.warning("What the workers are at could not be written down: %s", error)
        kill_group(place)

    def ask(self, session: Session, notice: Notice) -> Notice | None:
        """Leave a request to commit and end where rank 0 looks for it."""
        return notice if ask_to_end(session, notice) else None

    def judge(self, failure: Exception, session: Session) -> None:
        """Raises RunFailed where the failure is not the machines', or too many came without a commit between."""
        reason = explain(failure, session)
        if had_no_room(failure):
            self.say(f"{reason} The room was taken by something else; waiting for it.")
        elif is_machines_fault(failure):
            self.lose(reason, blamed(failure, whereabouts(session)))
        else:
            raise RunFailed(reason)

    def lose(self, reason: str, nodes: Sequence[str] = ()) -> None:
        """Go on after a lost group. Raises RunFailed after too many in this attempt without a commit between.

        `nodes` are those whose workers are gone (Ray's ids).
        """
        _, newest = next(committed(open_store(self.session.run.checkpoints_place)), (None, None))
        self.record("lost", error=reason, nodes=nodes, step=self.last_step(), committed=newest.step if newest else 0)
        lost = losses_since_progress(events_of(self.session.attempt))
        if lost > self.section.max_failures and not self.stop.cause:
            raise RunFailed(
                f"{reason} Workers were lost {lost} times without a commit between (cluster.max_failures = "
                f"{self.section.max_failures})."
            )
        self.say(f"{reason} Going on from the newest checkpoint ({lost} of {self.section.max_failures} restarts).")
        self.leave_out()

    def leave_out(self) -> None:
        """Name the nodes that failed again just now, and have the next groups placed elsewhere."""
        found = failing(events_of(self.session.attempt)) - self.room.failing
        for node in view({}) if found else []:
            if node.id in found:
                self.record("left_out", node=node.id, address=node.address)
                self.say(
                    f"The node {node.address} ({node.id}) lost workers twice within {STEPS} steps: "
                    "from now on it is used only where the others are not enough."
                )
        self.room.failing |= found

    def last_step(self) -> int:
        """The last logged step; 0 before it."""
        return max((line["step"] for line in last_lines(self.session.attempt.metrics)), default=0)

    def remaining(self) -> float:
        """Seconds of training left at the speed of the last logged step; none is known before it."""
        lines = [line for line in last_lines(self.session.attempt.metrics) if "step_seconds" in line]
        return float((self.session.total_steps - lines[-1]["step"] - 1) * lines[-1]["step_seconds"]) if lines else 0.0

    def await_room(self, *, first: bool) -> int | None:
        """Workers to start with; None where the run is stopped while it waits. Raises RunFailed as Room.wait."""
        patience = FREED_S
        if first or self.goal:
            # the room of the group that made way for a larger one is about to be free
            patience = self.section.wait_s if first else GOAL_S
        wanted, self.goal = self.goal or self.most, 0
        return self.room.wait(wanted, patience)

    def stopped(self) -> Outcome:
        """A stop at a moment when no workers are there to write it down: the newest commit stands."""
        _, newest = next(committed(open_store(self.session.run.checkpoints_place)), (None, None))
        outcome = Outcome.before_any_step(self.stop.cause or "time_limit")
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


def earliest(leaving: list[NodeView]) -> float | None:
    """Unix seconds by which the first of them is gone; None where nobody said."""
    return min((node.leaves_at for node in leaving if node.leaves_at), default=None)


def losses_since_progress(ledger: list[Line]) -> int:
    """Groups that were lost one after the other, with no checkpoint committed between."""
    at = [event["committed"] for event in ledger if event["event"] == "lost"]
    return sum(1 for _ in takewhile(lambda step: step == at[-1], reversed(at)))
