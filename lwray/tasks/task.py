"""The protocol of a task: what a new workload writes, and all that the engine knows of it."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_model
from torch import Tensor, nn

from lwray.checkpoint.foreign import open_safetensors
from lwray.config import Config
from lwray.data.rows import Batch, Rows
from lwray.models.stored import stored_tensors

Split = Literal["train", "val"]


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """Parameters, by name, that share a share of the learning rate and of the weight decay."""

    names: tuple[str, ...]
    lr_scale: float = 1.0
    decay_scale: float = 1.0


class Task(ABC):
    """What is trained: its data, its network and its loss.

    The loss of a step is, over its terms, the sum of coefficient x (sum over the global batch) / (weight of the global
    batch): `losses` gives the sums by row, `weights` the weights by row, from the data alone. A row of weight zero must
    have loss zero and still be computed, so that every parameter gets a gradient on every worker.
    """

    terms: Mapping[str, float] = {"loss": 1.0}
    """Coefficient of each term of the loss."""
    row_group: int = 1
    """Consecutive rows that one worker must see together (a loss over several rows stays inside its group)."""
    parts: Sequence[str] = ("all",)
    """Forward and backward passes over each micro-batch, each with a graph of its own."""
    unit: str = "samples"
    """What throughput counts: `samples` or `tokens`."""

    def __init__(self, config: Config, data: Path | None) -> None:
        """`data` is what `prepare` returned, on storage that every worker sees."""
        self.config = config
        self.data = data

    @classmethod
    def prepare(cls, config: Config, cache: Path) -> tuple[Path | None, str]:
        """Run once, before any worker: (directory for the workers, fingerprint of the data). May raise UserError."""
        return None, ""

    @abstractmethod
    def rows(self, split: Split) -> Rows:
        """The training rows, or the held-out rows (which may be none)."""

    @abstractmethod
    def model(self) -> nn.Module:
        """The network, its weights a pure function of `run.seed`. Must also build under `torch.device("meta")`."""

    @abstractmethod
    def losses(self, model: nn.Module, batch: Batch, keys: Tensor, part: str) -> dict[str, Tensor]:
        """The sums of this part's terms, by row: float32 [rows], or [rows / row_group] for a loss over a group.

        `keys` (int64 [rows]) are for draws of the task's own: `lwray.models.draws.uniform(keys, place, shape)`.
        """

    def weights(self, batch: Batch) -> dict[str, Tensor]:
        """The weight of each row in each term, from the data alone: float64, as `losses`. One a row by default."""
        rows = len(next(iter(batch.values())))
        return {term: torch.ones(rows // self.row_group, dtype=torch.float64) for term in self.terms}

    def frozen(self) -> Mapping[str, nn.Module]:
        """Frozen networks that the loss uses, by name: moved to the device, never wrapped, saved or updated."""
        return {}

    def param_groups(self, model: nn.Module) -> list[ParamGroup]:
        """By default weight decay acts on matrices only."""
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        matrices = tuple(name for name, p in named if p.ndim >= 2)
        rest = tuple(name for name, p in named if p.ndim < 2)
        return [ParamGroup(matrices), ParamGroup(rest, decay_scale=0.0)]

    def check_exportable(self) -> None:
        """Raises UserError where `export` has no layout for this network."""

    def export(self, model: nn.Module, directory: Path) -> None:
        """Write the trained network, on the CPU, into the empty `directory`.

        A network of transformers or peft (of which that is the adapters) writes its own layout; any other is one
        model.safetensors under its plain names, which `safetensors.torch.load_model` reads.
        """
        if isinstance(model, _with_own_layout()):
            own: Any = model
            own.save_pretrained(directory)
        else:
            save_model(model, str(directory / "model.safetensors"))

    def from_huggingface(self, directory: Path) -> Mapping[str, Tensor]:
        """The weights of a directory in Hugging Face's layout under the network's names; as they are by default.

        Raises UserError where they are not this network's.
        """
        weights = open_safetensors(sorted(set(stored_tensors(directory).values())))
        return {name: weights.read(name) for name in weights.shapes}

    def units_per_row(self) -> int:
        """Tokens a row where `unit` is tokens, else 1."""
        return 1

    def baselines(self) -> dict[str, float]:
        """Losses of simple models over the same held-out rows, in nats, for the summary."""
        return {}

    def summary(self, val_loss: float) -> dict[str, float]:
        """What else a validation loss says, such as bits per byte."""
        return {}


def _with_own_layout() -> tuple[type, ...]:
    """Base classes of networks that write themselves; one whose library is not even imported is not in use."""
    named = (("transformers.modeling_utils", "PreTrainedModel"), ("peft", "PeftModel"))
    return tuple(getattr(sys.modules[module], name) for module, name in named if module in sys.modules)
