"""The engine of lwray as the train function of plain Ray Train, which alone says what comes after a fault.

`python bench/outage/stock.py STORAGE WORKERS STEPS EVERY`: WORKERS is a number, or MIN-MAX for Ray's elastic group; a
checkpoint every EVERY steps. What the workers do is what they do under `lwray train`: each goes on from the newest
commit. Everything else is Ray's default, but that it tries again for ever.
"""

import os
import sys
from pathlib import Path

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from lwray.cluster.threads import thread_environment
from lwray.cluster.worker import run_worker
from lwray.config import load
from lwray.engine.session import Session
from lwray.faults import VARIABLE
from lwray.tracking.rundir import RunDir

TASK = Path(__file__).parents[2] / "examples" / "my_task.py"


def keys(steps: int, every: int) -> list[str]:
    """Of the run that every system trains."""
    return [
        f"task.name={TASK}:MyTask",
        "batch.global_size=12",
        f"train.steps={steps}",
        f"checkpoint.every_steps={every}",
        "eval.every_steps=0",
        "tracking.enabled=false",
    ]


def main(storage: Path, workers: str, steps: int, every: int) -> None:
    empty = storage / "run.toml"
    config = load(empty, ["run.name=run", *keys(steps, every)]).config
    run = RunDir(storage / "run")
    session = Session(config, run, run.new_attempt(), None, TASK, 1, "cpu", steps)
    low, dash, high = workers.partition("-")
    TorchTrainer(
        run_worker,
        train_loop_config={"session": session},
        scaling_config=ScalingConfig(
            num_workers=(int(low), int(high)) if dash else int(low), resources_per_worker={"CPU": 1}
        ),
        run_config=RunConfig(
            storage_path=str(storage / "ray"),
            failure_config=FailureConfig(max_failures=-1),
            worker_runtime_env={"env_vars": {**thread_environment(1), VARIABLE: os.environ[VARIABLE]}},
        ),
    ).fit()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
