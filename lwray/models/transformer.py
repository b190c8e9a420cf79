"""A decoder: RMSNorm pre-norm, RoPE, SwiGLU or squared ReLU, grouped-query attention, tied or untied head."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lwray.hashing import hash_words

# Shapes: B rows, T tokens, D width, H heads, K key/value heads, E head dimension, V padded vocabulary


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a decoder. `vocab` is the number of tokens; the tables are padded to a multiple of 128."""

    vocab: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    ff_width: int
    context: int
    activation: str = "swiglu"
    qk_norm: bool = False
    tied: bool = True
    dropout: float = 0.0
    rope_theta: float = 10000.0
    norm_eps: float = 0.0

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab // 128) * 128

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


def default_ff_width(width: int) -> int:
    """8/3 of the width rounded up to a multiple of 64: three SwiGLU matrices weigh as much as two of 4x width."""
    return -(-8 * width // 3 // 64) * 64


def norm(features: int, shape: Shape) -> nn.RMSNorm:
    """RMS normalisation (Zhang & Sennrich, 2019); without an epsilon given, torch takes that of the dtype."""
    return nn.RMSNorm(features, eps=shape.norm_eps or None)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and shared key/value heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.query = nn.Linear(shape.width, shape.heads * shape.head_dim, bias=False)
        self.key = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=False)
        self.value = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=False)
        self.out = nn.Linear(shape.heads * shape.head_dim, shape.width, bias=False)
        self.query_norm = norm(shape.head_dim, shape) if shape.qk_norm else nn.Identity()
        self.key_norm = norm(shape.head_dim, shape) if shape.qk_norm else nn.Identity()

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        rows, tokens, _ = x.shape
        q = self.query(x).view(rows, tokens, self.heads, self.head_dim)
        k = self.key(x).view(rows, tokens, self.kv_heads, self.head_dim)
        v = self.value(x).view(rows, tokens, self.kv_heads, self.head_dim)
        q, k = rotate(self.query_norm(q), *rope), rotate(self.key_norm(k), *rope)
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.kv_heads != self.heads,
        )
        out: Tensor = self.out(attended.transpose(1, 2).reshape(rows, tokens, -1))
        return out


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, 2020) or squared ReLU (So et al., 2021)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.ff_width, bias=False) if shape.activation == "swiglu" else None
        self.up = nn.Linear(shape.width, shape.ff_width, bias=False)
        self.down = nn.Linear(shape.ff_width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        hidden = F.silu(self.gate(x)) * up if self.gate is not None else F.relu(up).square()
        out: Tensor = self.down(hidden)
        return out


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = norm(shape.width, shape)
        self.attention = Attention(shape)
        self.ff_norm = norm(shape.width, shape)
        self.ff = FeedForward(shape)
        self.attention_dropout = nn.Dropout(shape.dropout)
        self.ff_dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), rope))
        out: Tensor = x + self.ff_dropout(self.ff(self.ff_norm(x)))
        return out


class Transformer(nn.Module):
    """Token ids [B, T] to logits [B, T, V]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.padded_vocab, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = norm(shape.width, shape)
        self.head = None if shape.tied else nn.Linear(shape.width, shape.padded_vocab, bias=False)
        cos, sin = rope_tables(shape.context, shape.head_dim, shape.rope_theta)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Normalised hidden states [B, T, D] of token ids [B, T], T at most the context."""
        length = tokens.shape[1]
        rope = (self.rope_cos[:length], self.rope_sin[:length])  # type: ignore[index]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, rope)
        out: Tensor = self.norm(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., D]."""
        return F.linear(hidden, self.embedding.weight if self.head is None else self.head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(self.hidden(tokens))

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Normal weights, each from a generator of (seed, its name), so that no order of creation matters.

        Standard deviation 0.02, and 0.02 / sqrt(2·layers) where a branch joins the residual stream (Radford et al.,
        2019).
        """
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                nn.init.ones_(parameter)
                continue
            joins_residual = name.endswith(("attention.out.weight", "ff.down.weight"))
            std = 0.02 / math.sqrt(2 * self.shape.layers) if joins_residual else 0.02
            generator = torch.Generator().manual_seed(hash_words(seed, *name.encode()) >> 1)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def rope_tables(context: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [context, head_dim / 2], of the rotary embedding (Su et al., 2021)."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = torch.outer(torch.arange(context, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of the last dimension of x [B, T, heads, E] by its position's angles [T, E / 2]."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None, :].to(x.dtype), sin[:, None, :].to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
