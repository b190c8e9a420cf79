"""Runs the units of `lwray prepare` on a Ray cluster, as a Ray Data map."""

import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import ray
import ray.data

from lwray.data.prepare import UnitRunner, Work
from lwray.errors import UserError

BLOCKS_PER_CPU = 8


def ray_data_runner(num_cpus: int | None = None, *, progress: bool = False) -> UnitRunner:
    """A UnitRunner with one unit a CPU at a time, on all CPUs of the cluster.

    Joins `RAY_ADDRESS`, or starts Ray on this machine with `num_cpus` (all of them if None) and stops it at
    the end; a process that is connected already stays so. The data set's directory must be visible to every
    node. Raises UserError as the units do; units that finished before stay finished.
    """

    def run_units(task: Callable[[Work], None], works: Sequence[Work]) -> None:
        if not works:
            return
        ours = not ray.is_initialized()
        if ours:
            _connect(num_cpus)
        try:
            _map(task, works, progress)
        finally:
            if ours:
                ray.shutdown()

    return run_units


def _connect(num_cpus: int | None) -> None:
    if os.environ.get("RAY_ADDRESS"):
        ray.init()
    else:
        ray.init("local", num_cpus=num_cpus, include_dashboard=False)


def _map(task: Callable[[Work], None], works: Sequence[Work], progress: bool) -> None:
    ray.data.DataContext.get_current().enable_progress_bars = progress

    def run(row: dict[str, Any]) -> dict[str, Any]:
        # one unit has one CPU, and Ray runs as many units as there are CPUs
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        try:
            task(pickle.loads(row["work"]))
        except UserError as error:
            return {"error": str(error)}
        return {"error": ""}

    blocks = min(len(works), BLOCKS_PER_CPU * max(1, int(ray.cluster_resources().get("CPU", 1))))
    rows = ray.data.from_items([{"work": pickle.dumps(work)} for work in works], override_num_blocks=blocks)
    for row in rows.map(run, num_cpus=1).materialize().iter_rows():
        # as a value, because Ray wraps what a map raises in errors of its own and would retry
        if row["error"]:
            raise UserError(row["error"])
