"""What every node of a joined cluster must see, asked before anything is started."""

import os
import secrets
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lwray.errors import UserError
from lwray.store import open_store
from lwray.tracking.rundir import write_text
from lwray.tracking.storage import storage_answers

T = TypeVar("T")

SHOWN_WITHIN_S = 5
"""A network file system may show a new file late."""


def on_every_node(question: Callable[[], T]) -> dict[str, T]:
    """The answer of each live node, by its address."""
    ask = ray.remote(num_cpus=0)(question)
    alive = [node for node in ray.nodes() if node["Alive"]]
    pinned = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in alive]
    asked = [ask.options(scheduling_strategy=strategy).remote() for strategy in pinned]
    answers = {}
    for node, answer in zip(alive, asked, strict=True):
        # a node that dies is taken for alive for some seconds more
        with suppress(ray.exceptions.TaskUnschedulableError, ray.exceptions.NodeDiedError):
            answers[node["NodeManagerAddress"]] = ray.get(answer)
    return answers


def check_same_directory(storage: Path) -> None:
    """Raises UserError naming the nodes that cannot read a nonce which this process writes into `storage`."""
    nonce, path = uuid.uuid4().hex, storage / f".nonce-{os.getpid()}"

    def read() -> str:
        deadline = time.monotonic() + SHOWN_WITHIN_S
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.2)
        return path.read_text() if path.exists() else ""

    write_text(path, nonce)
    try:
        blind = [address for address, seen in on_every_node(read).items() if seen != nonce]
    finally:
        path.unlink()
    if blind:
        raise UserError(
            f"The storage {storage} is not the same directory on every node: {', '.join(blind)} cannot read what was "
            "written here. Use a shared file system."
        )


def check_reached(url: str) -> None:
    """Raises UserError naming the nodes that cannot read an object which this process writes below `url`."""
    store, name = open_store(url), f".nonce-{secrets.token_hex(8)}"

    def read() -> str:
        try:
            return "" if open_store(url).read(name) == b"nonce" else "it reads something else"
        except (OSError, UserError) as error:
            return str(error)

    with storage_answers(url):
        store.put(name, [b"nonce"])
        try:
            blind = {address: problem for address, problem in on_every_node(read).items() if problem}
        finally:
            store.remove(name)
    if blind:
        problems = "; ".join(f"{address}: {problem}" for address, problem in blind.items())
        raise UserError(
            f"The storage {url} cannot be used from every node: {problems}. Credentials and endpoint must be in the "
            "environment in which Ray was started on each node."
        )


def check_seen(data: Path) -> None:
    """Raises UserError naming the nodes on which the prepared `data` is not there."""

    def is_there() -> bool:
        return data.exists()

    blind = [address for address, seen in on_every_node(is_there).items() if not seen]
    if blind:
        raise UserError(f"The data {data} is not there on {', '.join(blind)}. Put it on a shared file system.")
