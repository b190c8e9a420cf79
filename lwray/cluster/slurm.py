"""What Slurm says of the job that this process runs in, and the one way in which a job puts itself back into the queue.

`python -m lwray.cluster.slurm CODE` is that way: the last command of a job whose run was preempted (exit code 75) or
ended by a signal.
"""

import os
import subprocess
import sys
import time
from dataclasses import dataclass

from lwray.errors import ExitCode

JOB, PARTITION, STEP = "SLURM_JOB_ID", "SLURM_JOB_PARTITION", "SLURM_STEP_ID"
ANSWER_S = 20.0
"""A controller that takes longer is taken for one that does not answer."""
NEAR_S = 300.0
"""A job with less time left has come to its time limit: notice of it is given earlier than it is needed."""
NEVER = ("None", "Unknown", "N/A")


@dataclass(frozen=True, slots=True)
class Preemption:
    """Slurm itself takes the nodes: `deadline` is when, in Unix seconds; None where it does not say."""

    deadline: float | None


def preemption() -> Preemption | None:
    """None outside Slurm, and for a job that is not being preempted."""
    return preemption_of(job())


def preemption_of(fields: dict[str, str]) -> Preemption | None:
    """Slurm moves the end of a job that it preempts to the end of the grace; a cancelled one is no more RUNNING."""
    if fields.get("JobState") != "RUNNING" or fields.get("PreemptTime", "None") in NEVER:
        return None
    return Preemption(end_of(fields))


def job_end() -> float | None:
    """Unix seconds at which Slurm ends the job; None outside Slurm, and where it has no limit."""
    return end_of(job())


def grace_s() -> float | None:
    """Seconds that the job's partition gives between the notice and the kill; None where nothing preempts its jobs."""
    if PARTITION not in os.environ:
        return None
    return grace_of(fields_of("partition", os.environ[PARTITION]))


def start_warning() -> str | None:
    """What to say at the start of a job that would not be put back into the queue when it is preempted; else None."""
    if JOB not in os.environ or PARTITION not in os.environ:
        return None
    name, partition = os.environ[PARTITION], fields_of("partition", os.environ[PARTITION])
    if (grace := grace_of(partition)) is None:
        return None
    if "REQUEUE" not in partition["PreemptMode"]:
        return (
            f"The partition {name} does not requeue what it preempts (PreemptMode={partition['PreemptMode']}): submit "
            "this job again yourself, or choose another partition."
        )
    if job().get("Requeue") == "0":
        return "Slurm will not start this job again after a preemption: submit it with --requeue."
    if grace == 0:
        return f"The partition {name} kills what it preempts without notice (GraceTime=0): {often()}"
    return None


def grace_warning(save_seconds: float) -> str | None:
    """What to say once a save is known to take longer than the partition's notice; else None."""
    grace = grace_s()
    if not grace or save_seconds < grace:
        return None
    return (
        f"A save takes {save_seconds:.0f} s, and the partition {os.environ[PARTITION]} gives {grace:.0f} s of notice "
        f"(GraceTime): {often()}"
    )


def often() -> str:
    return "what was not saved before is trained again. Save often: checkpoint.every=auto."


def hand_back(code: int) -> int:
    """Let Slurm start this job again where its machines were taken, and stay until it does; else `code`, at once.

    Slurm requeues a preempted job when it kills it, and not where the job has ended by itself, by whatever code: a
    signal may come before the driver knows what it means. At its time limit a job must ask. One that was cancelled is
    no more RUNNING and is never brought back.
    """
    fields = job()
    if preemption_of(fields):
        print("Preempted: waiting for Slurm to requeue this job.", flush=True)  # noqa: T201
        wait_for_the_end()
        return code
    end = end_of(fields)
    at_limit = code == ExitCode.PREEMPTED and end is not None and end - time.time() <= NEAR_S
    if at_limit and fields.get("JobState") == "RUNNING":
        print("At the time limit: this job goes back into the queue.", flush=True)  # noqa: T201
        asked = subprocess.run(["scontrol", "requeue", os.environ[JOB]], timeout=ANSWER_S, check=False)
        if asked.returncode == 0:
            wait_for_the_end()
    return code


def wait_for_the_end() -> None:
    """Slurm kills this process. One that is still here, because the job was cancelled, ends by itself."""
    while job().get("JobState", "RUNNING") == "RUNNING":
        time.sleep(5)


def job() -> dict[str, str]:
    """Fields of this process's job; empty outside Slurm, and where its controller does not answer."""
    return fields_of("job", os.environ[JOB]) if JOB in os.environ else {}


def fields_of(kind: str, name: str) -> dict[str, str]:
    """`scontrol show KIND NAME`, times in Unix seconds; empty where the controller does not answer."""
    environment = {**os.environ, "SLURM_TIME_FORMAT": "%s"}
    command = ["scontrol", "show", kind, "-o", name]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return {}
    return dict(pair.split("=", 1) for pair in done.stdout.split() if "=" in pair)


def end_of(fields: dict[str, str]) -> float | None:
    """EndTime, in Unix seconds."""
    text = fields.get("EndTime", "Unknown")
    return None if text in NEVER else float(text)


def grace_of(partition: dict[str, str]) -> float | None:
    """GraceTime in seconds of a partition whose jobs may be preempted."""
    if partition.get("PreemptMode", "OFF") == "OFF":
        return None
    return float(partition.get("GraceTime", "0"))


if __name__ == "__main__":
    sys.exit(hand_back(int(sys.argv[1])))
