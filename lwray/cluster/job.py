"""What the driver can tell about the Ray job that it runs in."""

import os

JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray sets a variable of this very name for the command of a submitted job, and for nothing else."""
STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
DEFAULT_STOP_WAIT_S = 3


def stop_wait_warning() -> str | None:
    """What to say at the start of a submitted job that a stop would kill before it has committed; else None.

    Ray reads the stop wait in the process that started this one, whose environment is this one's.
    """
    if JOB_CONFIG not in os.environ:
        return None
    wait = os.environ.get(STOP_WAIT)
    remedy = (
        "Submit with --runtime-env cluster/runtime_env.yaml, or set it in the env_vars of your runtime environment."
    )
    if wait is None:
        return (
            f"{STOP_WAIT} is not set: `ray job stop` kills this run {DEFAULT_STOP_WAIT_S} s after asking it to stop, "
            f"which may be before its checkpoint is committed. {remedy}"
        )
    try:
        int(wait)
    except ValueError:
        # Ray converts it only when the job is stopped: what would have waited then fails, and takes this process along
        return (
            f"{STOP_WAIT} is {wait!r} and must be a whole number of seconds, or `ray job stop` does not wait. {remedy}"
        )
    return None
