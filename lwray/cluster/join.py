"""Joining the Ray cluster of RAY_ADDRESS, or a sentence about why it lets nobody in."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray._private import utils

from lwray.cluster.head import answers
from lwray.errors import UserError


@contextmanager
def own_signals() -> Iterator[None]:
    """Ray takes SIGTERM for itself when it starts (2.60), and would end this process at the next one."""
    theirs = utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = theirs


def join(address: str) -> None:
    """Connect this process. Raises UserError."""
    if address.startswith("ray://"):
        raise UserError(
            f"RAY_ADDRESS = {address} is Ray Client, and a run would end with this process. Submit it as a job: "
            "ray job submit --address http://HEAD:8265 --working-dir . -- python -m lwray train …"
        )
    if not answers(address):
        raise UserError(f"No Ray cluster answers at RAY_ADDRESS = {address}. Is its head running?")
    try:
        with own_signals():
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise UserError(
            f"The Ray cluster at {address} answers and does not let this process in ({error}). It was probably started "
            "with another token: set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to its token, and RAY_AUTH_MODE=token."
        ) from None
    except RuntimeError as error:
        if "Version mismatch" not in str(error):
            raise
        raise UserError(f"{' '.join(str(error).split())}. Use the same versions here and on every node.") from None
