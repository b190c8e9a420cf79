"""What runs in a Ray Train worker: join the group, train, leave the outcome where the driver reads it."""

import faulthandler
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch.distributed as dist

from lwray.cluster.arrive import on_this_machine
from lwray.cluster.hang import allow_stacks
from lwray.engine.session import Outcome, Session
from lwray.engine.stop import StopRequest
from lwray.engine.train import train
from lwray.engine.world import World, join_world
from lwray.errors import RunFailed, Superseded
from lwray.tracking.journal import Journal
from lwray.tracking.mirror import Mirror
from lwray.tracking.rundir import read_json, write_json
from lwray.tracking.turns import Turns

ARRIVAL = timedelta(days=1)
"""How long ranks wait for one whose machine still fetches its data: longer than any other wait."""

log = logging.getLogger("lwray")


def run_worker(loop_config: dict[str, Any]) -> None:
    """One rank. A RunFailed, which all ranks raise together, is left as the outcome; the rest is raised to Ray."""
    session: Session = loop_config["session"]
    world = join_world(session.device, session.threads, _device_index(session))
    session = on_this_machine(session, world.rank)
    if session.run.url and world.size > 1:
        dist.monitored_barrier(group=world.cpu_group, timeout=ARRIVAL)
    with mirrored(session, world):
        note_group(session, world)
        train_worker(session, world)


def note_group(session: Session, world: World) -> None:
    """Where each rank is, by Ray's node ids, and its process there: the driver looks after them."""
    allow_stacks()
    places = world.gather((ray.get_runtime_context().get_node_id(), os.getpid()))
    nodes, pids = zip(*places, strict=True)
    if world.rank == 0:
        with closing(Journal(session.attempt)) as journal:
            journal.event("group", group=session.attempt.group, workers=world.size, nodes=nodes, pids=pids)


@contextmanager
def mirrored(session: Session, world: World) -> Iterator[None]:
    """On an object store: keep this rank's log there, and at the end the outcome; look there for a request to stop."""
    if not session.run.url:
        yield
        return
    attempt, first, mirror = session.attempt, world.rank == 0, Mirror(session.run)
    mirror.take_over(log_of(session, world))
    push = (log_of(session, world), *([attempt.outcome] if first else []))
    with closing(Turns(mirror, push=push, pull=[attempt.stop] if first else [])):
        yield


def train_worker(session: Session, world: World) -> None:
    """Train, and leave the outcome."""
    _log_to(log_of(session, world))
    log.info("rank %d of %d on %s is process %d", world.rank, world.size, socket.gethostname(), os.getpid())
    stop = StopRequest()
    if world.rank == 0:
        # it alone: the others would ask for a stop whose cause it does not know yet
        stop.watch(session.attempt.stop)
    try:
        outcome: dict[str, Any] = asdict(train(session, world, stop))
    except RunFailed as error:
        log.exception("the run failed")
        outcome = {"superseded" if isinstance(error, Superseded) else "failed": str(error)}
    except Exception:
        log.exception("rank %d failed", world.rank)
        raise
    finally:
        stop.close()
    leave_outcome(session, world, outcome)


def log_of(session: Session, world: World) -> Path:
    return session.attempt.logs / f"rank-{world.rank:02d}.txt"


def leave_outcome(session: Session, world: World, outcome: dict[str, Any]) -> None:
    """Rank 0 writes it; the others have the same."""
    if world.rank == 0:
        write_json(session.attempt.outcome, outcome)


def read_outcome(path: Path) -> Outcome:
    """Raises RunFailed where the workers left a failure, or nothing."""
    if not path.exists():
        raise RunFailed(f"The workers ended without an outcome. Their logs lie in {path.parent / 'logs'}.")
    left = read_json(path)
    if "superseded" in left:
        raise Superseded(left["superseded"])
    if "failed" in left:
        raise RunFailed(left["failed"])
    return Outcome(**left)


def _device_index(session: Session) -> int | None:
    if session.device == "cpu":
        return None
    import ray.train.torch

    return int(ray.train.torch.get_device().index)


def _log_to(path: Path) -> None:
    """This rank's log, with stacks of a crash in C code; the file stays open as long as the process lives."""
    file = path.open("a", encoding="utf-8", buffering=1)
    faulthandler.enable(file)
    logging.basicConfig(
        stream=file, level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", force=True
    )
