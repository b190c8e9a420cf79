"""What asks a run to end: what a signal means here, and when the allocation ends."""

import os
import time

from lwray.cluster.slurm import NEAR_S, job_end, preemption
from lwray.engine.stop import Notice, by_name

STARTED = "LWRAY_STARTED"
"""Unix seconds at which the command began, where that was another process than the driver."""

LEAVE_S = 60.0
"""Before a Slurm job's end: Ray's, the summary's, and the request to be started again, which Slurm takes till then."""


def explain(signal_name: str) -> Notice:
    """`INT`, `TERM` or `USR1`. Slurm sends SIGTERM both to a job that somebody cancels and to one that it preempts."""
    if signal_name == "INT":
        return by_name(signal_name)
    if preempted := preemption():
        return Notice("preempted", preempted.deadline)
    if signal_name == "USR1" and (end := job_end()) and end - time.time() < NEAR_S:
        return Notice("time_limit", end - LEAVE_S)
    return by_name(signal_name)


def allocation_end(time_limit: float) -> float | None:
    """Unix seconds, by `cluster.time_limit` (0: not given) or else by the Slurm job; None where neither says."""
    if time_limit:
        return float(os.environ.get(STARTED, time.time())) + time_limit
    end = job_end()
    return end - LEAVE_S if end else None
