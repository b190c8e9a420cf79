"""A frozen base of transformers, whole or with trained adapters, on made tokens."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from lwray.data.rows import Batch
from lwray.tasks.task import Split, Task

BASE_SEED = 11


class MadeTokens:
    def __len__(self) -> int:
        return 40

    def fetch(self, ids: NDArray[np.int64]) -> Batch:
        return {"tokens": (torch.from_numpy(ids)[:, None] * 3 + torch.arange(9)) % 64}


def base_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(BASE_SEED)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=16,
            initializer_range=0.3,
        )
    )


class Adapted(Task):
    """`task.options.adapters = false` trains the base itself."""

    def rows(self, split: Split) -> Any:
        return MadeTokens()

    def model(self) -> nn.Module:
        base = base_model()
        if not self.config.task.options.get("adapters", True):
            return base
        from peft import LoraConfig, get_peft_model

        return get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))

    def losses(self, model: nn.Module, batch: Batch, keys: Tensor, part: str) -> dict[str, Tensor]:
        tokens = batch["tokens"]
        logits = model(input_ids=tokens[:, :-1]).logits.float()
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        return {"loss": loss.view(len(tokens), -1).mean(dim=1)}
