"""What `bench/recovery.py` makes of a run's files, and its bounds."""

import json
from pathlib import Path

import recovery
from outage.follow import Cost, Watched

OURS, STOCK, BARE = (system.name for system in recovery.SYSTEMS)


def costs(ours: Cost, stock_s: float = 80.0, bare_s: float = 10.0) -> dict[str, dict[str, Cost]]:
    """The same at every fault; a bare restart knows no growth."""
    stock, bare = Cost(stock_s, stock_s, 7, 2), Cost(bare_s, bare_s, 7, 2)
    faults = (recovery.WORKER, recovery.NODE, recovery.DRAIN, recovery.ADDED)
    return {
        OURS: dict.fromkeys(faults, ours),
        STOCK: dict.fromkeys(faults, stock),
        BARE: dict.fromkeys(faults[:-1], bare),
    }


def test_the_loss_of_a_node_is_bound_by_both_and_a_notice_by_the_steps_too() -> None:
    good = costs(Cost(15.9, 16.0, 0, 2))
    assert all(recovery.verdict(fault, good)[1] in (True, None) for fault in good[OURS])
    assert recovery.verdict(recovery.NODE, costs(Cost(16.1, 16.2, 4, 2))) == ("≤ 16.0", False)
    assert recovery.verdict(recovery.NODE, costs(Cost(15.9, 16.0, 4, 2), stock_s=40.0)) == ("≤ 10.0", False)
    for fault in (recovery.DRAIN, recovery.ADDED):
        assert recovery.verdict(fault, costs(Cost(5.0, 9.0, 1, 2)))[1] is False
        assert recovery.verdict(fault, costs(Cost(16.1, 20.0, 0, 2)))[1] is False


def test_a_cost_is_from_the_fault_or_the_last_step_after_it_and_counts_steps_done_again(tmp_path: Path) -> None:
    attempt = tmp_path / "attempts" / "0001"
    attempt.mkdir(parents=True)
    groups = [{"event": "group", "time": time, "workers": workers} for time, workers in ((1.0, 2), (20.0, 1))]
    (attempt / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in groups))
    steps = [{"step": step, "time": time} for step, time in ((0, 2.0), (1, 8.0), (2, 12.0), (1, 25.0))]
    (attempt / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    assert Watched(tmp_path).cost(10.0, 1) == Cost(pause_s=13.0, after_s=15.0, again=2, workers=1)
    assert Watched(tmp_path).cost(15.0, 1) == Cost(pause_s=10.0, after_s=10.0, again=2, workers=1)


def test_the_table_has_a_row_for_each_fault_and_says_what_holds() -> None:
    everything = costs(Cost(15.9, 16.0, 0, 2))
    caption = {"versions": {"ray": "2.60.0"}, "device": "cpu", "cores": 2, "date": "2026-01-01"}
    block = recovery.block(json.loads(json.dumps({**caption, "rows": recovery.rows(everything)})))
    assert "| SIGKILL of a node   | 15.9 (16.0, 0) | 80.0 (80.0, 7)" in block
    assert block.count("holds") == 3
    assert "| node added          | 15.9 (16.0, 0) | 80.0 (80.0, 7)     | -  " in block
