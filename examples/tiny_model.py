"""A decoder with random weights, small enough for a CPU, which the other examples run."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # (layer, q, k, v) -> out, all [tokens, heads, head_dim]


class Transformer:
    """A decoder with random weights: grouped-query heads, rotary positions, gated layers.  The caller passes attention.

    `reduce` is applied to products of which a process may have only a partial sum: tensor parallelism's all-reduce."""

    def __init__(
        self, layers: int = 2, heads: int = 4, kv_heads: int = 2, head_dim: int = 32, vocab: int = 211
    ) -> None:
        self.reduce: Callable[[Tensor], Tensor] = lambda x: x
        self.layers, self.heads, self.kv_heads, self.head_dim = layers, heads, kv_heads, head_dim
        rng, width = torch.Generator().manual_seed(0), heads * head_dim

        def random(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=rng) * shape[-2] ** -0.5).to(DEVICE)

        self.embedding, self.head = random(vocab, width) * vocab**0.5, random(width, vocab)
        self.qkv = random(layers, width, (heads + 2 * kv_heads) * head_dim)
        self.out = random(layers, width, width)
        self.gate_up, self.down = random(layers, width, 4 * width), random(layers, 2 * width, width)

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return the last layer's output [tokens, width]; pass the rows that need logits to `logits`."""
        x = self.embedding[tokens]
        for i in range(self.layers):
            qkv = (F.rms_norm(x, x.shape[-1:]) @ self.qkv[i]).unflatten(-1, (-1, self.head_dim))
            q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=-2)
            attended = attend(i, rotate(q, positions), rotate(k, positions), v)
            x = x + self.reduce(attended.flatten(-2) @ self.out[i])
            gate, up = (F.rms_norm(x, x.shape[-1:]) @ self.gate_up[i]).chunk(2, dim=-1)
            x = x + self.reduce((F.silu(gate) * up) @ self.down[i])
        return x

    def logits(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:]) @ self.head


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Apply rotary positions to x [tokens, heads, head_dim]."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] / 10000 ** (torch.arange(half, device=x.device) / half)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


def dense(model: Transformer, prompt: list[int], new_tokens: int) -> list[int]:
    """Return the prompt and its greedy tokens, without a cache: each token recomputes the whole sequence."""
    tokens = list(prompt)
    for _ in range(new_tokens):
        tokens.append(int(dense_logits(model, tokens).argmax()))
    return tokens


def dense_logits(model: Transformer, tokens: list[int]) -> Tensor:
    """Return the logits [vocab] after the last token."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    x = model(torch.tensor(tokens, device=DEVICE), torch.arange(len(tokens), device=DEVICE), attend)
    return model.logits(x[-1])
