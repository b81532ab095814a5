"""Sequences with the same or similar numbers of queries: drafts, chunks, shares that begin with blocks, the line."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.cases import E4M3, E5M2
from tests.support.hopper_cases.parts import (
    ALL_E4M3,
    CAPPED,
    CHUNKS,
    DRAFTS,
    E4M3_CACHE,
    E4M3_NO_LSE,
    NEW,
    ragged,
)

EVEN_CASES: dict[str, dict[str, Any]] = {
    "even drafts": DRAFTS,
    "even drafts, hnd, padding": DRAFTS | dict(layout="HND", padding=5),
    "even drafts, float16, page 8": DRAFTS | dict(dtype=torch.float16, page_size=8),
    "even drafts, page 128": DRAFTS | dict(page_size=128),
    "even drafts, page 544": DRAFTS | dict(page_size=544),
    "even drafts, softcap, window": DRAFTS | CAPPED | dict(window_size=(255, -1)),
    "even drafts, all features": DRAFTS | dict(window_size=(255, -1), sinks=True, softcap=20.0, alibi=True),
    "even drafts, not causal": DRAFTS | dict(causal=False, window_size=(100, 50)),
    "even drafts, trees": DRAFTS | dict(qq_bias=32, tree=True),
    "even drafts, head_dim 64": DRAFTS | dict(head_dim=64),
    "even drafts, head_dim 80": DRAFTS | dict(head_dim=80),
    "even drafts, head_dim 192": DRAFTS | dict(head_dim=192),
    "even drafts, head_dim 256": DRAFTS | dict(head_dim=256),
    "even drafts, group 1": ragged(*[(70, 2000)] * 3) | dict(bounds=True, kv_heads=32),
    "even drafts, group 3": DRAFTS | dict(heads=24),
    "even drafts, group 6": DRAFTS | dict(heads=48),
    "even drafts, group 48": ragged(*[(2, 2000)] * 12) | dict(bounds=True, heads=96, kv_heads=2),
    "even drafts, fp8 out": DRAFTS | dict(out_dtype=E4M3),
    "even drafts, float32 out": DRAFTS | dict(out_dtype=torch.float32),
    "even drafts, new, head_dim 256": DRAFTS | NEW | dict(head_dim=256),
    "even drafts of 9, head_dim 64": ragged(*[(9, 2000)] * 12) | dict(bounds=True, head_dim=64),
    "even drafts of 9, head_dim 256": ragged(*[(9, 2000)] * 12) | dict(bounds=True, head_dim=256),
    "even drafts of 9, group 3, fp8 out": ragged(*[(9, 2000)] * 12) | dict(bounds=True, heads=24, out_dtype=E4M3),
    "40 even drafts": ragged(*[(20, 500)] * 40) | dict(bounds=True),
    # shares that begin with blocks: the blocks are of similar lengths, and their number is not a power of two
    "12 decodes, a share each": ragged(*[(1, 500 - 9 * i) for i in range(12)]) | dict(decode_form=True),
    "12 decodes, a share each, window": ragged(*[(1, 500 + 99 * i) for i in range(12)])
    | dict(decode_form=True, window_size=(300, -1), sinks=True),
    "e4m3 12 decodes, a share each": ragged(*[(1, 500 - 9 * i) for i in range(12)])
    | E4M3_CACHE
    | dict(decode_form=True),
    "new 12 decodes, a share each": ragged(*[(1, 500 - 9 * i) for i in range(12)]) | NEW | dict(decode_form=True),
    "24 decodes, two to a share": ragged(*[(1, 300 + 3 * i) for i in range(24)]) | dict(bounds=True, padding=3),
    "100 decodes, seven to a share": ragged(*[(1, 65 + i % 60) for i in range(100)]) | dict(decode_form=True),
    "3 decodes, cut alike": ragged((1, 1000), (1, 920), (1, 990)) | dict(decode_form=True),
    "e5m2 3 decodes, cut alike": ragged((1, 1000), (1, 920), (1, 990)) | dict(cache_dtype=E5M2, decode_form=True),
    "even drafts of 16, a share each": ragged(*[(16, 520 - 9 * i) for i in range(12)]) | dict(bounds=True),
    "drafts, cut alike, some without queries": ragged((7, 900), (0, 77), (9, 870), (1, 1000), (16, 990))
    | dict(bounds=True),
    "even chunks": CHUNKS,
    "even chunks, hnd, page 544, padding": CHUNKS | dict(layout="HND", page_size=544, padding=5),
    "even chunks, all features": CHUNKS | dict(window_size=(255, -1), sinks=True, softcap=20.0, alibi=True),
    "even chunks, not causal": CHUNKS | dict(causal=False, window_size=(100, 50)),
    "even chunks, trees": CHUNKS | dict(qq_bias=64, tree=True),
    "even chunks, head_dim 64, float16": CHUNKS | dict(head_dim=64, dtype=torch.float16),
    "even chunks, head_dim 256": CHUNKS | dict(head_dim=256),
    "even chunks, group 1": ragged((150, 3000), (150, 700), (150, 200)) | dict(bounds=True, kv_heads=32),
    "even chunks, group 3": CHUNKS | dict(heads=24),
    "even chunks, group 8, fp8 out": CHUNKS | dict(heads=64, out_dtype=E4M3),
    "even chunks, 20 KV heads": CHUNKS | dict(heads=80, kv_heads=20),
    "even chunks, new": CHUNKS | NEW,
    "even chunks of 100": ragged((100, 3000), (100, 700), (100, 100)) | dict(bounds=True),
    "even chunks, padding, some of one block": ragged((64, 5000), (20, 700), (0, 30), (33, 90))
    | dict(bounds=True, padding=139),
    # 192 blocks for 132 programs: 128 are whole, the last 64 are cut in two
    "even chunks, the last are cut": ragged(*[(64, 4000)] * 10, (64, 3000), (64, 4096)) | dict(bounds=True),
    "even chunks, the last are cut, window": ragged(*[(64, 4096)] * 11, (64, 4000))
    | dict(bounds=True, window_size=(3500, -1), lse=False),
    # 320 blocks: 33 of each KV head are whole, more than the search for a block looks at in one step
    "40 drafts, the last are cut": ragged(*[(32, 4096)] * 39, (32, 4000)) | dict(bounds=True),
    "even chunks of 128": ragged(*[(128, 3000)] * 3) | dict(bounds=True),
    "a chunk of 100, window": ragged((100, 9000)) | dict(bounds=True, window_size=(1000, -1)),
}

# Too few blocks for all programs, which have even shares of the line instead.
DRAFTS_LINE = ragged(*[(32, 8192)] * 6) | dict(bounds=True)

CHUNKS_LINE = ragged(*[(64, 8192)] * 3) | dict(bounds=True)  # two blocks of a sequence read the same keys

LINES: dict[str, dict[str, Any]] = {
    "drafts": DRAFTS_LINE | dict(lse=False),
    "drafts of any context": ragged(
        (32, 9000), (20, 9500), (0, 50), (32, 9200), (31, 8000), (17, 9900), (32, 9999), (32, 7000)
    )
    | dict(bounds=True, sinks=True, padding=60),  # enough rows for all sequences to have 32 queries
    "drafts, trees": DRAFTS_LINE | dict(qq_bias=32, tree=True),
    "drafts, head_dim 64, float16": DRAFTS_LINE | dict(head_dim=64, dtype=torch.float16),
    "drafts, group 3, padding": DRAFTS_LINE | dict(heads=24, padding=70),
    "drafts over e4m3": DRAFTS_LINE | E4M3_CACHE,
    "drafts over e4m3, no lse": DRAFTS_LINE | E4M3_NO_LSE,
    "drafts of e4m3": DRAFTS_LINE | ALL_E4M3 | dict(lse=False),
    "chunks": CHUNKS_LINE,
    "chunks, softcap, alibi": CHUNKS_LINE | dict(softcap=20.0, alibi=True),
    "chunks, head_dim 256": CHUNKS_LINE | dict(head_dim=256),
    "chunks, window, not causal": ragged(*[(64, 9000)] * 3)
    | dict(bounds=True, window_size=(8500, 20), causal=False, sinks=True),
    "chunks, new": CHUNKS_LINE | NEW,
}
