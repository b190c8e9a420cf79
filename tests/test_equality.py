"""Laws 1 to 4 on real processes: the same run on any backend and any number of workers."""

from pathlib import Path

import pytest
from engine_ranks import TASKS, TOY_KEYS, EngineRun, lines_of, losses_of, rows_of, train_on, weights_of

from lwray.data.order import rows_of_step
from lwray.tracking.journal import merged_ledger
from lwray.tracking.rundir import RunDir

BACKENDS = ("ddp", "zero1", "zero2", "zero3")
PRECISE, BF16 = 1e-5, 1e-2

ONE = EngineRun("one", TOY_KEYS)
DROPPING = EngineRun("dropping", (*TOY_KEYS, "task.options.dropout=0.2"))
AWKWARD = EngineRun("awkward", (*TOY_KEYS, f"task.name={TASKS / 'awkward.py'}:Awkward"))
HALF = EngineRun("bf16", (*TOY_KEYS, "precision.mode=bf16"))


def on(run: EngineRun, backend: str, *keys: str) -> EngineRun:
    return EngineRun(f"{run.name}-{backend}", (*run.keys, f"parallel.backend={backend}", *keys))


def shared_memory() -> set[Path]:
    return set(Path("/dev/shm").glob("deepspeed*"))


@pytest.fixture(scope="module")
def shared_before() -> set[Path]:
    return shared_memory()


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory, shared_before: set[Path]) -> Path:
    """One process, two workers on every backend, three and five (uneven shares of 12 rows) on DDP and ZeRO-2."""
    root = tmp_path_factory.mktemp("equality")
    train_on(1, root / "1", [ONE, DROPPING, HALF, AWKWARD])
    train_on(2, root / "2", [on(run, b) for run in (ONE, HALF, AWKWARD) for b in BACKENDS] + [on(DROPPING, "ddp")])
    train_on(
        3,
        root / "3",
        [on(ONE, b, "batch.micro_size=1") for b in ("ddp", "zero2")] + [on(DROPPING, "zero3"), on(AWKWARD, "ddp")],
    )
    return root


def agree(a: list[float], b: list[float], relative: float) -> None:
    assert len(a) == len(b) == 20
    worst = max(abs(x - y) / abs(x) for x, y in zip(a, b, strict=True))
    assert worst <= relative, f"the losses differ by {worst:.2e}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_on_two_workers_has_the_losses_of_one_process(storage: Path, backend: str) -> None:
    agree(losses_of(storage / "1", "one"), losses_of(storage / "2", f"one-{backend}"), PRECISE)


@pytest.mark.timeout(300)
def test_a_run_leaves_no_shared_memory_behind(storage: Path, shared_before: set[Path]) -> None:
    """DeepSpeed's buffers for inference outlive their process: some hundred starts fill a machine's memory."""
    assert lines_of(storage / "2", "one-zero2")
    assert shared_memory() <= shared_before


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["ddp", "zero2"])
def test_three_workers_with_padded_micro_batches_have_the_losses_of_one(storage: Path, backend: str) -> None:
    agree(losses_of(storage / "1", "one"), losses_of(storage / "3", f"one-{backend}"), PRECISE)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("workers", "backend"), [("2", "ddp"), ("3", "zero3")])
def test_dropout_is_the_same_on_any_number_of_workers(storage: Path, workers: str, backend: str) -> None:
    with_dropout = losses_of(storage / "1", "dropping")
    agree(with_dropout, losses_of(storage / workers, f"dropping-{backend}"), PRECISE)
    assert with_dropout != losses_of(storage / "1", "one")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("workers", "backend"), [*(("2", b) for b in BACKENDS), ("3", "ddp")])
def test_groups_parts_missing_targets_and_unreached_layers_are_the_same_everywhere(
    storage: Path, workers: str, backend: str
) -> None:
    agree(losses_of(storage / "1", "awkward"), losses_of(storage / workers, f"awkward-{backend}"), PRECISE)
    ledger = merged_ledger(RunDir(storage / workers / f"awkward-{backend}"))
    assert ledger[0]["frozen_unreachable"] == ["unreached.weight", "unreached.bias"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_is_autocast_over_fp32_weights_on_every_backend(storage: Path, backend: str) -> None:
    agree(losses_of(storage / "1", "bf16"), losses_of(storage / "2", f"bf16-{backend}"), BF16)
    assert losses_of(storage / "1", "bf16") != losses_of(storage / "1", "one")
    assert all(str(t.dtype) == "torch.float32" for t in weights_of(storage / "2", f"bf16-{backend}").values())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["2/one-ddp", "2/one-zero3", "3/one-ddp", "3/one-zero2"])
def test_the_validation_loss_is_exact_at_any_number_of_workers(storage: Path, name: str) -> None:
    # 17 held-out rows: no number of workers divides them
    workers, _, run = name.partition("/")
    alone = [line["val_loss"] for line in lines_of(storage / "1", "one").values() if "val_loss" in line]
    shared = [line["val_loss"] for line in lines_of(storage / workers, run).values() if "val_loss" in line]
    assert len(alone) == 4
    assert shared == pytest.approx(alone, rel=PRECISE)


@pytest.mark.timeout(300)
def test_the_rows_that_were_fed_are_those_of_the_order_on_every_layout(storage: Path) -> None:
    expected = [sorted(rows_of_step(step, 12, 50, 0).tolist()) for step in range(20)]
    for workers, name in (("1", "one"), ("2", "one-ddp"), ("2", "one-zero3"), ("3", "one-zero2")):
        assert rows_of(storage / workers, name) == expected


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_that_travels_over_backends_and_worker_counts_stays_the_run(storage: Path, tmp_path: Path) -> None:
    # each leg but the last runs out of its hours after a step or two and commits; the next one goes on from there
    legs = [(2, "zero1"), (3, "zero3"), (1, "none"), (2, "zero2"), (3, "ddp")]
    for workers, backend in legs:
        hours = "0" if (workers, backend) == legs[-1] else "1e-9"
        leg = EngineRun("traveller", (*TOY_KEYS, f"parallel.backend={backend}", f"train.max_hours={hours}"))
        train_on(workers, tmp_path, [leg])
    agree(losses_of(storage / "1", "one"), losses_of(tmp_path, "traveller"), PRECISE)
    assert rows_of(tmp_path, "traveller") == rows_of(storage / "1", "one")
    whole, travelled = weights_of(storage / "1", "one"), weights_of(tmp_path, "traveller")
    for key, tensor in whole.items():
        assert (tensor - travelled[key]).abs().max() <= 1e-4 * tensor.abs().max() + 1e-7, key


@pytest.mark.timeout(120)
def test_three_ddp_workers_that_start_again_have_the_bits_of_those_that_never_stopped(tmp_path: Path) -> None:
    # with two, a sum has the same bits in any order; with three, DDP's order of buckets shows
    keys = (*TOY_KEYS, "parallel.backend=ddp", "batch.micro_size=2")
    train_on(3, tmp_path, [EngineRun("whole", keys)])
    train_on(3, tmp_path, [EngineRun("again", (*keys, "train.max_hours=1e-9"))])
    train_on(3, tmp_path, [EngineRun("again", keys)])
    assert losses_of(tmp_path, "again") == losses_of(tmp_path, "whole")
    for key, tensor in weights_of(tmp_path, "whole").items():
        assert weights_of(tmp_path, "again")[key].equal(tensor), key
