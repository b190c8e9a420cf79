"""`lm`: a decoder trained from scratch to predict the next token."""

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lwray.config import Config
from lwray.data.bigram import witten_bell_nats
from lwray.data.prepare import open_prepared, prepare
from lwray.data.rows import Batch, TokenWindows
from lwray.data.tokenizer import prepared_tokenizer
from lwray.errors import UserError
from lwray.models.huggingface import class_for, from_huggingface, to_huggingface, write
from lwray.models.transformer import Shape, Transformer, default_ff_width
from lwray.tasks.task import Split, Task

BASELINE_TOKENS = 50_000_000


class LanguageModel(Task):
    """Next-token cross-entropy over windows of `model.context` tokens."""

    unit = "tokens"

    def __init__(self, config: Config, data: Path | None) -> None:
        super().__init__(config, data)
        if data is None:
            raise ValueError("the lm task trains on prepared data")
        self.prepared = open_prepared(data)
        self.shape = shape_of(config, self.prepared.vocab_size)

    @classmethod
    def prepare(cls, config: Config, cache: Path) -> tuple[Path | None, str]:
        """Tokenise the source (or open what is tokenised already); raises UserError if it makes no full window."""
        shape_of(config, config.data.vocab_size)
        prepared = prepare(config.data, cache)
        for name, tokens in (("training", prepared.train_tokens), ("held-out", prepared.val_tokens)):
            if tokens <= config.model.context:
                raise UserError(
                    f"The {name} text is {tokens} tokens, shorter than one window of model.context + 1 = "
                    f"{config.model.context + 1}. Use more text, a shorter context, or data.val_source."
                )
        return prepared.directory, prepared.fingerprint

    def rows(self, split: Split) -> TokenWindows:
        if split == "train":
            return TokenWindows(self.prepared.train, self.config.model.context)
        return TokenWindows(self.prepared.val, self.config.model.context, limit=self.config.eval.rows)

    def model(self) -> Transformer:
        model = Transformer(self.shape)
        if not model.embedding.weight.is_meta:
            model.initialise(self.config.run.seed)
        return model

    def losses(self, model: nn.Module, batch: Batch, keys: Tensor, part: str) -> dict[str, Tensor]:
        logits = model(batch["tokens"]).float()
        token_loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="none")
        return {"loss": token_loss.view_as(batch["targets"]).sum(dim=1)}

    def weights(self, batch: Batch) -> dict[str, Tensor]:
        rows, tokens = batch["targets"].shape
        return {"loss": torch.full((rows,), tokens, dtype=torch.float64)}

    def from_huggingface(self, directory: Path) -> dict[str, Tensor]:
        return from_huggingface(directory, self.shape)

    def check_exportable(self) -> None:
        class_for(self.shape)

    def export(self, model: nn.Module, directory: Path) -> None:
        """What `AutoModelForCausalLM` and `AutoTokenizer` load; no tokeniser where the data were given as tokens."""
        config, tensors = to_huggingface(self.shape, {name: p.detach() for name, p in model.named_parameters()})
        if self.prepared.tokenizer is not None:
            tokenizer = prepared_tokenizer(self.prepared.tokenizer)
            tokenizer.save_pretrained(directory, self.shape.context)
            config.eos_token_id = tokenizer.eot
        write(config, tensors, directory)

    def units_per_row(self) -> int:
        return self.config.model.context

    def baselines(self) -> dict[str, float]:
        """A Witten-Bell bigram over the targets of the held-out windows, each given the token before it."""
        if not self.config.eval.baseline or self.prepared.train_tokens > BASELINE_TOKENS:
            return {}
        train, val = self.rows("train").stream, self.rows("val")
        targets = len(val) * val.context
        return {"bigram": witten_bell_nats(train, val.stream, targets, self.prepared.vocab_size)}

    def summary(self, val_loss: float) -> dict[str, float]:
        """`bits_per_byte` of a loss in nats per token, by the held-out text's bytes per token (where known)."""
        if not self.prepared.val_bytes:
            return {}
        bytes_per_token = self.prepared.val_bytes / self.prepared.val_tokens
        return {"bits_per_byte": val_loss / math.log(2) / bytes_per_token}


def shape_of(config: Config, vocab: int) -> Shape:
    """The decoder that `[model]` describes. Raises UserError where heads do not divide the width."""
    model = config.model
    kv_heads = model.kv_heads or model.heads
    if model.width % model.heads or (model.width // model.heads) % 2:
        raise UserError(f"model.width = {model.width} over model.heads = {model.heads} must be an even head dimension.")
    if model.heads % kv_heads:
        raise UserError(f"model.heads = {model.heads} is no multiple of model.kv_heads = {kv_heads}.")
    return Shape(
        vocab=vocab,
        layers=model.layers,
        width=model.width,
        heads=model.heads,
        kv_heads=kv_heads,
        ff_width=model.ff_width or default_ff_width(model.width),
        context=model.context,
        activation=model.activation,
        qk_norm=model.qk_norm,
        tied=model.tied,
        dropout=model.dropout,
        rope_theta=model.rope_theta,
        norm_eps=model.norm_eps,
    )
