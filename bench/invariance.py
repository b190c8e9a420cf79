"""The central claim, proved: a run stays the run on any workers and backends, and after any kill.

`python bench/invariance.py` trains `configs/invariance.toml` in many ways, prints a table that compares them, and
writes it with versions to bench/results/invariance.json; the exit code is 1 where a bound fails. `--quick` takes fewer
steps and starts; `--write-docs` runs nothing, and puts the table of the JSON file into docs/invariants.md.
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from figures import environment
from proof.claims import Claim, plan
from proof.compare import Difference, difference, starts, wrong_starts
from proof.legs import REPOSITORY, LegFailed, travel
from proof.table import Row, block, write_docs

from lwray.tracking.rundir import RunDir, write_json

RESULTS = REPOSITORY / "bench/results/invariance.json"
DOCS = REPOSITORY / "docs/invariants.md"
FP32, BF16 = 1e-5, 1e-2


class Proof:
    """Runs the claims of a plan in `storage`, each once, and judges them."""

    def __init__(self, claims: Sequence[Claim], storage: Path, seed: int) -> None:
        self.claims = {claim.journey.name: claim for claim in claims}
        self.storage, self.seed = storage, seed
        self.rows: dict[str, Row] = {}

    def row(self, name: str) -> Row:
        """The result for the run of that name; what it is compared with and bounded by is run before it."""
        if name not in self.rows:
            claim = self.claims[name]
            needed = [claim.against] if claim.against else []
            if claim.kind == "close":
                needed += [c.journey.name for c in self.claims.values() if c.kind == "control" and c.bf16 == claim.bf16]
            for other in needed:
                self.row(other)
            self.rows[name] = self.measure(claim)
        return self.rows[name]

    def measure(self, claim: Claim) -> Row:
        """Take the run over its legs and compare it."""
        journey = claim.journey
        began = time.monotonic()
        # a draw of its own for each run, so that it is killed at the same steps whatever runs before it
        draw = random.Random(f"{self.seed}/{journey.name}")
        run = RunDir(self.storage / journey.directory)
        bound = self.bound(claim)
        kills: list[int] = []
        found, failure = Difference(0, (), 0.0, "-", ()), ""
        try:
            kills = travel(journey, self.storage, draw)
            other = RunDir(self.storage / self.claims[claim.against or journey.name].journey.directory)
            found = difference(run, other, journey.steps)
            failure = wrong_starts(run, journey.legs) or judge(claim, found, bound)
        except LegFailed as error:
            failure = str(error)
        return Row(
            run=journey.name,
            kind=claim.kind,
            against=claim.against,
            steps=journey.steps,
            legs=[str(leg) for leg in journey.legs],
            kills=kills,
            resumed=[start.from_step for start in starts(run)[1:]],
            rows=found.rows,
            worst=found.worst,
            at=found.at,
            bound=bound,
            tensors_differ=len(found.tensors),
            seconds=round(time.monotonic() - began, 1),
            failure=failure,
        )

    def bound(self, claim: Claim) -> float | None:
        """The largest relative difference that the claim allows; None where it claims none."""
        if claim.kind in ("whole", "control"):
            return None
        if claim.kind == "bits":
            return 0.0
        if claim.bf16:
            return BF16
        calm = max(row.worst for row in self.rows.values() if row.kind == "control" and not self.claims[row.run].bf16)
        return FP32 if calm < FP32 else 10 * calm


def judge(claim: Claim, found: Difference, bound: float | None) -> str:
    """What is wrong with the run, in one line; empty where the claim holds."""
    steps = claim.journey.steps
    if found.rows != steps:
        return f"in {steps - found.rows} of {steps} steps the model was fed other rows"
    if found.missing:
        return f"{len(found.missing)} losses are missing, the first is of step {found.missing[0]}"
    if bound is not None and not found.worst <= bound:
        return f"the losses differ by {found.worst:.1e}"
    if claim.kind == "bits" and found.tensors:
        return f"{len(found.tensors)} tensors differ, the first is {found.tensors[0]}"
    return ""


def document(rows: Sequence[Row], left_out: Sequence[str], device: str, seed: int, quick: bool) -> dict[str, Any]:
    """What the JSON file holds."""
    return {
        **environment(device),
        "seed": seed,
        "quick": quick,
        "seconds": round(sum(row.seconds for row in rows)),
        "left_out": list(left_out),
        "rows": [asdict(row) for row in rows],
    }


def prove(claims: Sequence[Claim], storage: Path, seed: int) -> list[Row]:
    """Every claim in order, with a line for each as it is done."""
    proof = Proof(claims, storage, seed)
    for name in proof.claims:
        row = proof.row(name)
        print(f"{name}: {row.cells()[-1]} ({row.seconds:.0f} s)", file=sys.stderr, flush=True)
        if row.failure:
            print(row.failure, file=sys.stderr, flush=True)
    return list(proof.rows.values())


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps and starts; writes no file unless --json")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: a GPU for each worker")
    parser.add_argument("--seed", type=int, default=0, help="of the steps at which runs are killed")
    parser.add_argument("--storage", type=Path, help="keep the runs there, a directory without runs of these names")
    parser.add_argument("--json", type=Path, help=f"default: {RESULTS.relative_to(REPOSITORY)}, for the whole on a CPU")
    parser.add_argument("--write-docs", action="store_true", help="run nothing; put the results into the documents")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here.")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 where a claim fails."""
    options = parse(argv)
    if options.write_docs:
        write_docs(options.json or RESULTS, DOCS)
        return 0
    claims = plan(options.quick, options.device)
    room = torch.cuda.device_count() if options.device == "cuda" else sys.maxsize
    left_out = [f"{c.journey.name} ({c.workers} GPUs)" for c in claims if c.workers > room]
    with tempfile.TemporaryDirectory() as temporary:
        storage = options.storage.resolve() if options.storage else Path(temporary)
        rows = prove([claim for claim in claims if claim.workers <= room], storage, options.seed)
    results = document(rows, left_out, options.device, options.seed, options.quick)
    print(block(results))
    if left_out:
        print(f"Left out, for lack of GPUs: {', '.join(left_out)}.")
    target = options.json or (RESULTS if options.device == "cpu" and not options.quick else None)
    if target:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_json(target, results)
    return 1 if any(row.failure for row in rows) else 0


if __name__ == "__main__":
    # so that a SIGTERM ends the processes of a leg as Ctrl-C does
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
