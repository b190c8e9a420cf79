"""What holds for every test: one thread a process, nobody's own storage or cluster, the same examples."""

import os

from hypothesis import settings

# At import, not in a fixture: torch reads the thread count once, when a test module first imports it.
os.environ["OMP_NUM_THREADS"] = "1"
for name in ("LWRAY_STORAGE", "RAY_ADDRESS", "MLFLOW_TRACKING_URI"):
    os.environ.pop(name, None)

# No deadline: on a busy machine one example may be slow for no fault of its own; the cap on the test holds.
settings.register_profile("house", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("house")
