"""From `parallel.backend` to a Backend: the plainest that fits."""

import torch
from torch import nn

from lwray.config import Config
from lwray.engine.backends.backend import Backend
from lwray.engine.backends.plain import DDP, Plain
from lwray.engine.module import LossModule
from lwray.engine.world import World
from lwray.tasks.task import Task

LADDER = ("ddp", "zero1", "zero2", "zero3")
STATE_SHARE = 0.6
"""Of a device's memory, what weights, gradients and moments may take; the rest is for activations."""


def choose_backend(config: Config, network: nn.Module, world: World) -> str:
    """One worker needs no wrapper; `auto` climbs from ddp towards zero3 only as far as the device's memory demands."""
    if world.size == 1:
        return "none"
    if config.parallel.backend != "auto":
        return config.parallel.backend
    if world.device.type == "cpu":
        return "ddp"
    count = sum(p.numel() for p in network.parameters() if p.requires_grad)
    # the smallest device decides, so that all ranks choose alike
    room = STATE_SHARE * min(world.gather(torch.cuda.get_device_properties(world.device).total_memory))
    for name in LADDER:
        if state_bytes(name, count, world.size) <= room:
            return name
    return LADDER[-1]


def state_bytes(backend: str, parameters: int, workers: int) -> float:
    """Bytes a worker of fp32 weights (4), gradients (4) and two moments (8) (Rajbhandari et al., 2020)."""
    weights, gradients, moments = 4.0, 4.0, 8.0
    if backend in ("zero1", "zero2", "zero3"):
        # the flat fp32 copy of ZeRO's partition stands beside the weights
        moments = (moments + weights) / workers
    if backend in ("zero2", "zero3"):
        gradients /= workers
    if backend == "zero3":
        weights /= workers
    return parameters * (weights + gradients + moments)


def make_backend(name: str, module: LossModule, task: Task, config: Config, world: World, micro_rows: int) -> Backend:
    """Wrap `module`, whose weights are already those of the run."""
    groups = task.param_groups(module.network)
    match name:
        case "none":
            return Plain(module, groups, config.optim, world)
        case "ddp":
            return DDP(module, groups, config.optim, world, parts=len(task.parts))
        case _:
            from lwray.engine.backends.zero import Zero

            autocast = torch.bfloat16 if config.precision.mode == "bf16" else None
            return Zero(int(name[-1]), module, groups, config.optim, world, micro_rows, autocast, len(task.parts))
