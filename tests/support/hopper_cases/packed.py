"""x-packed caches: few rows, and blocks of many rows, with and without new keys."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.cases import E4M3, E5M2
from tests.support.hopper_cases.parts import (
    ALL_E4M3,
    CAPPED,
    CHUNKS,
    DECODE,
    DECODES,
    E4M3_CACHE,
    FEATURES,
    MIXED,
    NEW,
    PACKED,
    PREFILLS,
    SEAMS,
    TREES,
    ragged,
)

PACKED_CASES: dict[str, dict[str, Any]] = {
    "x-packed decode of one tile": ragged((1, 64)) | PACKED | dict(decode_form=True),
    "x-packed long decode": ragged((1, 40000)) | PACKED | dict(decode_form=True),
    "x-packed decodes": DECODE | PACKED,
    "x-packed decodes, page 8, float16": DECODE | PACKED | dict(page_size=8, dtype=torch.float16),
    "x-packed decodes, page 24, head_dim 80": DECODE | PACKED | dict(page_size=24, head_dim=80),
    "x-packed decodes, page 544, head_dim 64": DECODE | PACKED | dict(page_size=544, head_dim=64),
    "x-packed decodes, page 32, head_dim 256": DECODE | PACKED | dict(page_size=32, head_dim=256),
    "x-packed decodes, head_dim 96, fp8 out": DECODE | PACKED | dict(head_dim=96, out_dtype=E4M3),
    "x-packed decodes, all features": DECODE
    | PACKED
    | dict(window_size=(1000, -1), sinks=True, softcap=20.0, alibi=True),
    "x-packed decodes, ragged, padding": DECODES | PACKED | dict(bounds=True, padding=3),
    "x-packed decodes, group 1": DECODE | PACKED | dict(kv_heads=32),
    "x-packed decodes, group 3": DECODE | PACKED | dict(heads=24),
    "x-packed decodes, group 32": DECODE | PACKED | dict(kv_heads=1),
    "64 long x-packed decodes": ragged(*[(1, 4096)] * 64) | PACKED | dict(decode_form=True),
    "200 x-packed decodes": ragged(*[(1, 37 * i) for i in range(200)]) | PACKED | dict(decode_form=True),
    "x-packed mixed, decodes only": MIXED | PACKED | dict(only="decode"),
    "x-packed speculation": ragged((8, 512), (5, 5000), (0, 77), (8, 8), (1, 1), (3, 4096))
    | PACKED
    | dict(bounds=True),
    "x-packed speculation of 4": ragged(*[(4, 3000)] * 9) | PACKED | dict(bounds=True, window_size=(700, -1)),
    "x-packed e4m3 decodes": DECODE | PACKED | E4M3_CACHE,
    "x-packed e4m3 decodes, page 544, float16": DECODE | PACKED | E4M3_CACHE | dict(page_size=544, dtype=torch.float16),
    "x-packed e4m3 decodes, all features": DECODE
    | PACKED
    | E4M3_CACHE
    | dict(window_size=(1000, -1), sinks=True, softcap=20.0, alibi=True),
    "x-packed e4m3 decodes, page 32, head_dim 80": DECODE | PACKED | E4M3_CACHE | dict(page_size=32, head_dim=80),
    "x-packed e4m3 decodes, head_dim 256": DECODE | PACKED | E4M3_CACHE | dict(head_dim=256),
    "x-packed e4m3 decodes, group 32": DECODE | PACKED | E4M3_CACHE | dict(kv_heads=1),
    "x-packed e5m2 decodes": DECODE | PACKED | dict(cache_dtype=E5M2),
    "x-packed all e4m3 decodes": DECODE | PACKED | ALL_E4M3,
    "64 long x-packed e4m3 decodes": ragged(*[(1, 4096)] * 64) | PACKED | E4M3_CACHE | dict(decode_form=True),
    "x-packed e4m3 speculation": ragged((8, 512), (5, 5000), (0, 77), (8, 8), (1, 1), (3, 4096))
    | PACKED
    | E4M3_CACHE
    | dict(bounds=True),
    "x-packed trees of 8": ragged((8, 8), (8, 5000), (1, 1), (5, 70))
    | PACKED
    | dict(bounds=True, qq_bias=8, tree=True),
}

# Blocks over x-packed caches, with and without new keys.
SMALL_BLOCKS = ragged((1, 500), (70, 300), (1, 0), (9, 9)) | PACKED

BLOCKS: dict[str, dict[str, Any]] = {
    "small": SMALL_BLOCKS,
    "small, features, page 48": SMALL_BLOCKS | FEATURES | dict(page_size=48),
    "small, new, features": SMALL_BLOCKS | NEW | FEATURES,
    "small, group 48": ragged((1, 300), (200, 300), (1, 40)) | PACKED | dict(heads=48, kv_heads=1, bounds=True),
    "small, group 48, new": ragged((1, 30), (40, 99), (1, 40)) | PACKED | NEW | dict(heads=48, kv_heads=1, bounds=True),
    "chunk": ragged((700, 3000)) | PACKED,
    "prefills": PREFILLS | PACKED,
    "prefills, head_dim 64, float16": PREFILLS | PACKED | dict(head_dim=64, dtype=torch.float16),
    "prefills, head_dim 256": PREFILLS | PACKED | dict(head_dim=256),
    "prefills, group 12": PREFILLS | PACKED | dict(heads=24, kv_heads=2),
    "prefills, softcap": PREFILLS | PACKED | CAPPED,
    "prefills, new, page 544": PREFILLS | PACKED | NEW | dict(page_size=544),
    "chunks": CHUNKS | PACKED,
    "drafts, trees": TREES | PACKED | dict(qq_bias=64),
    "mixed": MIXED | PACKED,
    "mixed, lse, fp8 out, padding": MIXED | PACKED | dict(out_dtype=E4M3, padding=5, bounds=True),
    "mixed, window to both sides": MIXED | PACKED | dict(window_size=(100, 50), causal=False),
    "mixed, softcap, alibi, sinks": MIXED | PACKED | dict(softcap=20.0, alibi=True, sinks=True),
    "mixed, prefills only, page 128": MIXED | PACKED | dict(only="prefill", page_size=128),
    "mixed, head_dim 80": MIXED | PACKED | dict(head_dim=80),
    "mixed, group 1": MIXED | PACKED | dict(kv_heads=32),
    "mixed, group 3": MIXED | PACKED | dict(heads=24),
    "mixed, group 32": MIXED | PACKED | dict(kv_heads=1),
    "mixed, new": MIXED | PACKED | NEW,
    "mixed, new, window, sinks": MIXED | PACKED | NEW | dict(window_size=(255, -1), sinks=True),
    "mixed, new, not causal": MIXED | PACKED | NEW | dict(causal=False),
    "mixed, new, head_dim 64, page 32": MIXED | PACKED | NEW | dict(head_dim=64, page_size=32),
    "mixed, new, head_dim 256, group 3": MIXED | PACKED | NEW | dict(head_dim=256, heads=24),
    "seams, new": SEAMS | PACKED | NEW,
    "seams, new, window, float16": SEAMS | PACKED | NEW | dict(window_size=(70, -1), dtype=torch.float16),
}
