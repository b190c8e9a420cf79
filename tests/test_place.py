"""How `[parallel]` becomes workers on nodes that are there."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lwray.cluster.place import Node, Placement, place_workers, this_machine
from lwray.config.schema import ParallelSection
from lwray.errors import UserError


def place(nodes: list[Node], **keys: Any) -> Placement:
    return place_workers(ParallelSection.model_validate(keys), nodes)


def cpu(*cores: float) -> list[Node]:
    return [{"CPU": count} for count in cores]


def gpu(*gpus: float, cpus: float = 16) -> list[Node]:
    return [{"CPU": cpus, "GPU": count} for count in gpus]


def test_alone_a_worker_has_all_the_cores() -> None:
    assert place(cpu(8)) == Placement(1, "cpu", 8.0)
    assert place(cpu(8)).threads == 8


def test_on_cpu_there_is_one_worker_a_node_with_all_its_cores() -> None:
    assert place(cpu(8, 8, 8)) == Placement(3, "cpu", 8.0)


def test_unlike_nodes_give_every_worker_the_same_cores() -> None:
    assert place(cpu(4, 8)) == Placement(2, "cpu", 4.0)


def test_workers_share_the_cores_of_a_node() -> None:
    assert place(cpu(8), workers=2) == Placement(2, "cpu", 4.0)
    assert place(cpu(8), workers=3) == Placement(3, "cpu", 2.0)
    assert place(cpu(4, 4), workers=4) == Placement(4, "cpu", 2.0)


def test_more_workers_than_cores_have_fractions_of_one_and_a_thread_each() -> None:
    placement = place(cpu(2), workers=3)
    assert placement == Placement(3, "cpu", 0.66)
    assert placement.threads == 1
    assert place(cpu(1), workers=8).cpus == 0.12


@given(cores=st.lists(st.integers(1, 16), min_size=1, max_size=4), workers=st.integers(1, 20))
def test_workers_that_are_placed_fit_on_the_nodes(cores: list[int], workers: int) -> None:
    nodes = cpu(*map(float, cores))
    if workers > 8 * sum(cores):
        with pytest.raises(UserError, match="at most"):
            place(nodes, workers=workers)
        return
    placement = place(nodes, workers=workers)
    assert placement.workers == workers
    assert sum(int(node / placement.cpus + 1e-9) for node in cores) >= workers


def test_a_worker_has_the_cores_that_it_is_given() -> None:
    assert place(cpu(8, 8), cpus_per_worker=2, workers=5) == Placement(5, "cpu", 2.0)
    assert place(cpu(8, 8), cpus_per_worker=2) == Placement(2, "cpu", 2.0)
    assert place(cpu(2), cpus_per_worker=0.5, workers=4) == Placement(4, "cpu", 0.5)


def test_too_many_workers_are_refused_with_what_there_is() -> None:
    said = r"asks for 7 workers, but there are 12 CPU cores on 2 node\(s\), at 2 a worker: at most 6"
    with pytest.raises(UserError, match=said):
        place(cpu(4, 8), cpus_per_worker=2, workers=7)
    with pytest.raises(UserError, match=r"asks for 40 workers, but there are 2 CPU cores: at most 16"):
        place(cpu(2), workers=40)


def test_a_worker_cannot_span_nodes() -> None:
    with pytest.raises(UserError, match=r"8 CPU cores on 2 node\(s\), at 5 a worker: at most 0"):
        place(cpu(4, 4), cpus_per_worker=5, workers=1)


@pytest.mark.parametrize("cores", [0, -1])
def test_no_cores_a_worker_are_refused(cores: float) -> None:
    with pytest.raises(UserError, match="more than 0 cores"):
        place(cpu(4), cpus_per_worker=cores)


def test_a_range_takes_as_many_as_there_are_between_its_ends() -> None:
    assert place(cpu(8), workers="2-4", cpus_per_worker=1).workers == 4
    assert place(cpu(3), workers=[2, 4], cpus_per_worker=1).workers == 3
    assert place(gpu(2, 3), workers="1-8").workers == 5
    with pytest.raises(UserError, match="asks for 2 workers"):
        place(cpu(1), workers="2-4", cpus_per_worker=1)


def test_on_gpus_there_is_one_worker_a_gpu_and_nodes_without_are_left_out() -> None:
    assert place(gpu(4, 4)) == Placement(8, "cuda", 4.0)
    assert place([*gpu(2), *cpu(64)]) == Placement(2, "cuda", 8.0)
    assert place(gpu(4), workers=2).workers == 2


def test_more_workers_than_gpus_are_refused() -> None:
    with pytest.raises(UserError, match=r"asks for 3 workers, but there are 2 GPUs .*at most 2"):
        place(gpu(2), workers=3)


def test_gpus_can_be_left_unused() -> None:
    assert place(gpu(4), device="cpu") == Placement(1, "cpu", 16.0)


def test_cuda_without_a_gpu_is_refused_with_the_way_out() -> None:
    with pytest.raises(UserError, match=r"parallel\.device = cuda, but there is no GPU here.*parallel\.device=cpu"):
        place(cpu(8), device="cuda")


def test_this_machine_has_cores() -> None:
    assert this_machine()["CPU"] >= 1
    assert place([this_machine()], device="cpu").workers == 1
