"""The same file under every launcher: one process, torchrun, Ray; the `lm` task on `configs/invariance.toml`."""

import subprocess
import sys
from pathlib import Path

import pytest
from engine_ranks import losses_of, rows_of

REPOSITORY = Path(__file__).parent.parent
KEYS = ("tracking.enabled=false", "train.steps=60", "eval.every_steps=30", "eval.baseline=false")
INLINE = (sys.executable, "-m", "lwray")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "lwray")


def train(storage: Path, name: str, start: tuple[str, ...], *keys: str) -> None:
    command = [*start, "train", "configs/invariance.toml", f"--storage={storage}", f"run.name={name}", *KEYS, *keys]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_lm_run_is_the_same_inline_under_torchrun_and_on_ray(tmp_path: Path) -> None:
    train(tmp_path, "inline", INLINE, "--launcher=inline", "parallel.cpus_per_worker=1")
    train(tmp_path, "ddp", TORCHRUN, "--launcher=torchrun", "parallel.backend=ddp")
    train(tmp_path, "zero3", TORCHRUN, "--launcher=torchrun", "parallel.backend=zero3")
    train(tmp_path, "ray", INLINE, "parallel.backend=zero2", "parallel.workers=3")
    alone = losses_of(tmp_path, "inline")
    assert len(alone) == 60
    for name in ("ddp", "zero3", "ray"):
        worst = max(abs(a - b) / a for a, b in zip(alone, losses_of(tmp_path, name), strict=True))
        assert worst <= 1e-5, f"{name}: the losses differ by {worst:.2e}"
        assert rows_of(tmp_path, name) == rows_of(tmp_path, "inline")
