"""One group of Ray Train workers of a fixed size, from its start to its end."""

import threading
from collections.abc import Mapping, Sequence

import ray.exceptions
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2._internal.exceptions import (
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckTimeoutError,
)
from ray.train.v2.api.exceptions import PreemptionError

from lwray.cluster.place import Placement
from lwray.cluster.threads import thread_environment
from lwray.cluster.worker import run_worker
from lwray.engine.session import Session

COLLECTIVE_TIMEOUT_S = 600
NODE_ID = "ray.io/node-id"
"""The label that Ray gives to every node."""
GONE = (
    ray.exceptions.RayActorError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.OutOfMemoryError,
    WorkerHealthCheckTimeoutError,
    WorkerGroupStartupFailedError,
)
"""A worker or its machine is no more, or does not answer."""
BROKEN_LINK = ("closed by peer", "connection re", "broken pipe", "nccl", "timed out")
"""What the workers that stay say of one that is gone; its own end may be heard of later, or never."""


class Group:
    """Runs in a thread, so that signals reach the main one: Ray would end the run without a checkpoint."""

    def __init__(self, session: Session, placement: Placement, left_out: Sequence[str]) -> None:
        self.session = session
        self.failure: Exception | None = None
        trainer = make_trainer(session, placement, left_out)

        def fit() -> None:
            try:
                trainer.fit()
            except Exception as error:
                self.failure = error

        self._thread = threading.Thread(target=fit, name="ray-train", daemon=True)
        self._thread.start()

    def runs(self, seconds: float) -> bool:
        """Whether it still runs, after `seconds` at most."""
        self._thread.join(timeout=seconds)
        return self._thread.is_alive()


def worker_need(placement: Placement) -> dict[str, float]:
    """What Ray gives each worker."""
    return {"CPU": placement.cpus} | ({"GPU": 1.0} if placement.device == "cuda" else {})


def make_trainer(session: Session, placement: Placement, left_out: Sequence[str]) -> TorchTrainer:
    """A trainer under a name of this group alone, so that no state of an earlier one can stand in its way.

    No worker is placed on the nodes `left_out` (Ray's ids).
    Its size is fixed and it is never restarted by Ray: what comes after it is decided where the whole cluster is seen.
    """
    cuda = placement.device == "cuda"
    env = {**thread_environment(placement.threads), **session.config.env}
    return TorchTrainer(
        run_worker,
        train_loop_config={"session": session},
        torch_config=TorchConfig(backend="nccl" if cuda else "gloo", timeout_s=COLLECTIVE_TIMEOUT_S),
        scaling_config=ScalingConfig(
            num_workers=placement.workers,
            use_gpu=cuda,
            resources_per_worker=worker_need(placement),
            label_selector={NODE_ID: f"!in({', '.join(left_out)})"} if left_out else None,
        ),
        run_config=RunConfig(
            name=f"{session.config.run.name}-{session.attempt.number:04d}-{session.attempt.group:02d}",
            storage_path=str(session.attempt.path / "ray"),
            failure_config=FailureConfig(max_failures=0, controller_failure_limit=0, max_preemption_failures=0),
            worker_runtime_env={"env_vars": env},
        ),
    )


def had_no_room(error: Exception) -> bool:
    """Whether a group could not be placed in time: something else took the room that was seen."""
    return isinstance(getattr(error, "controller_failure", None), WorkerGroupStartupTimeoutError)


def is_machines_fault(error: Exception) -> bool:
    """Whether a group ended for lack of a worker or its machine, and not by what it computes."""
    if isinstance(error, (PreemptionError, *GONE)) or isinstance(getattr(error, "controller_failure", None), GONE):
        # of the workers, or of the controller itself, which Ray does not start again
        return True
    raised = [raised_by(each) for each in failures_of(error).values()]
    # what the others say of a broken link tells nothing where one of them has failed by itself
    return any(isinstance(each, GONE) for each in raised) or (bool(raised) and all(map(is_broken_link, raised)))


def failures_of(error: Exception) -> Mapping[int, Exception]:
    """What each rank that failed says."""
    failures: Mapping[int, Exception] = getattr(error, "worker_failures", {})
    return failures


def raised_by(failure: Exception) -> Exception:
    """What a worker raised, which Ray wraps."""
    raised: Exception = getattr(failure, "health_check_failure", failure)
    return raised


def is_broken_link(error: Exception) -> bool:
    """Whether a worker only says that another one is gone."""
    text = str(error).lower()
    return isinstance(error, RuntimeError | OSError) and any(sign in text for sign in BROKEN_LINK)


def explain(error: Exception, session: Session) -> str:
    """Why a group failed, in a sentence: by the rank that failed by itself, where there is one."""
    logs = f"Logs of each rank: {session.attempt.logs}."
    raised = [(is_broken_link(raised_by(each)), rank, raised_by(each)) for rank, each in failures_of(error).items()]
    if not raised:
        return f"Ray Train ended the run: {in_a_line(getattr(error, 'controller_failure', error))}. {logs}"
    _, rank, cause = min(raised, key=lambda each: each[:2])
    return f"Worker {rank} failed: {type(cause).__name__}: {in_a_line(cause)}. {logs}"


def in_a_line(error: BaseException) -> str:
    """What an error says in one line: the last, and of one about memory the first, which has the figures."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0 if isinstance(error, ray.exceptions.OutOfMemoryError) else -1].rstrip(".")
