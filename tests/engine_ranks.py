"""Several runs of the engine, one after the other, in one group of processes that torchrun starts.

`python tests/engine_ranks.py RUNS.json` under torchrun (or alone, as one process); `train_on` starts it.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TASKS = HERE / "tasks"
TOY = f"{TASKS / 'toy.py'}:Toy"
TOY_KEYS = (
    f"task.name={TOY}",
    "batch.global_size=12",
    "optim.lr=0.01",
    "eval.every_steps=5",
    "train.steps=20",
    "data.log_ids=true",
)


@dataclass(frozen=True)
class EngineRun:
    """A run by name: the keys over the defaults."""

    name: str
    keys: tuple[str, ...]


def train_on(workers: int, storage: Path, runs: list[EngineRun]) -> None:
    """Train all of `runs` on `workers` processes, in their own directories of `storage`."""
    todo = storage / f"runs-{workers}.json"
    todo.parent.mkdir(parents=True, exist_ok=True)
    todo.write_text(json.dumps([[run.name, list(run.keys)] for run in runs]))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    command = [sys.executable, *(torchrun if workers > 1 else []), __file__, str(todo)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


def lines_of(storage: Path, name: str) -> dict[int, dict[str, Any]]:
    """Metrics by step, attempts merged."""
    from lwray.tracking.journal import merged_metrics
    from lwray.tracking.rundir import RunDir

    return {line["step"]: line for line in merged_metrics(RunDir(storage / name))}


def losses_of(storage: Path, name: str) -> list[float]:
    """The loss of every step, attempts merged."""
    return [line["loss"] for _, line in sorted(lines_of(storage, name).items()) if "loss" in line]


def rows_of(storage: Path, name: str) -> list[list[int]]:
    """The rows of every step, attempts merged."""
    from lwray.tracking.journal import merged_ids
    from lwray.tracking.rundir import RunDir

    return [line["ids"] for line in merged_ids(RunDir(storage / name))]


def weights_of(storage: Path, name: str) -> dict[str, Any]:
    """Every tensor of the newest checkpoint, by `kind/name`."""
    from lwray.checkpoint.find import pick, verify
    from lwray.checkpoint.read import Reader
    from lwray.store.local import LocalStore

    store = LocalStore(storage / name / "checkpoints")
    newest = pick(store, "newest")
    verify(store, newest)
    reader = Reader(store, newest)
    return {key: reader.whole(key) for key in reader.manifest.tensors}


def main(todo: Path) -> None:
    import torch.distributed as dist

    from lwray.config import load
    from lwray.engine.session import Session
    from lwray.engine.stop import StopRequest
    from lwray.engine.train import train
    from lwray.engine.world import join_world
    from lwray.tracking.rundir import RunDir

    world = join_world("cpu", 1)
    empty = todo.parent / "empty.toml"
    if world.rank == 0:
        empty.touch()
    world.barrier()
    for name, keys in json.loads(todo.read_text()):
        config = load(empty, [f"run.name={name}", *keys]).config
        run = RunDir(todo.parent / name)
        attempt = world.from_first(run.new_attempt() if world.rank == 0 else None)
        file = Path(config.task.name.rpartition(":")[0])
        train(Session(config, run, attempt, None, file, 1, "cpu"), world, StopRequest())
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
