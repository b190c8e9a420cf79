"""DeepSpeed ZeRO 1 to 3 around a torch optimiser; its fragments are read and written where they lie.

DeepSpeed's own checkpoints are not used: they refuse another number of workers at every stage.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lwray.checkpoint.read import Reader
from lwray.config.schema import OptimSection
from lwray.engine.backends.backend import MOMENTS, Backend, Fragments, make_optimizer, set_lr
from lwray.engine.module import LossModule
from lwray.engine.progress import optimizer_updates
from lwray.engine.world import World
from lwray.tasks.task import ParamGroup


class Zero(Backend):
    """Optimiser state (1), gradients (2) and parameters (3) partitioned over the ranks."""

    def __init__(
        self,
        stage: int,
        module: LossModule,
        groups: Sequence[ParamGroup],
        optim: OptimSection,
        world: World,
        micro_rows: int,
        autocast: torch.dtype | None,
        parts: int,
    ) -> None:
        super().__init__(module)
        deepspeed = _import_deepspeed(world)
        self.name = f"zero{stage}"
        self.stage = stage
        self._parts = parts
        self.world = world
        self.grad_scale = float(world.size)
        self.shapes = {n: tuple(p.shape) for n, p in module.network.named_parameters() if p.requires_grad}
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=module,
            optimizer=make_optimizer(module.network, groups, optim),
            config=_settings(stage, optim, micro_rows, autocast),
            dist_init_required=False,
        )
        self.module = self.engine

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def update(self, lr: float) -> Tensor:
        set_lr(self.optimizer.optimizer, lr)
        self.engine.step()
        self._forget_gradients()
        norm = self.engine.get_global_grad_norm()
        return norm if isinstance(norm, Tensor) else torch.tensor(norm)

    def _forget_gradients(self) -> None:
        """ZeRO-3 overwrites the last step's gradients in the first pass only: what that does not reach would add up."""
        if self.stage == 3 and self._parts > 1:
            self.optimizer.grad_partitions_flat_buffer.zero_()

    def fragments(self) -> Iterator[Fragments]:
        held = self._held_zero3() if self.stage == 3 else self._held_zero12()
        yield from held

    def restore(self, reader: Reader) -> None:
        if not reader.keys("exp_avg"):
            return
        self._create_moments(optimizer_updates(reader.manifest))
        for held in self.fragments():
            for kind, moment in held.moments.items():
                moment.copy_(reader.range(f"{kind}/{held.name}", held.start, moment.numel()))

    def _create_moments(self, updates: int) -> None:
        """DeepSpeed makes them in the first step; a restored run has them before it."""
        zero = self.optimizer
        flats = zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups
        for flat in flats:
            count = torch.tensor(float(updates), dtype=torch.float32, device=flat.device)
            zero.optimizer.state[flat] = {"step": count} | {kind: torch.zeros_like(flat) for kind in MOMENTS}

    def _held_zero12(self) -> Iterator[Fragments]:
        zero = self.optimizer
        for name, parameter in self._trainable():
            # DeepSpeed maps no parameter without elements, whose name belongs to the state
            mapping = getattr(parameter, "_hp_mapping", None)
            if mapping is None:
                if parameter.numel() == 0 and self.world.rank == 0:
                    yield Fragments(name, 0, self.shapes[name], parameter.detach().reshape(-1), {})
                continue
            # not `mapping.optim_fragment`: DeepSpeed 0.19 links it after the first group's step, empty for the others
            state = zero.optimizer.state[zero.single_partition_of_fp32_groups[mapping.param_group_index]]
            held = mapping.hp_fragment_address
            moments = {kind: state[kind].narrow(0, held.start, held.numel) for kind in MOMENTS if kind in state}
            yield Fragments(name, mapping.lp_fragment_address.start, self.shapes[name], mapping.hp_fragment, moments)

    def _held_zero3(self) -> Iterator[Fragments]:
        from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

        has_moments = any(kind in state for state in self.optimizer.optimizer.state.values() for kind in MOMENTS)
        for name, parameter in self._trainable():
            # partitions are padded to equal length: the last ones may reach beyond the parameter
            start = min(self.world.rank * parameter.ds_tensor.numel(), parameter.ds_numel)
            length = min(parameter.ds_tensor.numel(), parameter.ds_numel - start)
            moments = {}
            if has_moments:
                moments = {k: safe_get_local_optimizer_state(parameter, k).view(-1)[:length] for k in MOMENTS}
            local = safe_get_local_fp32_param(parameter).view(-1)[:length]
            yield Fragments(name, start, self.shapes[name], local, moments)

    def _trainable(self) -> Iterator[tuple[str, Any]]:
        return ((n, p) for n, p in self.inner.network.named_parameters() if n in self.shapes)


def _settings(stage: int, optim: OptimSection, micro_rows: int, autocast: torch.dtype | None) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": micro_rows,
        "gradient_accumulation_steps": 1,
        # reduce once, in step(): ranks may then accumulate what they like
        "managed_gradient_accumulation": False,
        "gradient_clipping": optim.clip,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "overlap_comm": False},
        "torch_autocast": {"enabled": autocast is not None, "dtype": "bfloat16"},
        "steps_per_print": 2**31,
    }


def _import_deepspeed(world: World) -> Any:
    """DeepSpeed reads its accelerator and the ranks from the environment at import."""
    if world.device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", str(world.size)))
    import deepspeed

    deepspeed.logger.setLevel("WARNING")
    # only inference uses it; it is compiled at the first start, and each rank of each start leaves 66 MiB of shared
    # memory behind that nobody frees (0.19.8, ops/csrc/cpu/comm/shm.cpp)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
