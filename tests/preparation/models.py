"""Models whose kernels are prepared, by what is of note in each: `LLAMA`, and what others have instead."""

from __future__ import annotations

from typing import Any

import torch

from paged_attn.preparation.score_mod_ref import Named

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
LLAMA: dict[str, Any] = dict(
    heads=32, kv_heads=8, head_dim=128, page_size=16, dtype=BF16, cache_dtype=BF16, out_dtype=BF16, kv_layout="NHD",
    new=False, causal=True, window_size=(-1, -1), softcap=0.0, alibi=False, sinks=None, gate=None, qq_bias=0,
    query_positions=False, scales="number", return_lse=False,
)  # fmt: skip
LATENT: dict[str, Any] = dict(heads=16, kv_heads=1, head_dim=576, value_dim=512, latent=True)
MODELS = {
    "llama": LLAMA,
    "window and sinks": LLAMA | dict(heads=64, head_dim=64, window_size=(127, -1), sinks=BF16),
    "page 128, softcap": LLAMA | dict(page_size=128, softcap=30.0, head_dim=256, heads=16),
    "x-packed": LLAMA | dict(kv_layout="x"),
    "fp8": LLAMA | dict(cache_dtype=E4M3),
    "fp8, x-packed": LLAMA | dict(cache_dtype=E4M3, kv_layout="x"),
    "fp8, x-packed, new": LLAMA | dict(cache_dtype=E4M3, kv_layout="x", new=True),
    "int8 by token": LLAMA | dict(cache_dtype=torch.int8, scales="per_token"),
    "head_dim 64": LLAMA | dict(head_dim=64),
    "one KV head": LLAMA | dict(heads=64, kv_heads=1),
    "10 KV heads": LLAMA | dict(heads=40, kv_heads=10),
    "3 KV heads": LLAMA | dict(heads=24, kv_heads=3),
    "exact softcap": LLAMA | dict(heads=12, kv_heads=4, softcap=30.0, return_lse=True),
    "71 heads on one": LLAMA | dict(heads=71, kv_heads=1, head_dim=64),
    "48 heads on one": LLAMA | dict(heads=48, kv_heads=1),
    "96 heads on two, fp8": LLAMA | dict(heads=96, kv_heads=2, cache_dtype=E4M3),
    "values of another width": LLAMA | dict(heads=16, kv_heads=16, head_dim=192, value_dim=128, new=True),
    "head_dim 512": LLAMA | dict(heads=16, kv_heads=4, head_dim=512, value_dim=512),
    "latent": LLAMA | LATENT,
    "128 heads, latent, fp8, new": LLAMA | LATENT | dict(heads=128, cache_dtype=E4M3, new=True),
    "ragged page table": LLAMA | dict(page_indices=torch.int64),
    "pages of 4": LLAMA | dict(page_size=4),
    "pages of one, fp8, window": LLAMA
    | dict(page_size=1, page_indices=torch.int32, cache_dtype=E4M3, window_size=(1023, -1)),
    "a shard": LLAMA | dict(shard=(1, 4, 16), out_dtype=torch.float32, return_lse=True),
    "a user's function": LLAMA | dict(score_mod=Named("tests.support.score_mods", "relative", (torch.float32, 37))),
}
