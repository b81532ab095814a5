"""A Llama-shaped decoder with random weights and fused projections; norms, rotation and gates may be compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # (layer, q, k, v) -> out, all [tokens, heads, head_dim]
EPSILON = 1e-5


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    layers: int
    width: int
    hidden: int  # width of the gated layer
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    rope_theta: float

    @property
    def parameters(self) -> int:
        attention = self.width * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.width * self.hidden) + 2 * self.vocab * self.width

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return bytes of a token's keys and values in all layers together."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype.itemsize


SHAPES = {
    "llama-3.1-8b": Shape(32, 4096, 14336, 32, 8, 128, 128256, 5e5),
    "llama-3.2-1b": Shape(16, 2048, 8192, 32, 8, 64, 128256, 5e5),
    "tiny": Shape(2, 128, 256, 4, 2, 32, 211, 1e4),
}


class Model:
    """Seeded weights on a device; `model(tokens, positions, attend)` returns the last layer's output, normalised."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device, longest: int, compiled: bool) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        generator = torch.Generator(device).manual_seed(0)

        def random(*sizes: int) -> Tensor:
            weight = torch.empty(sizes, dtype=dtype, device=device)
            return weight.normal_(std=sizes[-1] ** -0.5, generator=generator)

        rows = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.embedding, self.head = random(shape.vocab, shape.width), random(shape.vocab, shape.width)
        self.embedding *= shape.width**0.5
        self.qkv = [random(rows, shape.width) for _ in range(shape.layers)]
        self.out = [random(shape.width, shape.heads * shape.head_dim) for _ in range(shape.layers)]
        self.gate_up = [random(2 * shape.hidden, shape.width) for _ in range(shape.layers)]
        self.down = [random(shape.width, shape.hidden) for _ in range(shape.layers)]
        # In each layer one norm before attention and one before the gated layer; then the final norm.
        self.norms = torch.ones(2 * shape.layers + 1, shape.width, dtype=dtype, device=device)
        half = shape.head_dim // 2
        frequencies = shape.rope_theta ** -(torch.arange(half, device=device) / half)
        angles = torch.arange(longest, device=device)[:, None] * frequencies
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)  # [longest, head_dim] float32
        make: Callable[[Any], Any] = torch.compile if compiled else lambda function: function
        self.add_and_norm, self.rotate, self.gated = make(add_and_norm), make(rotate), make(gated)
        if compiled:
            self.compile()

    @torch.no_grad()
    def compile(self) -> None:
        """Compile for any number of tokens: torch.compile fixes the sizes of the first call that are not marked."""
        shape, qkv = self.shape, self.qkv[0].shape[0]

        def some(rows: int, *sizes: int, dtype: torch.dtype = self.dtype) -> Tensor:
            made = torch.zeros(rows, *sizes, dtype=dtype, device=self.device)
            if rows > 1:  # torch always compiles separately for one row
                torch._dynamo.mark_dynamic(made, 0)
            return made

        for n in (24, 1):
            self.add_and_norm(some(n, shape.width), some(n, shape.width), self.norms[0])
            positions = some(n, dtype=torch.int64)
            self.rotate(some(n, qkv), self.cos_sin, positions, shape.heads, shape.kv_heads)
            self.gated(some(n, 2 * shape.hidden))

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        shape, norms = self.shape, self.norms.unbind()
        x = self.embedding[tokens]
        x, h = self.add_and_norm(x, torch.zeros_like(x), norms[0])
        for i in range(shape.layers):
            qkv = F.linear(h, self.qkv[i])
            q, k = self.rotate(qkv, self.cos_sin, positions, shape.heads, shape.kv_heads)
            v = qkv[:, -shape.kv_heads * shape.head_dim :].unflatten(-1, (shape.kv_heads, shape.head_dim))
            attended = attend(i, q, k, v).flatten(-2)
            x, h = self.add_and_norm(x, F.linear(attended, self.out[i]), norms[2 * i + 1])
            h = F.linear(self.gated(F.linear(h, self.gate_up[i])), self.down[i])
            x, h = self.add_and_norm(x, h, norms[2 * i + 2])
        return h

    def greedy(self, h: Tensor) -> Tensor:
        """Return the likeliest next token of each row."""
        return F.linear(h, self.head).argmax(-1)


def add_and_norm(x: Tensor, more: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return (x + more, RMS norm of x + more)."""
    x = x + more
    wide = x.float()
    return x, (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)).to(x.dtype) * weight


def rotate(qkv: Tensor, cos_sin: Tensor, positions: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Return (q, k) of a fused projection, [tokens, heads or kv_heads, head_dim], rotated by their positions."""
    head_dim = cos_sin.shape[-1]
    q, k, _ = qkv.view(qkv.shape[0], heads + 2 * kv_heads, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    cos, sin = cos_sin[positions.clamp(min=0)][:, None].chunk(2, dim=-1)

    def turned(x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)

    return turned(q), turned(k)


def gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
