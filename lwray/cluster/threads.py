"""Environment of CPU threads; it counts only before torch is imported."""

import os

SPIN = ("GOMP_SPINCOUNT", "1000")
"""How long a thread of GNU OpenMP spins for the others before it sleeps. Its default is so long that, beside any other
job on the machine, threads keep the core from the one they wait for; sleeping at once slows small models on a quiet
machine. This gives up little of either: `bench/threads.py` prints how much."""


def thread_environment(threads: int) -> dict[str, str]:
    """Variables of a worker with `threads` CPU threads; those the user has set are left alone."""
    wanted = {"OMP_NUM_THREADS": str(threads), SPIN[0]: SPIN[1]}
    return {name: os.environ.get(name, value) for name, value in wanted.items()}


def spin_briefly() -> None:
    """The same for this process, unless the user has set it."""
    os.environ.setdefault(*SPIN)
