"""From `[batch]` and `[train]` to numbers: rows a step, how they are dealt, how many steps there are."""

from lwray.config import Config
from lwray.data.deal import Deal, deal_batch
from lwray.data.rows import Rows
from lwray.errors import UserError
from lwray.tasks.task import Task

AUTO_MICRO_TOKENS = {"cpu": 8192, "cuda": 32768}
"""Tokens that an automatic micro-batch holds at most; a sample counts as 64."""


def check_batch_given(config: Config) -> None:
    """Raises UserError unless exactly one of the two keys says how large a step is."""
    if bool(config.batch.global_size) == bool(config.batch.global_tokens):
        raise UserError("Give one of batch.global_size (rows a step) and batch.global_tokens (tokens a step).")


def batch_rows(config: Config, task: Task) -> int:
    """Rows a step, from `batch.global_size` or `batch.global_tokens`. Raises UserError where they make no sense."""
    check_batch_given(config)
    size, tokens = config.batch.global_size, config.batch.global_tokens
    if size:
        return size
    each = task.units_per_row()
    if task.unit != "tokens":
        raise UserError("batch.global_tokens is for tasks that count tokens; give batch.global_size in rows.")
    if tokens % each:
        near = max(1, round(tokens / each)) * each
        raise UserError(
            f"batch.global_tokens = {tokens} is no whole number of rows of {each} tokens (model.context): "
            f"use {near}, or batch.global_size in rows."
        )
    return tokens // each


def deal_rows(config: Config, task: Task, workers: int, device: str) -> Deal:
    """How a global batch is dealt. Raises UserError, with the arithmetic, where `[batch]` contradicts itself."""
    each = task.units_per_row() if task.unit == "tokens" else 64
    bound = max(1, AUTO_MICRO_TOKENS[device] // each)
    batch = config.batch
    return deal_batch(batch_rows(config, task), task.row_group, workers, batch.micro_size, batch.accumulation, bound)


def count_steps(config: Config, task: Task, rows: Rows) -> int:
    """Optimiser steps of the whole run; `2ep` is as many as see every row twice."""
    return config.train.steps.steps(rows=len(rows), batch_rows=batch_rows(config, task))
