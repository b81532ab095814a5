"""fp8: e4m3 caches under bfloat16 queries, and queries, keys and values all in e4m3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from benchmarks.suites.batches import FP8, uniform
from benchmarks.suites.phases import MIXED, PREFILL
from tests.support.cases import E4M3

# Each case over a bfloat16 cache is followed by its twin over e4m3: their ratio counts.  The last has no twin.
FP8_CACHES = tuple(
    twin
    for case in (
        uniform("decode b1 x 131072", 1, 1, 131072),
        uniform("decode b64 x 4096", 64, 1, 4096),
        uniform("decode b256 x 4096", 256, 1, 4096),
        uniform("decode b64 x 4096, x-packed", 64, 1, 4096, layout="x"),
        uniform("decode b64 x 4096, head_dim 64", 64, 1, 4096, head_dim=64),
        uniform("speculate b16 x 8192, q_len 8", 16, 8, 8192),
        uniform("speculate b16 x 8192, q_len 8, head_dim 64", 16, 8, 8192, head_dim=64),
        uniform("speculate b16 x 8192, q_len 16", 16, 16, 8192),
        uniform("speculate b16 x 8192, q_len 8, x-packed", 16, 8, 8192, layout="x"),
        uniform("prefill b4 x 4096", 4, 4096, 4096),
        uniform("chunk of 2048 at 16384", 1, 2048, 16384),
        uniform("prefill b4 x 4096, head_dim 256", 4, 4096, 4096, heads=16, kv_heads=4, head_dim=256),
        PREFILL[-2],
        *MIXED[:2],
    )
    for twin in (case, replace(case, name=f"{case.name}, e4m3 cache", **FP8))
) + (uniform("decode b64 x 4096, e4m3 cache, scale per head", 64, 1, 4096, scales="per_head", **FP8),)
ALL_FP8: dict[str, Any] = dict(dtype=E4M3, cache_dtype=E4M3, out_dtype=torch.bfloat16)
FP8_SUITE = FP8_CACHES + (
    uniform("decode b64 x 4096, all e4m3", 64, 1, 4096, **ALL_FP8),
    uniform("speculate b16 x 8192, q_len 16, all e4m3", 16, 16, 8192, **ALL_FP8),
    uniform("prefill b4 x 4096, all e4m3", 4, 4096, 4096, **ALL_FP8),
    uniform("prefill b1 x 16384, all e4m3", 1, 16384, 16384, **ALL_FP8),
    uniform("chunk of 2048 at 16384, all e4m3", 1, 2048, 16384, **ALL_FP8),
    *(replace(case, name=f"{case.name}, all e4m3", **ALL_FP8) for case in MIXED[:2]),
)
