"""One process without a wrapper, and DistributedDataParallel: every rank holds the whole state."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, get_total_norm

from lwray.checkpoint.fragment import shares
from lwray.checkpoint.read import Reader
from lwray.config.schema import OptimSection
from lwray.engine.backends.backend import MOMENTS, Backend, Fragments, make_optimizer, set_lr
from lwray.engine.module import LossModule
from lwray.engine.progress import optimizer_updates
from lwray.engine.world import World
from lwray.tasks.task import ParamGroup


class Plain(Backend):
    """The module itself and a torch optimiser."""

    name = "none"

    def __init__(self, module: LossModule, groups: Sequence[ParamGroup], optim: OptimSection, world: World) -> None:
        super().__init__(module)
        self.world = world
        self.clip = optim.clip
        self.named = {name: p for name, p in module.network.named_parameters() if p.requires_grad}
        self.optimizer = make_optimizer(module.network, groups, optim)

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def update(self, lr: float) -> Tensor:
        parameters = list(self.named.values())
        if self.clip:
            norm = clip_grad_norm_(parameters, self.clip)
        else:
            norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        set_lr(self.optimizer, lr)
        self.optimizer.step()
        self.discard()
        return norm

    def discard(self) -> None:
        """Drop the gradients, as after an update or a backward that must not count."""
        self.optimizer.zero_grad(set_to_none=True)

    def fragments(self) -> Iterator[Fragments]:
        named = list(self.named.items())
        for index, start, stop in shares([p.numel() for _, p in named], self.world.rank, self.world.size):
            name, parameter = named[index]
            state = self.optimizer.state[parameter]
            moments = {kind: state[kind].reshape(-1)[start:stop] for kind in MOMENTS if kind in state}
            yield Fragments(name, start, tuple(parameter.shape), parameter.detach().reshape(-1)[start:stop], moments)

    def restore(self, reader: Reader) -> None:
        updates = float(optimizer_updates(reader.manifest))
        for name, parameter in self.named.items():
            if f"exp_avg/{name}" not in reader.manifest.tensors:
                continue
            # in the parameter's own layout in memory: a fused optimiser walks both alike
            moments = {kind: torch.empty_like(parameter).copy_(reader.whole(f"{kind}/{name}")) for kind in MOMENTS}
            count = torch.tensor(updates, dtype=torch.float32, device=parameter.device)
            self.optimizer.state[parameter] = {"step": count, **moments}


class DDP(Plain):
    """Gradients are averaged over ranks, overlapped with the last backward of a step."""

    name = "ddp"

    def __init__(
        self, module: LossModule, groups: Sequence[ParamGroup], optim: OptimSection, world: World, parts: int
    ) -> None:
        super().__init__(module, groups, optim, world)
        self.grad_scale = float(world.size)
        self.ddp = DistributedDataParallel(
            module,
            device_ids=[world.device] if world.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
        )
        self.module = self.ddp
        self._parts = parts

    def micro_step(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.ddp.no_sync()

    def backward(self, loss: Tensor) -> None:
        if self._parts > 1 and self.ddp.require_backward_grad_sync:
            # DDP reduces what the last backward reaches: reach what only the other parts did
            loss = loss + 0.0 * torch.stack([p.reshape(-1)[:1].sum() for p in self.named.values()]).sum()
        super().backward(loss)
