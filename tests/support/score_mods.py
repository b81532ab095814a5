"""score_mods for tests: each in Triton and, for the reference, in torch, with its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class UserMod(NamedTuple):
    """A function in Triton and in torch, and its arguments."""

    triton: Any
    torch: Callable[..., Tensor]
    args: Callable[[int, Any], tuple[Any, ...]]  # (heads, device) -> score_mod_args


def slopes(heads: int, device: Any) -> Tensor:
    return (2.0 ** -(8.0 * torch.arange(1, heads + 1) / heads)).to(device, torch.float32)


@triton.jit
def alibi(score, query_pos, key_pos, head, slopes):
    return score + tl.load(slopes + head) * (key_pos.to(tl.float32) - query_pos.to(tl.float32))


@triton.jit
def alibi_of_ints(score, query_pos, key_pos, head, slopes):
    return score + tl.load(slopes + head) * (key_pos - query_pos).to(tl.float32)


def torch_alibi(score: Tensor, query_pos: Tensor, key_pos: Tensor, head: Tensor, slopes: Tensor) -> Tensor:
    return score + slopes.double()[head] * (key_pos - query_pos)


@triton.jit
def softcap(score, query_pos, key_pos, head, cap):
    power = tl.minimum(score * (2 * 1.4426950408889634 / cap), 64.0)
    return cap - 2 * cap / (1 + tl.exp2(power))


def torch_softcap(score: Tensor, query_pos: Tensor, key_pos: Tensor, head: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(score / cap)


@triton.jit
def relative(score, query_pos, key_pos, head, table, size):
    """Add a learned bias for each head and distance; distances beyond the table have its last bias."""
    distance = tl.minimum(tl.abs(query_pos - key_pos), size - 1)
    return score + tl.load(table + head * size + distance).to(tl.float32)


def torch_relative(score: Tensor, query_pos: Tensor, key_pos: Tensor, head: Tensor, table: Tensor, size: int) -> Tensor:
    return score + table.double()[head, (query_pos - key_pos).abs().clamp(max=size - 1)]


@triton.jit
def chunks(score, query_pos, key_pos, head, size, bias_of_keys):
    """Show only keys of the query's chunk, and add biases that are loaded by the positions of key and query."""
    bias = tl.load(bias_of_keys + key_pos) + tl.load(bias_of_keys + query_pos)
    return tl.where(query_pos // size == key_pos // size, score + bias, float("-inf"))


def torch_chunks(
    score: Tensor, query_pos: Tensor, key_pos: Tensor, head: Tensor, size: int, bias_of_keys: Tensor
) -> Tensor:
    bias = bias_of_keys.double()[key_pos] + bias_of_keys.double()[query_pos]
    return (score + bias).masked_fill(query_pos // size != key_pos // size, -torch.inf)


@triton.jit
def curve(score, query_pos, key_pos, head, points):
    """Add a learned curve over scores, linear between its 9 points: addresses of loads depend on the score."""
    place = score * 4.0 + 4.0
    place = tl.where(place < 7.99, place, 7.99)  # scores of unseen keys may be NaN
    place = tl.where(place > 0.0, place, 0.0)
    left = place.to(tl.int32)
    begin = tl.load(points + left)
    return score + begin + (place - left.to(tl.float32)) * (tl.load(points + left + 1) - begin)


def torch_curve(score: Tensor, query_pos: Tensor, key_pos: Tensor, head: Tensor, points: Tensor) -> Tensor:
    place = (score * 4.0 + 4.0).clamp(0.0, 7.99)
    left = place.long()
    begin = points.double()[left]
    return score + begin + (place - left) * (points.double()[left + 1] - begin)


@triton.jit
def own_blocks(score, query_pos, key_pos, head):
    """Make a tensor inside the function, for which Gluon would need a layout."""
    return score + tl.sum(tl.arange(0, 4), 0)


def torch_own_blocks(score: Tensor, query_pos: Tensor, key_pos: Tensor, head: Tensor) -> Tensor:
    return score + 6


def _table(heads: int, device: Any) -> tuple[Any, ...]:
    rng = torch.Generator().manual_seed(heads)
    return torch.randn(heads, 37, generator=rng).to(device), 37


def _biases(heads: int, device: Any) -> tuple[Any, ...]:
    return 24, torch.randn(8192, generator=torch.Generator().manual_seed(0)).to(device)


MODS = {
    "alibi": UserMod(alibi, torch_alibi, lambda heads, device: (slopes(heads, device),)),
    "alibi of ints": UserMod(alibi_of_ints, torch_alibi, lambda heads, device: (slopes(heads, device),)),
    "softcap": UserMod(softcap, torch_softcap, lambda heads, device: (3.0,)),
    "relative": UserMod(relative, torch_relative, _table),
    "own blocks": UserMod(own_blocks, torch_own_blocks, lambda heads, device: ()),
    "curve": UserMod(curve, torch_curve, lambda heads, device: (torch.linspace(-1.0, 1.0, 9).square().to(device),)),
    "chunks": UserMod(chunks, torch_chunks, _biases),
}
