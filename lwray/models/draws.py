"""Law 3: every random draw in a model is a function of (seed, step, row, place), never of a generator's history.

A row's key is a 64-bit hash of (seed, step, position in the global batch); a draw hashes the key with the place in the
model and the element's index, by splitmix64's finaliser (Steele, Lea & Flood, "Fast Splittable Pseudorandom Number
Generators", 2014), so it does not depend on rank, micro-batch or what was drawn before.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lwray.errors import UserError

DROPOUT_PLACES = 1 << 32
"""Places from here on are dropout's; a task's own draws have those below."""

# 64-bit constants as the signed integers that torch.int64 wraps around in
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix64(x: Tensor) -> Tensor:
    """splitmix64's finaliser on int64 bit patterns, elementwise."""
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def row_keys(seed: int, step: int, positions: Tensor) -> Tensor:
    """One int64 key a row, from the run's seed, the step and the rows' positions in the global batch; shape [rows]."""
    state = mix64(torch.tensor(seed, device=positions.device) + _GAMMA)
    state = mix64((state ^ step) + _GAMMA)
    return mix64((state ^ positions) + _GAMMA)


def uniform(keys: Tensor, place: int, shape: Sequence[int]) -> Tensor:
    """float32 in [0, 1) of shape [rows, *shape]: the draw of `keys` (int64 [rows]) at a place in the model."""
    count = 1
    for size in shape:
        count *= size
    at_place = mix64((keys ^ place) + _GAMMA)
    index = torch.arange(count, device=keys.device) * _GAMMA
    bits = mix64(at_place[:, None] + index)
    return (_shift(bits, 40).float() * 2.0**-24).view(len(keys), *shape)


class RowKeys:
    """The keys of the micro-batch in flight, shared by a model's dropouts; the engine sets `current`."""

    def __init__(self) -> None:
        self.current: Tensor | None = None


class RowDropout(nn.Module):
    """Dropout over inputs [rows, …] whose mask is drawn from the rows' keys and this module's place."""

    def __init__(self, p: float, place: int, keys: RowKeys) -> None:
        super().__init__()
        # not `p`: attention code that hands a dropout's `p` to a kernel must fail, not drop a second time
        self.rate = p
        self.place = place
        self.keys = keys

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0.0:
            return x
        keys = self.keys.current
        if keys is None or len(keys) != x.shape[0]:
            rows = "no" if keys is None else len(keys)
            raise RuntimeError(
                f"Dropout got an input of shape {tuple(x.shape)} in a micro-batch of {rows} rows: "
                "its first dimension must be the row, so that its draw can be a function of the row."
            )
        keep = uniform(keys, self.place, x.shape[1:]) >= self.rate
        return x * keep.to(x.dtype) / (1.0 - self.rate)


def use_row_dropout(model: nn.Module) -> RowKeys:
    """Replace every nn.Dropout of `model` by a RowDropout, numbered in the order of the modules' names.
    A module that runs twice in one forward draws the same mask twice.

    Raises UserError for what could not be a function of the row: dropout inside an attention kernel or of whole
    channels, and statistics over a batch.
    """
    keys = RowKeys()
    place = DROPOUT_PLACES
    for parent_name, parent in list(model.named_modules()):
        _refuse_what_sees_the_batch(parent_name, parent)
        # not named_children: it names a module that is used twice only once
        for name, child in list(parent._modules.items()):
            if isinstance(child, nn.Dropout):
                setattr(parent, name, RowDropout(child.p, place, keys))
                place += 1
    return keys


def _refuse_what_sees_the_batch(name: str, module: nn.Module) -> None:
    p = getattr(module, "attention_dropout", None)
    if p is None and isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        p = module.dropout
    if isinstance(p, float) and p > 0.0:
        raise UserError(
            f"{name or 'the model'} ({type(module).__name__}) drops out inside a kernel (p = {p:g}), where the draw "
            "would depend on the worker and the micro-batch. Set it to 0; dropout on residual branches is fine."
        )
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        raise UserError(
            f"{name} is a {type(module).__name__}: its statistics depend on how the batch is dealt to workers and "
            "micro-batches. Use LayerNorm, GroupNorm or RMSNorm."
        )
    if isinstance(module, nn.modules.dropout._DropoutNd) and not isinstance(module, nn.Dropout) and module.p > 0:
        raise UserError(f"{name} is a {type(module).__name__}; only nn.Dropout can be drawn by row. Use nn.Dropout.")
