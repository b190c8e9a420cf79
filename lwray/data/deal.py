"""Law 1: how one global batch is dealt to workers and micro-steps without ever changing it."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from lwray.errors import UserError


@dataclass(frozen=True, slots=True)
class Deal:
    """`rows` a step in groups of `group`, over `workers`, `micro_rows` a forward pass.

    Groups go to ranks as evenly as they divide; every rank runs the same number of micro-steps.
    """

    rows: int
    group: int
    workers: int
    micro_rows: int

    @property
    def groups(self) -> int:
        return self.rows // self.group

    @property
    def micro_steps(self) -> int:
        most = -(-self.groups // self.workers) * self.group
        return -(-most // self.micro_rows)

    def share(self, rank: int) -> range:
        """The positions of the global batch that `rank` computes: a contiguous range of whole groups."""
        each, more = divmod(self.groups, self.workers)
        start = rank * each + min(rank, more)
        return range(start * self.group, (start + each + (rank < more)) * self.group)

    def micro_batches(self, rank: int) -> list[range]:
        """`micro_steps` ranges of positions, at most `micro_rows` long; the last ones may be short or empty."""
        share = self.share(rank)
        cuts = [min(share.start + i * self.micro_rows, share.stop) for i in range(self.micro_steps + 1)]
        return [range(start, stop) for start, stop in pairwise(cuts)]


def deal_batch(
    rows: int,
    group: int,
    workers: int,
    micro_size: int | Literal["auto"],
    accumulation: int | Literal["auto"],
    auto_rows: int,
) -> Deal:
    """A Deal from the keys of `[batch]`; `auto_rows` bounds the micro-batch where nothing is given.

    Raises UserError, with the arithmetic, when the numbers cannot make the global batch.
    """
    if rows % group:
        raise UserError(f"batch.global_size = {rows} is not a multiple of the task's row group of {group} rows.")
    groups = rows // group
    if workers > groups:
        raise UserError(
            f"{workers} workers cannot share {groups} row groups (batch.global_size = {rows}, {group} a group): "
            f"use at most {groups} workers or a larger global batch."
        )
    most = -(-groups // workers) * group
    if accumulation != "auto":
        micro = _micro_of_accumulation(rows, group, workers, micro_size, accumulation)
    elif micro_size != "auto":
        micro = micro_size
    else:
        micro = _even_micro(most // group, max(1, auto_rows // group)) * group
    if micro < 1 or micro % group:
        raise UserError(f"batch.micro_size = {micro_size} must be a positive multiple of the row group, {group}.")
    return Deal(rows, group, workers, min(micro, most))


def _micro_of_accumulation(
    rows: int, group: int, workers: int, micro_size: int | Literal["auto"], accumulation: int
) -> int:
    if accumulation < 1:
        raise UserError(f"batch.accumulation = {accumulation}: at least 1 micro-step a step, or auto.")
    if micro_size == "auto":
        if rows % (group * workers * accumulation):
            raise UserError(
                f"batch.accumulation = {accumulation} does not divide the batch: {rows} rows / {workers} workers / "
                f"{accumulation} micro-steps is no whole number of row groups of {group}. "
                "Leave it on auto, or change one of them."
            )
        return rows // (workers * accumulation)
    product = micro_size * accumulation * workers
    if product != rows:
        raise UserError(
            f"micro_size {micro_size} x accumulation {accumulation} x workers {workers} = {product}, but "
            f"batch.global_size = {rows}. Leave batch.accumulation on auto, or make the product {rows}."
        )
    return micro_size


def _even_micro(most: int, bound: int) -> int:
    """The smallest micro-batch that needs no more micro-steps than `bound` does: it pads the least."""
    steps = -(-most // min(bound, most))
    return -(-most // steps)
