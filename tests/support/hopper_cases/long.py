"""Long queries, in blocks of many rows."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.cases import E4M3
from tests.support.hopper_cases.parts import (
    CAPPED,
    MIXED,
    NEW,
    PREFILLS,
    WIDE,
    ragged,
)

# Padding gives enough rows for the planner to take the queries for even.
ALL_LENGTHS = MIXED | dict(bounds=True, padding=6400)

SHORT = ragged(*[(393, 900)] * 3, (393, 393), (393, 700)) | dict(bounds=True)  # in tiles of 64 keys

# Cases that are planned as long queries: in blocks of 192 rows for three consumers, with an exact softcap for two.
LONG: dict[str, dict[str, Any]] = {
    "prefills": PREFILLS,
    "short prefills": SHORT,
    "short prefills, alibi, window": SHORT | dict(alibi=True, window_size=(300, -1)),
    "prefills, hnd, page 544": PREFILLS | dict(layout="HND", page_size=544),
    "prefills, page 8, float16": PREFILLS | dict(page_size=8, dtype=torch.float16),
    "prefills, page 24": PREFILLS | dict(page_size=24),
    "prefills, page 128, padding": PREFILLS | dict(page_size=128, padding=300),
    "prefills, alibi, sinks": PREFILLS | dict(alibi=True, sinks=True),
    "prefills, alibi, trees": PREFILLS | dict(alibi=True, qq_bias=64, tree=True),
    "prefills, window to both sides": PREFILLS | dict(window_size=(100, 50), causal=False),
    "prefills, wide window": PREFILLS | WIDE,
    "a chunk, wide window, alibi": ragged((700, 3000)) | WIDE | dict(alibi=True),
    "prefills, head_dim 64, sinks": PREFILLS | dict(head_dim=64, sinks=True),
    "prefills, head_dim 64, alibi, window": PREFILLS | dict(head_dim=64, alibi=True, window_size=(300, -1)),
    "prefills, head_dim 80": PREFILLS | dict(head_dim=80),
    "prefills, head_dim 96, fp32 out": PREFILLS | dict(head_dim=96, out_dtype=torch.float32),
    "prefills of 40": ragged(*[(100, 100 + 30 * i) for i in range(40)]) | dict(bounds=True),
    "prefills, every other of nothing": ragged(*[(300, 0), (300, 300)] * 30) | dict(bounds=True),
    "prefills of nothing": ragged(*[(300, 0)] * 3) | dict(bounds=True),
    "prefills, group 1": PREFILLS | dict(kv_heads=32),
    "prefills, group 3": PREFILLS | dict(heads=24),
    "prefills, group 7, window": PREFILLS | dict(heads=28, kv_heads=4, window_size=(300, -1)),
    "prefills, group 24": PREFILLS | dict(heads=48, kv_heads=2),
    "prefills, group 48, no lse": PREFILLS | dict(heads=48, kv_heads=1, lse=False),
    "prefills, group 64": PREFILLS | dict(heads=64, kv_heads=1),
    "prefills, group 13": PREFILLS | dict(heads=13, kv_heads=1),
    "prefills, group 72, alibi, sinks": PREFILLS | dict(heads=72, kv_heads=1, alibi=True, sinks=True),
    "prefills, group 128": PREFILLS | dict(heads=128, kv_heads=1),
    "prefills, fp8 out": PREFILLS | dict(out_dtype=E4M3),
    "prefills, shared buffer, strided": PREFILLS | dict(shared_buffer=True, strided=True),
    "prefills, softcap, alibi, sinks": PREFILLS | dict(softcap=20.0, alibi=True, sinks=True),
    "prefills, softcap, no lse": PREFILLS | CAPPED,
    "prefills, softcap of 10, no lse": PREFILLS | dict(softcap=10.0, lse=False),
    "prefills, softcap, alibi, sinks, no lse": PREFILLS | CAPPED | dict(alibi=True, sinks=True),
    "prefills, new": PREFILLS | NEW,
    "prefills, new, group 12": PREFILLS | NEW | dict(heads=24, kv_heads=2),
    "prefills, new, head_dim 64, window": PREFILLS | NEW | dict(head_dim=64, window_size=(255, -1)),
    "a chunk": ragged((700, 3000)),
    "a chunk, large scale": ragged((700, 3000)) | dict(softmax_scale=3.0),
    "all lengths": ALL_LENGTHS,
    "all lengths, window, sinks, alibi": ALL_LENGTHS | dict(window_size=(255, -1), sinks=True, alibi=True),
    "all lengths, not causal": ALL_LENGTHS | dict(causal=False),
    "all lengths, new": ALL_LENGTHS | NEW,
    "all lengths, prefills only": ALL_LENGTHS | dict(only="prefill"),
}
