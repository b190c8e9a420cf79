"""What waiting CPU threads cost: tokens a second by wait policy, on a quiet machine and beside a busy neighbour.

`python bench/threads.py` trains `configs/quickstart.toml` for a few steps under each policy, in turn, several times
over, and prints medians with their spread as ratios to the policy that lwray sets; `--json FILE` keeps them with
versions.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from figures import REPOSITORY, environment

from lwray.cluster.threads import SPIN
from lwray.tracking.journal import merged_metrics
from lwray.tracking.rundir import RunDir, write_json

POLICIES = {
    "lwray": {},
    "library default": {"GOMP_SPINCOUNT": "300000"},
    "spin ten times longer": {SPIN[0]: str(10 * int(SPIN[1]))},
    "sleep at once": {"OMP_WAIT_POLICY": "PASSIVE", SPIN[0]: "0"},
}
STEPS = 24


def tokens_per_second(policy: dict[str, str], storage: Path) -> float:
    """Median over the steps of one short run in one process, the first steps left out."""
    keys = (f"train.steps={STEPS}", "train.log_every=1", "eval.every_steps=0", "eval.rows=1", "eval.baseline=false")
    command = [sys.executable, "-m", "lwray", "train", "configs/quickstart.toml", "--launcher=inline", "--fresh"]
    command += [f"--storage={storage}", "tracking.enabled=false", *keys]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    subprocess.run(command, cwd=REPOSITORY, env=environment | policy, check=True, capture_output=True, timeout=600)
    lines = merged_metrics(RunDir(storage / "quickstart"))
    rates = [line["tokens_per_second"] for line in lines if "loss" in line]
    return statistics.median(rates[4:])


@contextlib.contextmanager
def neighbour(busy: bool) -> Iterator[None]:
    """One process that keeps one core busy, or none."""
    if not busy:
        yield
        return
    spinner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        spinner.kill()
        spinner.wait()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--json", type=Path)
    options = arguments.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as storage:
        for busy in (False, True):
            rates: dict[str, list[float]] = {name: [] for name in POLICIES}
            with neighbour(busy):
                for _ in range(options.rounds):
                    for name, policy in POLICIES.items():
                        rates[name].append(tokens_per_second(policy, Path(storage)))
            for name in POLICIES:
                ratios = [a / b for a, b in zip(rates[name], rates["lwray"], strict=True)]
                rows.append(
                    {
                        "machine": "beside a busy core" if busy else "quiet",
                        "policy": name,
                        "tokens_per_second": statistics.median(rates[name]),
                        "ratio": statistics.median(ratios),
                        "lowest": min(ratios),
                        "highest": max(ratios),
                    }
                )
    print(f"{'machine':<20}{'policy':<24}{'tokens/s':>10}{'ratio to lwray':>16}{'spread':>16}")
    for row in rows:
        spread = f"{row['lowest']:.2f} to {row['highest']:.2f}"
        print(
            f"{row['machine']:<20}{row['policy']:<24}{row['tokens_per_second']:>10,.0f}{row['ratio']:>16.2f}{spread:>16}"
        )
    if options.json:
        write_json(options.json, {**environment("cpu"), "rounds": options.rounds, "rows": rows})


if __name__ == "__main__":
    main()
