"""Few query tokens per sequence: drafts, trees of drafts, and batches of one or a few sequences."""

from __future__ import annotations

from typing import Any

from benchmarks.suites.batches import FP8, log_uniform, ragged, uniform

TREE: dict[str, Any] = dict(qq_bias=32, tree=True)
SPEC = (
    *(uniform(f"speculate b16 x 8192, q_len {n}", 16, n, 8192) for n in (1, 2, 4, 8, 16, 32, 64)),
    uniform("speculate b64 x 4096, q_len 4", 64, 4, 4096),
    ragged("speculate b32 x 4096, q_len 1..8", tuple(1 + i % 8 for i in range(32)), (4096,) * 32),
    ragged("speculate b16 x 256..8192, q_len 64", (64,) * 16, log_uniform(256, 8192, 16)),
    uniform("tree of 32, b1 x 8192", 1, 32, 8192, **TREE),
    uniform("tree of 32, b16 x 8192", 16, 32, 8192, **TREE),
    uniform("tree of 32, b1 x 65536, heads 8/1", 1, 32, 65536, heads=8, kv_heads=1, **TREE),
)
# One or a few sequences, most with few queries: several programs share a block's keys, so joining their pieces counts.
SINGLE = (
    *(uniform(f"{n} of 1 x {keys}", 1, n, keys) for keys in (2048, 8192, 32768) for n in (4, 16, 32, 64)),
    uniform("16 of 2 x 8192", 2, 16, 8192),
    uniform("128 of 1 x 16384", 1, 128, 16384),
    *(uniform(f"{n} of 1 x 32768, heads 8/1", 1, n, 32768, heads=8, kv_heads=1) for n in (1, 8, 64, 256)),
    *(uniform(f"1 x {keys}, heads 48/1", 1, 1, keys, heads=48, kv_heads=1) for keys in (2048, 8192, 32768, 131072)),
    uniform("4 x 8192, heads 48/1", 4, 1, 8192, heads=48, kv_heads=1),
    uniform("1 x 32768, heads 71/1, head_dim 64", 1, 1, 32768, heads=71, kv_heads=1, head_dim=64),
    uniform("16 of 1 x 8192, head_dim 64", 1, 16, 8192, head_dim=64),
    uniform("16 of 1 x 8192, head_dim 256", 1, 16, 8192, head_dim=256),
    uniform("64 of 1 x 16384, head_dim 256", 1, 64, 16384, head_dim=256),
    uniform("16 of 1 x 8192, e4m3 cache", 1, 16, 8192, **FP8),
    uniform("64 of 1 x 16384, e4m3 cache", 1, 64, 16384, **FP8),
    uniform("64 of 1 x 16384, softcap", 1, 64, 16384, softcap=30.0),
)
