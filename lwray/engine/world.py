"""A worker's place among the others, and the group over which host decisions travel."""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class World:
    """Rank and size of the group; `cpu_group` (gloo) carries what the device need not be waited for."""

    rank: int
    size: int
    device: torch.device
    cpu_group: Any = None

    def sum(self, tensor: Tensor) -> Tensor:
        """`tensor` summed over all ranks, in place, on the device's own group; the same bits on every rank."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.cpu_group)

    def gather(self, value: Any) -> list[Any]:
        """A small picklable value of every rank, in the order of ranks, on every rank."""
        if self.size == 1:
            return [value]
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, value, group=self.cpu_group)
        return out

    def leave(self) -> None:
        """End the group, together: an interpreter that exits while its threads run may abort."""
        if self.size > 1:
            dist.destroy_process_group()

    def from_first(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.cpu_group)
        return box[0]


TIMEOUT = timedelta(minutes=10)


def join_world(device: str, threads: int, device_index: int | None = None) -> World:
    """The World of this process: alone, or by the RANK and WORLD_SIZE that a launcher set.

    `device` is `cpu` or `cuda` (number `device_index`, else the local rank); `threads` are the CPU threads of this
    worker. Starts torch.distributed unless the launcher already has.
    """
    torch.set_num_threads(threads)
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    index = local_rank if device_index is None else device_index
    place = torch.device("cuda", index) if device == "cuda" else torch.device("cpu")
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if size == 1:
        return World(0, 1, place)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if place.type == "cuda" else "gloo", timeout=TIMEOUT)
    return World(rank, size, place, dist.new_group(backend="gloo", timeout=TIMEOUT))
