"""Law 3: the learning rate as a pure function of the step."""

import math
from collections.abc import Callable

from lwray.config.schema import OptimSection
from lwray.config.units import Length

Schedule = Callable[[int], float]
"""Step (from 0) to learning rate."""


def make_schedule(optim: OptimSection, total_steps: int) -> Schedule:
    """The learning rate of each of `total_steps` optimiser steps: linear warm-up, then the named shape.

    Warm-up reaches the peak at step `warmup`: step k of it has (k + 1) / (warmup + 1) of the peak.
    """
    warmup = _length(optim.warmup_steps, total_steps)
    if optim.schedule == "onecycle":
        return _one_cycle(optim, total_steps, warmup)
    decay = _length(optim.decay_steps, total_steps)
    # share of the decay done when step k runs: 0 right after the warm-up, 1 at the last step
    after = max(1, total_steps - 1 - warmup)

    def shape(step: int) -> float:
        done = min(1.0, max(0.0, (step - warmup) / after))
        match optim.schedule:
            case "constant":
                return 1.0
            case "cosine":
                return optim.final_lr + (1.0 - optim.final_lr) * 0.5 * (1.0 + math.cos(math.pi * done))
            case "linear":
                return 1.0 - (1.0 - optim.final_lr) * done
            case "wsd":
                tail = (step - (total_steps - 1 - decay)) / max(1, decay)
                return 1.0 - (1.0 - optim.final_lr) * min(1.0, max(0.0, tail))
            case other:
                raise AssertionError(other)

    def schedule(step: int) -> float:
        if step < warmup:
            return optim.lr * (step + 1) / (warmup + 1)
        return optim.lr * shape(step)

    return schedule


def _length(length: Length, total_steps: int) -> int:
    return min(total_steps, length.steps(total_steps=total_steps))


def _one_cycle(optim: OptimSection, total_steps: int, warmup: int) -> Schedule:
    """Smith & Topin (2018), cosine-annealed, as torch's OneCycleLR with pct_start = warmup / total_steps."""
    first = optim.lr / optim.onecycle_div
    last = first / optim.onecycle_final_div
    peak = float(warmup) - 1.0
    end = total_steps - 1.0

    def anneal(start: float, stop: float, done: float) -> float:
        return stop + (start - stop) / 2.0 * (1.0 + math.cos(math.pi * done))

    def schedule(step: int) -> float:
        if step <= peak:
            return anneal(first, optim.lr, step / peak if peak else 1.0)
        return anneal(optim.lr, last, (step - peak) / (end - peak) if end > peak else 1.0)

    return schedule
