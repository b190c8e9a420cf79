"""What the loop asks of a backend, and the canonical state that all of them write and read."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lwray.checkpoint.fragment import Fragment
from lwray.checkpoint.read import Reader
from lwray.config.schema import OptimSection
from lwray.data.rows import Batch
from lwray.engine.module import LossModule
from lwray.errors import RunFailed
from lwray.tasks.task import ParamGroup

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Fragments:
    """A range of one flattened parameter that this rank updates: views of its master weights and moments, 1-D."""

    name: str
    start: int
    shape: tuple[int, ...]
    param: Tensor
    moments: dict[str, Tensor]


class Backend(ABC):
    """Forward, backward and update of one LossModule, and its state under plain parameter names."""

    name: str
    grad_scale: float = 1.0
    """What the loss is multiplied by, because the backend divides the sum of gradients by it."""

    def __init__(self, module: LossModule) -> None:
        self.inner = module
        self.module: nn.Module = module
        self.parameters = sum(p.numel() for p in module.network.parameters() if p.requires_grad)

    def __call__(self, batch: Batch, keys: Tensor, part: str) -> dict[str, Tensor]:
        """The sums of the part's terms by row."""
        sums: dict[str, Tensor] = self.module(batch, keys, part)
        return sums

    def micro_step(self, last: bool) -> AbstractContextManager[None]:
        """Around the forward and backward of one micro-step; gradients are reduced in the last one only."""
        return nullcontext()

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this rank's share of the loss."""

    @abstractmethod
    def update(self, lr: float) -> Tensor:
        """Clip, step at learning rate `lr`, clear the gradients; the global gradient norm before clipping, a scalar."""

    @abstractmethod
    def fragments(self) -> Iterator[Fragments]:
        """What this rank holds and writes."""

    @abstractmethod
    def restore(self, reader: Reader) -> None:
        """Take optimiser moments and step from a checkpoint (weights were loaded before the module was wrapped)."""

    def state(self) -> Iterator[Fragment]:
        """This rank's share of the canonical state: fp32 master weights and moments."""
        for held in self.fragments():
            yield Fragment(f"param/{held.name}", held.start, held.param, held.shape)
            for kind, moment in held.moments.items():
                yield Fragment(f"{kind}/{held.name}", held.start, moment, held.shape)


def load_weights(network: nn.Module, reader: Reader) -> None:
    """Trainable parameters and persistent buffers of a network that no backend has wrapped yet.

    Raises RunFailed where the checkpoint's names are not the network's.
    """
    named = {name: p for name, p in network.named_parameters() if p.requires_grad}
    buffers = persistent_buffers(network)
    for kind, tensors in (("param", named), ("buffer", buffers)):
        there = set(reader.keys(kind))
        if there != set(tensors):
            differing = ", ".join(sorted(there ^ set(tensors))[:4])
            raise RunFailed(
                f"{reader.name} holds another network ({differing} … differ): the task's file has changed. "
                "Restore it, or choose another run.name."
            )
        for name, tensor in tensors.items():
            shape = reader.manifest.tensors[f"{kind}/{name}"].shape
            if shape != tensor.shape:
                raise RunFailed(
                    f"{reader.name} holds {name} of shape {list(shape)}, the network's is {list(tensor.shape)}: the "
                    "task's file has changed. Restore it, or choose another run.name."
                )
            with torch.no_grad():
                tensor.copy_(reader.whole(f"{kind}/{name}"))


def persistent_buffers(network: nn.Module) -> dict[str, Tensor]:
    """Buffers that belong to the state, by name."""
    saved = network.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in network.named_buffers() if name in saved}


def make_optimizer(network: nn.Module, groups: Sequence[ParamGroup], optim: OptimSection) -> torch.optim.AdamW:
    """Fused AdamW (Loshchilov & Hutter, 2019) over the groups; lr is set before every step."""
    named = dict(network.named_parameters())
    return torch.optim.AdamW(
        [
            {
                "params": [named[name] for name in group.names],
                "weight_decay": optim.weight_decay * group.decay_scale,
                "lr_scale": group.lr_scale,
            }
            for group in groups
            if group.names
        ],
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        fused=True,
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
