"""fp8 caches, under 16-bit and under fp8 queries."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.cases import E4M3, E5M2
from tests.support.hopper_cases.parts import (
    ALL_E4M3,
    DECODE,
    DECODES,
    E4M3_CACHE,
    E4M3_NO_LSE,
    MIXED,
    PACKED,
    ragged,
)

FP8_CASES: dict[str, dict[str, Any]] = {
    "e4m3 prefill of one tile": ragged((64, 64)) | E4M3_CACHE,
    "e4m3 prefill": ragged((200, 200)) | E4M3_CACHE,
    "e4m3 chunk": ragged((700, 3000)) | E4M3_CACHE,
    "e4m3 mixed": MIXED | E4M3_CACHE,
    "e4m3 mixed, float16, page 8": MIXED | E4M3_CACHE | dict(dtype=torch.float16, page_size=8),
    "e4m3 mixed, page 128, hnd": MIXED | E4M3_CACHE | dict(page_size=128, layout="HND"),
    "e4m3 mixed, page 544": MIXED | E4M3_CACHE | dict(page_size=544),
    "e4m3 mixed, all features": MIXED
    | E4M3_CACHE
    | dict(window_size=(255, -1), sinks=True, softcap=20.0, alibi=True, padding=5),
    "e4m3 mixed, window to both sides": MIXED | E4M3_CACHE | dict(window_size=(100, 50), causal=False),
    "e4m3 mixed, head_dim 64": MIXED | E4M3_CACHE | dict(head_dim=64),
    "e4m3 mixed, head_dim 80": MIXED | E4M3_CACHE | dict(head_dim=80),
    "e4m3 mixed, group 3": MIXED | E4M3_CACHE | dict(heads=24),
    "e4m3 mixed, group 1": MIXED | E4M3_CACHE | dict(kv_heads=32),
    "e5m2 mixed": MIXED | dict(cache_dtype=E5M2),
    "e4m3 prefill of one tile, no lse": ragged((64, 64)) | E4M3_NO_LSE,
    "e4m3 prefill, no lse": ragged((200, 200)) | E4M3_NO_LSE,
    "e4m3 chunk, no lse": ragged((700, 3000)) | E4M3_NO_LSE,
    "e4m3 even prefills, no lse": ragged(*[(512, 512)] * 4) | E4M3_NO_LSE,
    "e4m3 mixed, no lse": MIXED | E4M3_NO_LSE,
    "e4m3 mixed, page 8, no lse": MIXED | E4M3_NO_LSE | dict(page_size=8),
    "e4m3 mixed, page 544, hnd, no lse": MIXED | E4M3_NO_LSE | dict(page_size=544, layout="HND"),
    "e4m3 mixed, window, sinks, no lse": MIXED | E4M3_NO_LSE | dict(window_size=(255, -1), sinks=True, padding=5),
    "e4m3 mixed, head_dim 64, no lse": MIXED | E4M3_NO_LSE | dict(head_dim=64),
    "e4m3 mixed, head_dim 80, no lse": MIXED | E4M3_NO_LSE | dict(head_dim=80),
    "e4m3 mixed, group 3, no lse": MIXED | E4M3_NO_LSE | dict(heads=24),
    "e4m3 mixed, trees, no lse": MIXED | E4M3_NO_LSE | dict(qq_bias=64, tree=True),
    "e4m3 prefills, window, no lse": ragged(*[(512, 512)] * 4)
    | E4M3_NO_LSE
    | dict(window_size=(100, 50), causal=False),
    "e4m3 prefills, alibi, no lse": ragged(*[(512, 512)] * 4) | E4M3_NO_LSE | dict(alibi=True, sinks=True),
    "e4m3 even prefills": ragged(*[(512, 512)] * 4) | E4M3_CACHE,
    "e4m3 decode of one tile": ragged((1, 64)) | E4M3_CACHE | dict(decode_form=True),
    "e4m3 long decode": ragged((1, 40000)) | E4M3_CACHE | dict(decode_form=True),
    "e4m3 decodes": DECODE | E4M3_CACHE,
    "e4m3 decodes, page 8, hnd": DECODE | E4M3_CACHE | dict(page_size=8, layout="HND"),
    "e4m3 decodes, page 544, float16": DECODE | E4M3_CACHE | dict(page_size=544, dtype=torch.float16),
    "e4m3 decodes, all features": DECODE
    | E4M3_CACHE
    | dict(window_size=(1000, -1), sinks=True, softcap=20.0, alibi=True),
    "e4m3 decodes, ragged, padding": DECODES | E4M3_CACHE | dict(bounds=True, padding=3),
    "e4m3 decodes, group 1": DECODE | E4M3_CACHE | dict(kv_heads=32),
    "e4m3 decodes, group 3": DECODE | E4M3_CACHE | dict(heads=24),
    "e4m3 decodes, group 16": DECODE | E4M3_CACHE | dict(heads=64, kv_heads=4),
    "e4m3 decodes, group 64": DECODE | E4M3_CACHE | dict(heads=64, kv_heads=1),
    "e4m3 decodes, head_dim 80": DECODE | E4M3_CACHE | dict(head_dim=80),
    "e4m3 decodes, head_dim 64": DECODE | E4M3_CACHE | dict(head_dim=64),
    "e4m3 decodes, head_dim 64, all features": DECODE
    | E4M3_CACHE
    | dict(head_dim=64, window_size=(1000, -1), sinks=True, softcap=20.0, alibi=True),
    "e4m3 decodes, head_dim 64, page 8, hnd": DECODE | E4M3_CACHE | dict(head_dim=64, page_size=8, layout="HND"),
    "e4m3 decodes, head_dim 64, group 32": DECODE | E4M3_CACHE | dict(head_dim=64, kv_heads=1),
    "e4m3 decodes, head_dim 48": DECODE | E4M3_CACHE | dict(head_dim=48),
    "e5m2 decodes, head_dim 64, float16": DECODE | dict(cache_dtype=E5M2, head_dim=64, dtype=torch.float16),
    "all e4m3 decodes, head_dim 64": DECODE | ALL_E4M3 | dict(head_dim=64),
    "64 long e4m3 decodes, head_dim 64": ragged(*[(1, 4096)] * 64) | E4M3_CACHE | dict(decode_form=True, head_dim=64),
    "e4m3 speculation, head_dim 64": ragged((8, 512), (5, 5000), (0, 77), (16, 16), (1, 1), (3, 4096))
    | E4M3_CACHE
    | dict(bounds=True, head_dim=64),
    "x-packed e4m3 decodes, head_dim 64": DECODE | PACKED | E4M3_CACHE | dict(head_dim=64),
    "x-packed e5m2 decodes, page 544, head_dim 64": DECODE
    | PACKED
    | dict(cache_dtype=E5M2, page_size=544, head_dim=64),
    "e4m3 decodes, head_dim 256": DECODE | E4M3_CACHE | dict(head_dim=256),
    "e4m3 decodes, head_dim 256, page 64": DECODE | E4M3_CACHE | dict(head_dim=256, page_size=64),
    "e4m3 decodes, head_dim 256, group 64": DECODE | E4M3_CACHE | dict(head_dim=256, heads=64, kv_heads=1),
    "e5m2 decodes": DECODE | dict(cache_dtype=E5M2),
    "all e4m3 decodes": DECODE | ALL_E4M3,
    "200 e4m3 decodes": ragged(*[(1, 37 * i) for i in range(200)]) | E4M3_CACHE | dict(decode_form=True),
    "64 long e4m3 decodes": ragged(*[(1, 4096)] * 64) | E4M3_CACHE | dict(decode_form=True),
    "e4m3 mixed, decodes only": MIXED | E4M3_CACHE | dict(only="decode"),
    "e4m3 speculation": ragged((8, 512), (5, 5000), (0, 77), (16, 16), (1, 1), (3, 4096))
    | E4M3_CACHE
    | dict(bounds=True),
    "e4m3 speculation of 4": ragged(*[(4, 3000)] * 9) | E4M3_CACHE | dict(bounds=True, window_size=(700, -1)),
}

ALL_FP8_CASES: dict[str, dict[str, Any]] = {
    "all e4m3 prefill of one tile": ragged((64, 64)) | ALL_E4M3,
    "all e4m3 chunk": ragged((700, 3000)) | ALL_E4M3,
    "all e4m3 chunk, deposits": ragged((700, 6000)) | ALL_E4M3,
    "all e4m3 chunk of 13 to 18 tiles": ragged((700, 2304)) | ALL_E4M3,
    "all e4m3 chunk of 28 to 33 tiles": ragged((700, 4224)) | ALL_E4M3,
    "all e4m3 chunk of 28 to 33 tiles, head_dim 64": ragged((700, 4224)) | ALL_E4M3 | dict(head_dim=64),
    "all e4m3 mixed": MIXED | ALL_E4M3,
    "all e4m3 mixed, page 8": MIXED | ALL_E4M3 | dict(page_size=8),
    "all e4m3 mixed, page 544, hnd": MIXED | ALL_E4M3 | dict(page_size=544, layout="HND"),
    "all e4m3 mixed, all features": MIXED
    | ALL_E4M3
    | dict(window_size=(255, -1), sinks=True, softcap=20.0, alibi=True, padding=5),
    "all e4m3 mixed, head_dim 64": MIXED | ALL_E4M3 | dict(head_dim=64),
    "all e4m3 mixed, head_dim 96": MIXED | ALL_E4M3 | dict(head_dim=96),
    "all e4m3 mixed, group 3": MIXED | ALL_E4M3 | dict(heads=24),
    "all e4m3 mixed, fp8 out": MIXED | ALL_E4M3 | dict(out_dtype=E4M3),
    "all e4m3 even prefills": ragged(*[(512, 512)] * 4) | ALL_E4M3,
}
