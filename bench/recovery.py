"""Seconds from a fault to the first step after it: lwray, Ray Train's elastic group, a bare restart by Ray Train.

`python bench/recovery.py` trains a tiny task with each of them on a real Ray cluster of several nodes on this machine,
has workers and nodes killed, drained and added, and writes what it cost to bench/results/recovery.json; the exit code
is 1 where a bound fails. It takes about eight minutes. `--write-docs` runs nothing, and puts the table of the JSON file
into docs/performance.md.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from figures import REPOSITORY, RESULTS, caption, environment, fill, table
from outage.follow import Cost, GivenUp, Watched
from outage.nodes import Nodes, cluster
from outage.stock import keys

from lwray.faults import VARIABLE
from lwray.tracking.rundir import write_json

RESULT = RESULTS / "recovery.json"
DOCS = REPOSITORY / "docs" / "performance.md"
STEP_S, STEPS, EVERY = 0.2, 20_000, 10
"""A step takes so long, there is no end of them, and every so many are saved."""
WARM = 15
"""Steps of each group before the next fault."""
NOTICE_S = 20
WORKER, ADDED, DRAIN, NODE = "SIGKILL of a worker", "node added", "drain with 20 s", "SIGKILL of a node"
OF_STOCK, OF_BARE, SLACK_S = 0.25, 1.3, 3.0
"""Bounds of lwray's pause: a share of stock's at the loss of a node, and this many bare restarts and seconds."""


@dataclass(frozen=True, slots=True)
class System:
    """What is compared; `spares` are nodes beside those of its two workers."""

    name: str
    workers: str
    spares: int = 0

    def command(self, storage: Path) -> list[str]:
        """Trains `run` in `storage`."""
        if self.name != "lwray":
            script = str(REPOSITORY / "bench" / "outage" / "stock.py")
            return [sys.executable, script, str(storage), self.workers, str(STEPS), str(EVERY)]
        place = [f"--storage={storage}", "run.name=run", f"parallel.workers={self.workers}", "cluster.wait_s=0"]
        train = [sys.executable, "-m", "lwray", "train", str(storage / "run.toml")]
        return [*train, *place, "parallel.cpus_per_worker=1", *keys(STEPS, EVERY)]


SYSTEMS = (System("lwray", "1-3"), System("Ray Train, elastic", "1-3"), System("Ray Train, restart", "2", spares=1))


class Scene:
    """One system on its cluster, and one fault after the other."""

    def __init__(self, nodes: Nodes, run: Watched) -> None:
        self.nodes, self.run = nodes, run
        self.costs: dict[str, Cost] = {}

    def suffer(self, fault: str, strike: Callable[[dict[str, Any]], None]) -> None:
        """Let the last group train for a while, then strike at it."""
        groups = len(self.run.groups())
        self.run.trains(groups, WARM)
        began = time.time()
        strike(self.run.groups()[-1])
        self.costs[fault] = cost = self.run.cost(began, groups)
        print(f"  {fault}: {cost}", file=sys.stderr, flush=True)

    def kill_worker(self, group: dict[str, Any]) -> None:
        os.kill(group["pids"][-1], signal.SIGKILL)

    def add_node(self, group: dict[str, Any]) -> None:
        self.nodes.add()

    def drain(self, group: dict[str, Any]) -> None:
        """A notice, and at its end the node is gone."""
        began = time.monotonic()
        self.nodes.drain(group["nodes"][-1], NOTICE_S)
        time.sleep(max(0.0, began + NOTICE_S - time.monotonic()))
        self.nodes.kill(group["nodes"][-1])

    def kill_node(self, group: dict[str, Any]) -> None:
        self.nodes.kill(group["nodes"][-1])


def measure(system: System, storage: Path) -> dict[str, Cost]:
    """What each fault cost. Raises GivenUp."""
    print(system.name, file=sys.stderr, flush=True)
    (storage / "run.toml").write_text(f"[env]\n{VARIABLE} = '{pace()}'\n")
    with cluster(2 + system.spares) as nodes, (storage / "output.txt").open("w") as output:
        process = subprocess.Popen(
            system.command(storage),
            env={**nodes.environment, VARIABLE: pace()},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        scene = Scene(nodes, Watched(storage / "run"))
        try:
            scene.run.trains(1, 1)
            scene.suffer(WORKER, scene.kill_worker)
            if not system.spares:
                scene.suffer(ADDED, scene.add_node)
            scene.suffer(DRAIN, scene.drain)
            if system.spares:
                nodes.add()
            scene.suffer(NODE, scene.kill_node)
        except GivenUp as error:
            raise GivenUp(f"{system.name}: {error}\n{(storage / 'output.txt').read_text()[-3000:]}") from None
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return scene.costs


def pace() -> str:
    """What makes a step take its time."""
    return json.dumps([{"point": "step.data", "do": "delay", "seconds": STEP_S}])


def verdict(fault: str, costs: dict[str, dict[str, Cost]]) -> tuple[str, bool | None]:
    """The bound on lwray in words, and whether it holds."""
    ours, stock, bare = (costs[system.name] for system in SYSTEMS)
    restart = OF_BARE * bare.get(fault, bare[WORKER]).pause_s + SLACK_S
    if fault == WORKER:
        return "-", None
    if fault == NODE:
        bound = min(restart, OF_STOCK * stock[fault].pause_s)
        return f"≤ {bound:.1f}", ours[fault].pause_s <= bound
    return f"≤ {restart:.1f}, no step again", ours[fault].pause_s <= restart and ours[fault].again == 0


def rows(costs: dict[str, dict[str, Cost]]) -> list[dict[str, Any]]:
    """For the JSON file: a row for each fault."""
    found = []
    for fault in (WORKER, NODE, DRAIN, ADDED):
        bound, held = verdict(fault, costs)
        by_system = {name: asdict(of[fault]) for name, of in costs.items() if fault in of}
        found.append({"fault": fault, "bound": bound, "held": held, "costs": by_system})
    return found


def block(results: dict[str, Any]) -> str:
    """The table of a results file, and what it was measured on."""
    header = ["", *(system.name for system in SYSTEMS), "bound", "verdict"]
    lines = []
    for row in results["rows"]:
        cells = [cell(row["costs"].get(system.name)) for system in SYSTEMS]
        said = "-" if row["held"] is None else "holds" if row["held"] else "FAILS"
        lines.append([row["fault"], *cells, row["bound"], said])
    return f"{table(header, lines)}\n\n{caption(results)}."


def cell(cost: dict[str, Any] | None) -> str:
    """Seconds without a step, and in brackets seconds since the fault and steps done again."""
    return f"{cost['pause_s']:.1f} ({cost['after_s']:.1f}, {cost['again']})" if cost else "-"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 where a bound fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULT)
    parser.add_argument("--write-docs", action="store_true", help="run nothing; put the results into the documents")
    options = parser.parse_args(argv)
    if options.write_docs:
        fill(DOCS, "recovery", block(json.loads(options.json.read_text())))
        return 0
    costs = {}
    for system in SYSTEMS:
        with tempfile.TemporaryDirectory() as directory:
            costs[system.name] = measure(system, Path(directory))
    results = {**environment("cpu"), "rows": rows(costs)}
    print(block(results))
    options.json.parent.mkdir(exist_ok=True)
    write_json(options.json, results)
    return int(any(row["held"] is False for row in results["rows"]))


if __name__ == "__main__":
    # so that a SIGTERM ends the cluster as Ctrl-C does
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
