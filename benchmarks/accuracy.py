"""Errors of results over each cache format.  `python -m benchmarks.accuracy [--output FILE]`, on a CPU.

`write_kv` writes float32 keys and values, and the reference reads them in float64, so an error is that of the format
alone.  The error is norm(results - wanted) / norm(wanted), where `wanted` are results over float32 keys and values.
A second measurement of int4 is as vLLM writes it: each head is first rotated by random signs and a Hadamard matrix,
which makes its dims alike.  Queries are rotated in the same way, and results are rotated back.  Seeded generators draw
the numbers:

- random: queries, keys and values are normal.
- outlier channels: as random, but 4 of 128 dims of a KV head's keys are 20 times as large, and in queries 1/20 as
  large.  4 dims of its values are 10 times as large.
- rotary keys: each dim of a KV head has a mean and a deviation of its own, both heavy-tailed, so that a few dims
  dominate.  NeoX's rotation with base 500000 follows.  Queries have the same means, weakened.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import paged_attn

HEADS, KV_HEADS, DIM, PAGE, KEYS, SEQS = 32, 8, 128, 16, 2048, 2
E4M3, E5M2, INT8, INT4 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
Data = tuple[Tensor, Tensor, Tensor]  # queries [seqs, heads, dim], keys and values [seqs, keys, kv_heads, dim], float32


def random_data(rng: torch.Generator) -> Data:
    """Normal numbers."""
    keys, values = torch.randn(2, SEQS, KEYS, KV_HEADS, DIM, generator=rng)
    return torch.randn(SEQS, HEADS, DIM, generator=rng), keys, values


def outlier_channels(rng: torch.Generator) -> Data:
    """Normal numbers with outliers: a few dims of each KV head's keys, and of its values, are larger in all tokens.

    Queries are smaller in the outlying dims of their keys.
    """
    q, keys, values = random_data(rng)
    for head in range(KV_HEADS):
        of_keys, of_values = torch.randperm(DIM, generator=rng)[:8].split(4)
        keys[:, :, head, of_keys] *= 20
        values[:, :, head, of_values] *= 10
        q.view(SEQS, KV_HEADS, -1, DIM)[:, head, :, of_keys] /= 20
    return q, keys, values


def rotary_keys(rng: torch.Generator) -> Data:
    """Keys whose dims have their own means and deviations, rotated by position; queries are at position KEYS."""
    q, keys, values = random_data(rng)
    means = torch.randn(KV_HEADS, DIM, generator=rng) * torch.randn(KV_HEADS, DIM, generator=rng).exp()
    deviations = torch.randn(KV_HEADS, DIM, generator=rng).mul(0.5).exp()
    keys = rotated(keys * deviations + means, torch.arange(KEYS))
    toward = means.repeat_interleave(HEADS // KV_HEADS, 0)
    q = rotated((0.5 * q + 0.05 * toward)[:, None], torch.tensor([KEYS]))[:, 0]
    return q, keys, values


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate rows [seqs, keys, heads, dim] by their positions [keys], in halves as in NeoX."""
    half = DIM // 2
    angles = positions[:, None].double() * 500000.0 ** (-torch.arange(half) / half)
    cos, sin = (f(angles).float()[:, None] for f in (torch.cos, torch.sin))
    lower, upper = x[..., :half], x[..., half:]
    return torch.cat([lower * cos - upper * sin, upper * cos + lower * sin], -1)


ROTATED = "int4, scales by token, rotated heads"
# Name -> (dtype of the cache, its scales).  Scales: None, "one" for the whole cache, or the dtype of scales by token.
FORMATS: dict[str, tuple[torch.dtype, Any]] = {
    "bfloat16": (torch.bfloat16, None),
    "e4m3, one scale": (E4M3, "one"),
    "e4m3, scales by token": (E4M3, torch.float32),
    "e5m2, scales by token": (E5M2, torch.float32),
    "int8, scales by token": (INT8, torch.float32),
    "int8, float16 scales by token": (INT8, torch.float16),
    "int4, scales by token": (INT4, torch.float32),
    ROTATED: (INT4, torch.float32),
}
DATA: dict[str, Callable[[torch.Generator], Data]] = {
    "random": random_data,
    "outlier channels": outlier_channels,
    "rotary keys": rotary_keys,
}


def cached(rows: Tensor, dtype: torch.dtype, kind: Any) -> tuple[Tensor, Any]:
    """Return (cache, its scale) after `write_kv` of the rows.

    The cache is [pages, page_size, kv_heads, dim], or dim / 2 bytes for int4.
    """
    slots = SEQS * KEYS
    cache = torch.zeros(slots // PAGE, PAGE, KV_HEADS, DIM // 2 if dtype == INT4 else DIM, dtype=dtype)
    scale: Any = kind
    if kind == "one":  # a perfect calibration: the largest number becomes the largest of the dtype
        scale = float(rows.abs().max()) / LARGEST[dtype]
    elif kind is not None:
        scale = torch.zeros(slots // PAGE, PAGE, KV_HEADS, dtype=kind)
    rows = rows.reshape(slots, KV_HEADS, DIM)
    new = rows.to(dtype) if kind is None else rows
    beside = torch.zeros_like(scale) if isinstance(scale, Tensor) else scale
    paged_attn.write_kv(new, new, cache, torch.zeros_like(cache), torch.arange(slots), k_scale=scale, v_scale=beside)
    return cache, scale


def results(q: Tensor, keys: Tensor, values: Tensor, dtype: torch.dtype, kind: Any) -> Tensor:
    """Return results in float64 over caches of a dtype, with scales of a kind (see FORMATS)."""
    (k_cache, k_scale), (v_cache, v_scale) = (cached(x, dtype, kind) for x in (keys, values))
    table = torch.arange(SEQS * KEYS // PAGE).view(SEQS, -1)
    out = paged_attn.reference.paged_attention(
        q.double(), k_cache, v_cache, table, torch.full((SEQS,), KEYS), k_scale=k_scale, v_scale=v_scale
    )
    assert isinstance(out, Tensor)
    return out


def rotation() -> Tensor:
    """Return an orthogonal matrix [dim, dim]: random signs, then a Hadamard matrix."""
    matrix = torch.ones(1, 1)
    while len(matrix) < DIM:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.randint(2, (DIM, 1), generator=torch.Generator().manual_seed(1)) * 2 - 1
    return signs * matrix / DIM**0.5


def errors(data: Callable[[torch.Generator], Data]) -> dict[str, float]:
    """The error of each format on one kind of data."""
    q, keys, values = data(torch.Generator().manual_seed(0))
    wanted = results(q, keys, values, torch.float32, None)
    found = {name: results(q, keys, values, *form) for name, form in FORMATS.items() if name != ROTATED}
    turn = rotation()
    found[ROTATED] = results(q @ turn, keys @ turn, values @ turn, *FORMATS[ROTATED]) @ turn.T.double()
    return {name: float((out - wanted).norm() / wanted.norm()) for name, out in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    sizes = dict(heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, keys=KEYS, seqs=SEQS)
    found = {name: {form: float(f"{x:.3g}") for form, x in errors(data).items()} for name, data in DATA.items()}
    report = dict(torch=torch.__version__, python=platform.python_version(), sizes=sizes, errors=found)
    text = json.dumps(report, indent=1)
    print(text)
    if given.output is not None:
        given.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
