"""Drains this machine's Ray node when its cloud says that it will be taken away: `python -m lwray.cluster.spot`.

One runs beside `ray start` on every spot machine. It asks the machine's metadata server every few seconds; Ray itself
does not (2.60). SIGTERM, which a machine that shuts down and a pod that is deleted get, is a notice too.
"""

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

from ray.exceptions import RayError

from lwray.cluster.head import answers
from lwray.cluster.metadata import CLOUDS, SERVER, Cloud, find_cloud
from lwray.errors import ExitCode, RunFailed, UserError

GRACE = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
"""Ray's own name for the seconds between SIGTERM and the end of a node."""
START_S = 60.0
"""Ray on this machine may take so long to start."""
REQUEST_S = 10


def main(argv: Sequence[str] | None = None) -> int:
    """Runs until the node is drained; the exit code is 0 then, 1 where Ray did not take it, 2 for a bad start."""
    arguments = parser().parse_args(argv)
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: told.set())
    try:
        address, _ = find_node(arguments.address, arguments.node_id, START_S, told)
        cloud = None if arguments.cloud == "none" else find_cloud(arguments.metadata_url, arguments.cloud)
        say(f"Watching {cloud.name if cloud else 'for SIGTERM'}, for the Ray node of {address}.")
        reason, deadline = await_notice(cloud, arguments.interval, arguments.grace, told)
        # found again, because Ray may have been started anew since
        left = deadline - time.time() - arguments.interval
        address, node = find_node(arguments.address, arguments.node_id, left, threading.Event())
        drain(address, node, reason, deadline, arguments.interval)
    except (UserError, RunFailed) as error:
        print(f"lwray.cluster.spot: {error}", file=sys.stderr, flush=True)  # noqa: T201
        return ExitCode.BAD_INPUT if isinstance(error, UserError) else ExitCode.FAILED
    say(f"{reason}: Ray node {node} is draining; it has {deadline - time.time():.0f} s.")
    return ExitCode.FINISHED


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(prog="python -m lwray.cluster.spot", description=__doc__)
    made.add_argument("--cloud", choices=("auto", *CLOUDS, "none"), default="auto", help="none: SIGTERM alone")
    made.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help="between two looks, by default 2")
    made.add_argument(
        "--grace",
        type=float,
        default=float(os.environ.get(GRACE, "30")),
        metavar="SECONDS",
        help=f"what is left after SIGTERM, by default {GRACE}, or 30",
    )
    made.add_argument("--address", metavar="HOST:PORT", help="the Ray cluster, by default the one of this machine")
    made.add_argument("--node-id", metavar="HEX", help="where this machine has several nodes of the cluster")
    made.add_argument("--metadata-url", default=SERVER, metavar="URL", help=f"by default {SERVER}")
    return made


def await_notice(cloud: Cloud | None, interval: float, grace: float, told: threading.Event) -> tuple[str, float]:
    """Why the machine goes, and by when (Unix seconds). A metadata server that fails is asked again."""
    failing = False
    while not told.wait(interval):
        if cloud is None:
            continue
        try:
            deadline = cloud.deadline()
        except OSError as error:
            if not failing:
                say(f"{cloud.name} does not answer ({error}); it is asked again every {interval:g} s.")
            failing = True
            continue
        if failing:
            say(f"{cloud.name} answers again.")
            failing = False
        if deadline is not None:
            # it was given at some time since the look before
            return f"{cloud.name} takes this machine", deadline - interval
    return "SIGTERM", time.time() + grace


def find_node(address: str | None, node_id: str | None, patience: float, told: threading.Event) -> tuple[str, str]:
    """The cluster's address, and the id of its node on this machine.

    Raises UserError where there is none after `patience` seconds or SIGTERM, and where there are several.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            found, here = nodes_here(address)
        except (ConnectionError, RayError) as error:
            found, here, problem = "", [], f": {str(error).strip().splitlines()[0]}"
        else:
            problem = ""
        wanted = [node for node in here if node_id in (None, node)]
        if len(wanted) == 1:
            return found, wanted[0]
        if wanted:
            raise UserError(f"This machine has several nodes of the cluster: name one with --node-id {wanted[0]}.")
        if time.monotonic() >= deadline or told.wait(1.0):
            raise UserError(f"No Ray node runs on this machine{problem}. Start it with `ray start`, or give --address.")


def nodes_here(address: str | None) -> tuple[str, list[str]]:
    """The cluster's address, and the ids of its live nodes that are processes of this machine."""
    import ray
    from ray._private import services
    from ray.core.generated.gcs_pb2 import GcsNodeInfo

    found = services.canonicalize_bootstrap_address_or_die(address)
    if not answers(found):
        # Ray's own client takes most of a minute to say so
        raise ConnectionError(f"nobody answers at {found}")
    # of a cluster that is gone, processes may be left
    nodes = ray._raylet.GcsClient(address=found).get_all_node_info(timeout=REQUEST_S).values()
    alive = {node.node_id.hex() for node in nodes if node.state == GcsNodeInfo.GcsNodeState.ALIVE}
    return found, sorted(alive & set(services.find_node_ids()))


def drain(address: str, node: str, reason: str, deadline: float, interval: float) -> None:
    """Tell the cluster, until it has heard. Raises RunFailed once there is no time left, or where it refuses."""
    import ray
    from ray.core.generated.autoscaler_pb2 import DRAIN_NODE_REASON_PREEMPTION

    while True:
        try:
            accepted, refusal = ray._raylet.GcsClient(address=address).drain_node(
                node, DRAIN_NODE_REASON_PREEMPTION, reason, int(1000 * deadline), timeout=REQUEST_S
            )
        except RayError as error:
            accepted, refusal = False, str(error)
            if time.time() + interval < deadline:
                time.sleep(interval)
                continue
        if not accepted:
            raise RunFailed(f"{reason}, and Ray does not drain node {node}: {refusal}")
        return


def say(text: str) -> None:
    """For the log of the machine."""
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    raise SystemExit(main())
