"""Sizes that meet every path of the Hopper kernels: shares, blocks, pieces, both launches."""

from __future__ import annotations

from typing import Any

import torch

from tests.cases import E4M3, E5M2, Case
from tests.simulator import SIMULATES


def ragged(*lengths: tuple[int, int]) -> dict[str, Any]:
    """Sequences of (query_len, seq_len) each."""
    return dict(query_lens=tuple(q for q, _ in lengths), seq_lens=tuple(k for _, k in lengths))


DEVICE = "cuda" if torch.cuda.is_available() and not SIMULATES else "cpu"
SIZES: dict[str, Any] = dict(heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16)


def sized(name: str, **fields: Any) -> Case:
    """A case of these sizes, but for what the fields say.

    Simulated on a quarter of the multiprocessors, and of the heads where they can be divided: as much falls to each.
    """
    all_fields = SIZES | fields
    if SIMULATES and all_fields["kv_heads"] % 4 == 0:
        all_fields |= {x: all_fields[x] // 4 for x in ("heads", "kv_heads")}
    return Case(name, **all_fields)


# decodes, speculation, chunks behind contexts, whole prefills, empty sequences, queries that see nothing
MIXED = ragged(
    (1, 5000), (300, 300), (0, 100), (1, 1), (700, 4000), (17, 33), (1, 0), (2, 130), (128, 128), (129, 1000), (40, 9)
)  # fmt: skip
# long queries so few beside decodes that two lists serve them
FEW_LONG = ragged((30, 5000), (17, 600), *[(1, 1 + 130 * i) for i in range(31)]) | dict(bounds=True)
# a chunk beside decodes and drafts, several to a program, some of which other programs end
BESIDE = ragged((300, 3000), *[(1 + i % 2, 64 + 97 * i) for i in range(40)], (90, 90)) | dict(bounds=True)
# the same beside a sequence more, whose decodes have a launch of their own: heads fill no block
PARTED = ragged(*zip(MIXED["query_lens"], MIXED["seq_lens"]), (1, 77)) | dict(heads=48, kv_heads=1, bounds=True)
TREES = ragged((32, 32), (20, 5000), (0, 77), (7, 3000), (1, 1), (32, 4096)) | dict(bounds=True, qq_bias=32, tree=True)
DRAFTS = ragged(*[(32, 2000)] * 12) | dict(bounds=True)
# as many queries each, in two blocks, over more keys and fewer
CHUNKS = ragged((64, 5000), (64, 70), (64, 64), (64, 900), (64, 30), (64, 0)) | dict(bounds=True)
# blocks of which a consumer has no rows, for groups of 3, 4 and 24, before blocks of others
# of up to 64 rows, in two blocks of columns or, of more sequences, in one of rows
DRAFTS_OF_16 = ragged((16, 3000), (9, 700), (0, 50), (16, 20), (1, 2000), (16, 0)) | dict(bounds=True)
MANY_DRAFTS = ragged(*[(1 + i % 16, 300 + 90 * i) for i in range(20)]) | dict(bounds=True)
SPECULATION_OF_4 = ragged((4, 512), (3, 5000), (0, 77), (4, 4), (1, 1), (2, 4096), (4, 1000)) | dict(bounds=True)
PREFILLS = ragged(*[(393, 1500)] * 3, (393, 393), (393, 700)) | dict(bounds=True)
DECODES = ragged((1, 512), (1, 0), (1, 1), (1, 5000), (1, 130), (1, 4096), (1, 33))
DECODE = DECODES | dict(decode_form=True)
NEW: dict[str, Any] = dict(new=True)
# caches that end on, before and behind the borders of tiles, and before the first key
SEAMS = ragged(*[(q, c + q) for q in (1, 40) for c in (0, 1, 63, 64, 65, 127, 128, 129, 256, 1000)], (5, 3), (200, 90))
E4M3_CACHE: dict[str, Any] = dict(cache_dtype=E4M3, scales="per_head")
E4M3_NO_LSE: dict[str, Any] = E4M3_CACHE | dict(lse=False)
ALL_E4M3: dict[str, Any] = dict(dtype=E4M3, cache_dtype=E4M3, out_dtype=torch.bfloat16, scales="per_head")
PACKED: dict[str, Any] = dict(layout="x")
# by the unit for tanh, where only these are weighed; of blocks scores below 0.7 of the cap by a polynomial
CAPPED: dict[str, Any] = dict(softcap=20.0, lse=False)
FEATURES = dict(window_size=(200, -1), softcap=20.0, alibi=True, sinks=True)
WIDE: dict[str, Any] = dict(window_size=(1200, -1))  # so many tiles that blocks may be cut
CASES: dict[str, dict[str, Any]] = {
    "prefill of one tile": ragged((64, 64)),
    "prefill": ragged((200, 200)),
    "chunk": ragged((700, 3000)),
    "even prefills": ragged(*[(512, 512)] * 4),
    "many even prefills": ragged(*[(1024, 1024)] * 24),
    "prefills known to be even": PREFILLS,
    "mixed over e4m3, head_dim 256": MIXED | E4M3_CACHE | dict(head_dim=256),
    "mixed over e4m3, head_dim 192, features": MIXED | E4M3_NO_LSE | FEATURES | dict(head_dim=192),
    "prefills over e4m3, group 12": PREFILLS | E4M3_CACHE | dict(heads=24, kv_heads=2),
    "prefills over e4m3, no lse, group 80": PREFILLS | E4M3_NO_LSE | dict(heads=160, kv_heads=2),
    "prefills, all e4m3, group 3": PREFILLS | ALL_E4M3 | dict(heads=24),
    "prefills, all e4m3, group 12": PREFILLS | ALL_E4M3 | dict(heads=24, kv_heads=2),
    "prefills over e4m3, head_dim 256, group 3": PREFILLS | E4M3_NO_LSE | dict(head_dim=256, heads=24),
    "prefills over e5m2, head_dim 256, float16": PREFILLS | dict(cache_dtype=E5M2, dtype=torch.float16, head_dim=256),
    "chunk of e4m3, head_dim 256": ragged((700, 3000)) | ALL_E4M3 | dict(head_dim=256),
    "drafts of 16 over e4m3": DRAFTS_OF_16 | E4M3_CACHE,
    "drafts of 16 over e4m3, no lse, group 3": DRAFTS_OF_16 | E4M3_NO_LSE | dict(heads=24),
    "drafts of 16 over e4m3, features": DRAFTS_OF_16 | E4M3_CACHE | FEATURES,
    "drafts of 16 over e4m3, head_dim 256": DRAFTS_OF_16 | E4M3_CACHE | dict(head_dim=256),
    "drafts of 16 over e4m3, head_dim 64": DRAFTS_OF_16 | E4M3_CACHE | dict(head_dim=64),
    "drafts of 16 over e4m3, trees": DRAFTS_OF_16 | E4M3_CACHE | dict(qq_bias=16, tree=True),
    "many drafts of up to 16 over e4m3": MANY_DRAFTS | E4M3_NO_LSE,
    "drafts of 16 of e4m3": DRAFTS_OF_16 | ALL_E4M3,
    "many drafts of up to 16 of e4m3": MANY_DRAFTS | ALL_E4M3 | dict(lse=False),
    "drafts of 16, x-packed": DRAFTS_OF_16 | PACKED,
    "drafts of 16, x-packed, page 24": DRAFTS_OF_16 | PACKED | dict(page_size=24),
    "drafts of 16 over e4m3, x-packed": DRAFTS_OF_16 | E4M3_CACHE | PACKED,
    "prefills known to be even, hnd, page 544": PREFILLS | dict(layout="HND", page_size=544),
    "prefills known to be even, head_dim 64, float16": PREFILLS | dict(head_dim=64, dtype=torch.float16),
    "prefills known to be even, head_dim 256": PREFILLS | dict(head_dim=256),
    "prefills known to be even, softcap, alibi, sinks": PREFILLS | dict(softcap=20.0, alibi=True, sinks=True),
    "prefills known to be even, softcap": PREFILLS | CAPPED,
    "prefills known to be even, softcap, e4m3 cache": PREFILLS | CAPPED | E4M3_CACHE,
    "prefills known to be even, softcap, all e4m3": PREFILLS | CAPPED | ALL_E4M3,
    "prefills known to be even, window to both sides": PREFILLS | dict(window_size=(100, 50), causal=False),
    "prefills known to be even, group 3": PREFILLS | dict(heads=24),
    "prefills known to be even, group 24": PREFILLS | dict(heads=48, kv_heads=2),
    "prefills known to be even, fp8 out": PREFILLS | dict(out_dtype=E4M3),
    "prefills known to be even, new": PREFILLS | NEW,
    "prefills known to be even, padding": PREFILLS | dict(padding=300),
    "prefills known to be even, e4m3 cache": PREFILLS | E4M3_CACHE,
    "prefills known to be even, all e4m3": PREFILLS | ALL_E4M3,
    "prefills of any length alone": ragged(*[(n, n) for n in (112, 107, 165, 25, 64, 154, 57, 138, 170, 44)]),
    "chunks of any length alone": ragged(*[(n, n + 500) for n in (92, 57, 98, 55, 135, 173, 135, 191, 120)]),
    "mixed": MIXED,
    "mixed, hnd": MIXED | dict(layout="HND"),
    "mixed, bounds, padding": MIXED | dict(bounds=True, padding=5),
    "mixed, prefills only": MIXED | dict(only="prefill"),
    "mixed, decodes only": MIXED | dict(only="decode"),
    "mixed, window, sinks": MIXED | dict(window_size=(255, -1), sinks=True),
    "mixed, wide window": MIXED | WIDE | dict(sinks=True),
    "mixed, wide window to both sides": MIXED | dict(window_size=(1200, 300), causal=False),
    "mixed, wide window, head_dim 256": MIXED | WIDE | dict(head_dim=256),
    "mixed, wide window, softcap, no lse": MIXED | WIDE | CAPPED,
    "mixed, wide window, new": MIXED | WIDE | NEW,
    "e4m3 mixed, wide window": MIXED | WIDE | E4M3_CACHE,
    "e4m3 mixed, wide window, no lse": MIXED | WIDE | E4M3_NO_LSE,
    "e4m3 mixed, head_dim 64, window of 900": MIXED | E4M3_CACHE | dict(head_dim=64, window_size=(900, -1)),
    "e4m3 mixed, head_dim 64, window of 900, no lse": MIXED | E4M3_NO_LSE | dict(head_dim=64, window_size=(900, -1)),
    "all e4m3 mixed, wide window": MIXED | WIDE | ALL_E4M3,
    "mixed, window to both sides": MIXED | dict(window_size=(100, 50), causal=False),
    "mixed, not causal": MIXED | dict(causal=False),
    "mixed, softcap, alibi, sinks": MIXED | dict(softcap=20.0, alibi=True, sinks=True),
    "mixed, softcap, no lse": MIXED | CAPPED,
    "e4m3 mixed, softcap, alibi, no lse": MIXED | CAPPED | E4M3_CACHE | dict(alibi=True),
    "trees, softcap, no lse": TREES | CAPPED,
    "mixed, negative scale": MIXED | dict(softmax_scale=-0.1),
    "mixed, float16, page 8": MIXED | dict(dtype=torch.float16, page_size=8),
    "mixed, page 24": MIXED | dict(page_size=24),
    "mixed, page 128": MIXED | dict(page_size=128),
    "mixed, page 544": MIXED | dict(page_size=544),
    "mixed, head_dim 64": MIXED | dict(head_dim=64),
    "mixed, head_dim 80": MIXED | dict(head_dim=80),
    "mixed, head_dim 96": MIXED | dict(head_dim=96),
    "mixed, head_dim 192": MIXED | dict(head_dim=192),
    "mixed, head_dim 256": MIXED | dict(head_dim=256),
    "mixed, group 1": MIXED | dict(kv_heads=32),
    "mixed, group 3": MIXED | dict(heads=24),
    "mixed, group 6": MIXED | dict(heads=48),
    "mixed, group 12": MIXED | dict(heads=96),
    "mixed, group 16, softcap": MIXED | dict(heads=64, kv_heads=4, softcap=20.0),
    "mixed, group 16, new": MIXED | NEW | dict(heads=64, kv_heads=4),
    "decodes beside a chunk": BESIDE,
    "decodes beside a chunk, head_dim 64": BESIDE | dict(head_dim=64),
    "decodes beside a chunk, head_dim 96, hnd": BESIDE | dict(head_dim=96, layout="HND"),
    "decodes beside a chunk, all features": BESIDE | FEATURES | dict(qq_bias=8),
    "decodes beside a chunk, new": BESIDE | NEW,
    "decodes beside a chunk, float16, no lse": BESIDE | CAPPED | dict(dtype=torch.float16),
    "decodes beside a chunk, one KV head": BESIDE | dict(heads=8, kv_heads=1),
    "decodes beside a chunk, page 8, wide window": BESIDE | WIDE | dict(page_size=8),
    "few long ones": FEW_LONG,
    "few long ones, hnd, page 8": FEW_LONG | dict(layout="HND", page_size=8),
    "few long ones, new": FEW_LONG | NEW,
    "few long ones, softcap": FEW_LONG | dict(softcap=20.0),
    "few long ones, softcap, alibi, sinks": FEW_LONG | dict(softcap=20.0, alibi=True, sinks=True),
    "few long ones, group 3": FEW_LONG | dict(heads=24),
    "few long ones, head_dim 64": FEW_LONG | dict(head_dim=64),
    "few long ones, head_dim 192": FEW_LONG | dict(head_dim=192),
    "few long ones, window": FEW_LONG | WIDE,
    "few long ones, all e4m3": FEW_LONG | ALL_E4M3,
    "more than 8 pieces": ragged((40, 20000)) | dict(heads=8, kv_heads=1),
    "mixed, group 32": MIXED | dict(kv_heads=1),
    "long queries in parts beside decodes": PARTED,
    "long queries in parts beside decodes, hnd, strided": PARTED | dict(layout="HND", strided=True),
    "long queries in parts beside decodes, head_dim 64, window": PARTED | WIDE | dict(head_dim=64, sinks=True),
    "long queries in parts beside decodes, head_dim 256": PARTED | dict(head_dim=256),
    "long queries in parts beside decodes, new": PARTED | NEW,
    "long queries in parts beside decodes, softcap, alibi": PARTED | CAPPED | dict(alibi=True),
    "long queries in parts beside decodes, two KV heads": PARTED | dict(heads=96, kv_heads=2, dtype=torch.float16),
    "long queries in parts beside e4m3 decodes": PARTED | E4M3_CACHE,
    "long queries in parts beside e4m3 decodes, no lse": PARTED | E4M3_NO_LSE,
    "long queries in parts beside decodes, all e4m3": PARTED | ALL_E4M3,
    "mixed, shared buffer": MIXED | dict(shared_buffer=True),
    "mixed, strided": MIXED | dict(strided=True),
    "mixed, fp8 out": MIXED | dict(out_dtype=E4M3),
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
    "trees": TREES,
    "trees, group 1": TREES | dict(kv_heads=32),
    "trees, group 3, not causal": TREES | dict(heads=24, causal=False),
    "trees, head_dim 256": TREES | dict(head_dim=256),
    "trees, all features": TREES | dict(window_size=(255, -1), sinks=True, softcap=20.0, alibi=True, padding=5),
    "trees over e4m3": TREES | E4M3_CACHE,
    "trees of 2": ragged((2, 2), (2, 5000), (1, 1), (2, 0)) | dict(bounds=True, qq_bias=2, tree=True),
    "trees of 2 over e4m3": ragged((2, 2), (2, 5000), (1, 1), (2, 0))
    | dict(bounds=True, qq_bias=2, tree=True)
    | E4M3_CACHE,
    "trees, all e4m3": TREES | ALL_E4M3,
    "mixed, trees": MIXED | dict(qq_bias=64, tree=True),
    "mixed, a bias larger than any query": MIXED | dict(qq_bias=900),
    "e4m3 mixed, trees": MIXED | E4M3_CACHE | dict(qq_bias=64, tree=True),
    "all e4m3 mixed, trees": MIXED | ALL_E4M3 | dict(qq_bias=64, tree=True),
    "200 mixed": ragged(*[(1 + 99 * (i % 9 == 0), 37 * i) for i in range(200)]),
    "new prefill of one tile": ragged((64, 64)) | NEW,
    "new prefill": ragged((200, 200)) | NEW,
    "new chunk": ragged((700, 3000)) | NEW,
    "new even prefills": ragged(*[(512, 512)] * 4) | NEW,
    "many new even prefills": ragged(*[(1024, 1024)] * 24) | NEW,
    "new": MIXED | NEW,
    "new, hnd": MIXED | NEW | dict(layout="HND"),
    "new, bounds, padding": MIXED | NEW | dict(bounds=True, padding=5),
    "new, prefills only": MIXED | NEW | dict(only="prefill"),
    "new, decodes only": MIXED | NEW | dict(only="decode"),
    "new, window, sinks": MIXED | NEW | dict(window_size=(255, -1), sinks=True),
    "new, window of the own key": MIXED | NEW | dict(window_size=(0, -1)),
    "new, window to both sides": MIXED | NEW | dict(window_size=(100, 50), causal=False),
    "new, not causal": MIXED | NEW | dict(causal=False),
    "new, softcap, alibi, sinks": MIXED | NEW | dict(softcap=20.0, alibi=True, sinks=True),
    "new, float16, page 8": MIXED | NEW | dict(dtype=torch.float16, page_size=8),
    "new, page 24": MIXED | NEW | dict(page_size=24),
    "new, page 128": MIXED | NEW | dict(page_size=128),
    "new, page 544": MIXED | NEW | dict(page_size=544),
    "new, head_dim 64": MIXED | NEW | dict(head_dim=64),
    "new, head_dim 80": MIXED | NEW | dict(head_dim=80),
    "new, head_dim 256": MIXED | NEW | dict(head_dim=256),
    "new, head_dim 256, window": MIXED | NEW | dict(head_dim=256, window_size=(100, -1)),
    "new, group 1": MIXED | NEW | dict(kv_heads=32),
    "new, group 3": MIXED | NEW | dict(heads=24),
    "new, group 32": MIXED | NEW | dict(kv_heads=1),
    "new, shared buffer": MIXED | NEW | dict(shared_buffer=True),
    "new, strided": MIXED | NEW | dict(strided=True),
    "200 new": ragged(*[(1 + 99 * (i % 9 == 0), 100 + 37 * i) for i in range(200)]) | NEW,
    "new, seams": SEAMS | NEW,
    "new, seams, window": SEAMS | NEW | dict(window_size=(70, -1)),
    "new, seams, not causal": SEAMS | NEW | dict(causal=False),
    "new, seams, head_dim 256": SEAMS | NEW | dict(head_dim=256),
    "new, seams of 40": ragged(*[(40, c + 40) for c in (0, 1, 63, 64, 65, 127, 128, 129, 256, 1000)])
    | NEW
    | dict(bounds=True),
    "new, seams of 16, window": ragged(*[(16, c + 16) for c in (0, 1, 63, 64, 65, 127, 128, 129, 256, 1000)])
    | NEW
    | dict(bounds=True, window_size=(70, -1)),
    "new decode of one tile": ragged((1, 64)) | NEW | dict(decode_form=True),
    "new long decode": ragged((1, 40000)) | NEW | dict(decode_form=True),
    "new decodes": DECODE | NEW,
    "new decodes, ragged, padding": DECODES | NEW | dict(bounds=True, padding=3),
    "new decodes, seams": ragged(*[(1, c + 1) for c in (0, 1, 63, 64, 65, 127, 128, 129, 256, 1000)])
    | NEW
    | dict(bounds=True),
    "new decodes, window": DECODE | NEW | dict(window_size=(100, -1), sinks=True),
    "new decodes, all features": DECODE | NEW | dict(window_size=(1000, -1), sinks=True, softcap=20.0, alibi=True),
    "new decodes, head_dim 64": DECODE | NEW | dict(head_dim=64),
    "new decodes, head_dim 256": DECODE | NEW | dict(head_dim=256),
    "new decodes, group 1": DECODE | NEW | dict(kv_heads=32),
    "new decodes, group 3": DECODE | NEW | dict(heads=24),
    "new decodes, group 64": DECODE | NEW | dict(heads=64, kv_heads=1),
    "new decodes, page 544": DECODE | NEW | dict(page_size=544),
    "200 new decodes": ragged(*[(1, 37 * i) for i in range(200)]) | NEW | dict(decode_form=True),
    "64 long new decodes": ragged(*[(1, 4096)] * 64) | NEW | dict(decode_form=True),
    "new speculation": ragged((8, 512), (5, 5000), (0, 77), (16, 16), (1, 1), (3, 4096)) | NEW | dict(bounds=True),
    "even new speculation": ragged(*[(8, 4096)] * 16) | NEW | dict(bounds=True),
    "even new speculation of 2": ragged(*[(2, 130 + i) for i in range(16)]) | NEW | dict(bounds=True),
    "even new speculation of 32": ragged(*[(32, 2048)] * 16) | NEW | dict(bounds=True),
    "even new speculation of 64": ragged(*[(64, 1000)] * 3)
    | NEW
    | dict(bounds=True, sinks=True, window_size=(300, -1)),
    "decode of one tile": ragged((1, 64)) | dict(decode_form=True),
    "decode": ragged((1, 512)) | dict(decode_form=True),
    "long decode": ragged((1, 40000)) | dict(decode_form=True),
    "decodes": DECODE,
    "decodes, ragged, padding": DECODES | dict(bounds=True, padding=3),
    "decodes, window": DECODE | dict(window_size=(100, -1), sinks=True),
    "decodes, all features": DECODE | dict(window_size=(1000, -1), sinks=True, softcap=20.0, alibi=True),
    "200 decodes": ragged(*[(1, 37 * i) for i in range(200)]) | dict(decode_form=True),
    "64 long decodes": ragged(*[(1, 4096)] * 64) | dict(decode_form=True),
    "decodes, head_dim 64": DECODE | dict(head_dim=64),
    "decodes, head_dim 64, features": DECODE
    | dict(head_dim=64, window_size=(1000, -1), sinks=True, softcap=20.0, alibi=True),
    "decodes, head_dim 64, ragged, padding, fp8 out": DECODES
    | dict(bounds=True, padding=3, head_dim=64, out_dtype=E4M3),
    "decodes, head_dim 64, group 3, page 8, float16": DECODE
    | dict(head_dim=64, heads=24, page_size=8, dtype=torch.float16),
    "decodes, head_dim 64, hnd": DECODE | dict(head_dim=64, layout="HND"),
    "decodes, head_dim 64, shared buffer, strided": DECODE | dict(head_dim=64, shared_buffer=True, strided=True),
    "speculation of 4, head_dim 64, group 1": SPECULATION_OF_4 | dict(head_dim=64, heads=8),
    "decodes, head_dim 96": DECODE | dict(head_dim=96),
    "decodes, head_dim 256": DECODE | dict(head_dim=256),
    "decodes, head_dim 256, page 32": DECODE | dict(head_dim=256, page_size=32),
    "decodes, head_dim 192, page 64": DECODE | dict(head_dim=192, page_size=64),
    "decodes, group 1": DECODE | dict(kv_heads=32),
    "decodes, group 3": DECODE | dict(heads=24),
    "decodes, group 8, float16": DECODE | dict(heads=64, dtype=torch.float16),
    "decodes, group 64": DECODE | dict(heads=64, kv_heads=1),
    "decodes, page 8": DECODE | dict(page_size=8),
    "decodes, page 256": DECODE | dict(page_size=256),
    "decodes, page 544": DECODE | dict(page_size=544),
    "speculation": ragged((8, 512), (5, 5000), (0, 77), (16, 16), (1, 1), (3, 4096)) | dict(bounds=True),
    "speculation of 4": SPECULATION_OF_4,
    "speculation of 4, features": SPECULATION_OF_4 | FEATURES,
    "speculation of 4, softcap, no lse": SPECULATION_OF_4 | CAPPED,
    "speculation of 4, trees": SPECULATION_OF_4 | dict(qq_bias=4, tree=True),
    "speculation of 4, not causal": SPECULATION_OF_4 | dict(causal=False, window_size=(100, 50)),
    "speculation of 4, float16, page 8": SPECULATION_OF_4 | dict(dtype=torch.float16, page_size=8),
    "speculation of 4, group 3, hnd": SPECULATION_OF_4 | dict(heads=24, layout="HND"),
    "speculation of 4, head_dim 64": SPECULATION_OF_4 | dict(head_dim=64),
    "speculation of 4, head_dim 96": SPECULATION_OF_4 | dict(head_dim=96),
    "speculation of 4, head_dim 256, page 544": SPECULATION_OF_4 | dict(head_dim=256, page_size=544),
    "speculation of 4, new": SPECULATION_OF_4 | NEW,
    "speculation of 4, fp8 out, padding": SPECULATION_OF_4 | dict(out_dtype=E4M3, padding=5),
    "even speculation of 2, group 8": ragged(*[(2, 3000)] * 9) | dict(heads=64, bounds=True),
    "even speculation": ragged(*[(8, 4096)] * 16) | dict(bounds=True),
    "even speculation of 32": ragged(*[(32, 2048)] * 16) | dict(bounds=True),
    "even speculation of 64": ragged(*[(64, 1000)] * 3) | dict(bounds=True, sinks=True, window_size=(300, -1)),
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
    # shares that begin with blocks: these are about as long, and their number is no power of two
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
    # 320 blocks: 33 of each KV head are whole, more than are looked at at once
    "40 drafts, the last are cut": ragged(*[(32, 4096)] * 39, (32, 4000)) | dict(bounds=True),
    "even chunks of 128": ragged(*[(128, 3000)] * 3) | dict(bounds=True),
    "a chunk of 100, window": ragged((100, 9000)) | dict(bounds=True, window_size=(1000, -1)),
}
# Weights of fp8 products are coarse where no log-sum-exp is asked for.
CASES |= {
    f"{name}, no lse": fields | dict(lse=False)
    for name, fields in CASES.items()
    if fields.get("dtype") == E4M3 and not any(word in name for word in ("decodes", "trees, ", "group 3"))
}

# which the planner takes for even, for there are rows enough
ALL_LENGTHS = MIXED | dict(bounds=True, padding=6400)
SHORT = ragged(*[(393, 900)] * 3, (393, 393), (393, 700)) | dict(bounds=True)  # in tiles of 64
# as long queries: in blocks of 192 rows, for three consumers, or with an exact softcap for two
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
# Small ones, for each way in which a launch may go.
SMALL: dict[str, dict[str, Any]] = {
    "decodes": ragged((1, 300), (1, 0), (1, 2000)) | dict(decode_form=True),
    "decodes with room for as many keys": ragged((1, 300), (1, 0), (1, 1000)) | dict(decode_form=True),
    "decodes over e4m3, features": ragged((1, 300), (1, 1000)) | E4M3_CACHE | FEATURES | dict(decode_form=True),
    "decodes, x-packed, features": ragged((1, 300), (1, 0), (1, 1000)) | PACKED | FEATURES | dict(decode_form=True),
    "decodes, x-packed e5m2": ragged((1, 300), (1, 0), (1, 1000)) | PACKED | dict(cache_dtype=E5M2, decode_form=True),
    "drafts, x-packed, page 32": ragged((8, 500), (5, 5), (0, 9)) | PACKED | dict(bounds=True, page_size=32),
    "drafts, trees": ragged((8, 500), (5, 5), (0, 9)) | dict(bounds=True, qq_bias=8, tree=True),
    "even drafts": ragged((32, 700), (32, 40)) | dict(bounds=True),
    "chunk": ragged((100, 700)),
    "chunk, features": ragged((100, 700)) | FEATURES,
    "chunk, softcap": ragged((100, 700)) | CAPPED,
    "prompt, softcap": ragged((150, 300)) | dict(softcap=30.0, lse=False),
    "prompt, softcap, float16": ragged((150, 300)) | dict(softcap=30.0, dtype=torch.float16),
    "chunk, new": ragged((100, 700)) | NEW,
    "chunk, head_dim 256, page 24": ragged((40, 200)) | dict(head_dim=256, page_size=24),
    "chunk over e4m3": ragged((100, 400)) | E4M3_CACHE,
    "chunk of e4m3": ragged((100, 400)) | ALL_E4M3 | dict(lse=False),
    "mixed": ragged((1, 500), (70, 300), (1, 0), (9, 9)) | dict(padding=3),
    "mixed, group 12, features, head_dim 64": ragged((1, 500), (70, 300), (1, 0), (9, 9))
    | FEATURES
    | dict(heads=96, head_dim=64),
    "mixed over e4m3, group 3": ragged((1, 500), (70, 300), (9, 9)) | E4M3_CACHE | dict(heads=24),
    "prefills of any length": ragged(*[(n, n) for n in (112, 107, 165, 25, 64, 154, 57, 138)]),
    "invariant": ragged((1, 600), (70, 700)) | dict(batch_invariant=True),
    "decodes, a user's table": ragged((1, 300), (1, 0), (1, 1000)) | dict(decode_form=True, score_mod="relative"),
    "chunk, a user's alibi": ragged((100, 700)) | dict(score_mod="alibi"),
    "mixed, a user's chunks and all features": ragged((1, 500), (70, 300), (1, 0), (9, 9))
    | FEATURES
    | dict(score_mod="chunks", qq_bias=8, padding=3),
    "chunk, new, a user's table": ragged((100, 400)) | NEW | dict(score_mod="relative"),
    "chunk, softcap, a user's table": ragged((100, 400)) | CAPPED | dict(score_mod="relative"),
    "chunk over e4m3, a user's chunks": ragged((100, 400)) | E4M3_CACHE | dict(score_mod="chunks"),
    "chunk of e4m3, a user's softcap": ragged((100, 400)) | ALL_E4M3 | dict(lse=False, score_mod="softcap"),
    "mixed, head_dim 64, trees, a user's alibi": ragged((1, 500), (70, 300), (9, 9))
    | dict(head_dim=64, positions="tree", window_size=(200, -1), score_mod="alibi"),
    "invariant, a user's table": ragged((1, 600), (70, 700)) | dict(batch_invariant=True, score_mod="relative"),
    "mixed, x-packed, a user's alibi": ragged((1, 500), (70, 300), (9, 9)) | PACKED | dict(score_mod="alibi"),
    "a chunk of 72 heads, a user's table": ragged((130, 300)) | dict(heads=72, kv_heads=1, score_mod="relative"),
}
# Blocks over x-packed caches, with and without keys outside of these.
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
# Too few blocks for all programs, which have even shares of a line of them instead.
DRAFTS_LINE = ragged(*[(32, 8192)] * 6) | dict(bounds=True)
CHUNKS_LINE = ragged(*[(64, 8192)] * 3) | dict(bounds=True)  # of two blocks that read the same keys
LINES: dict[str, dict[str, Any]] = {
    "drafts": DRAFTS_LINE | dict(lse=False),
    "drafts of any context": ragged(
        (32, 9000), (20, 9500), (0, 50), (32, 9200), (31, 8000), (17, 9900), (32, 9999), (32, 7000)
    )
    | dict(bounds=True, sinks=True, padding=60),  # rows enough for all to be as long
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
# In which each tile's maxima are above those of the tiles before.
RISING: dict[str, dict[str, Any]] = {
    "prefills": PREFILLS,
    "prefills, float16": PREFILLS | dict(dtype=torch.float16),
    "prefills, head_dim 64": PREFILLS | dict(head_dim=64),
    "prefills, head_dim 256": PREFILLS | dict(head_dim=256),
    "a chunk, window": ragged((700, 3000)) | dict(window_size=(1000, -1)),
    "a chunk, not causal, window to both sides": ragged((700, 3000)) | dict(causal=False, window_size=(400, 300)),
    "a chunk, softcap, alibi, sinks": ragged((700, 3000)) | dict(softcap=50.0, alibi=True, sinks=True),
    "a chunk, softcap": ragged((700, 3000)) | dict(softcap=50.0, lse=False),
    "a chunk, softcap, float16": ragged((700, 3000)) | dict(softcap=50.0, dtype=torch.float16),
    "a chunk, x-packed": ragged((700, 3000)) | PACKED,
    "a chunk, x-packed, new": ragged((700, 3000), (90, 1900)) | PACKED | NEW,
    "a chunk, x-packed, new, softcap, alibi": ragged((300, 3000)) | PACKED | NEW | dict(softcap=50.0, alibi=True),
    "a chunk over e4m3": ragged((700, 3000)) | dict(cache_dtype=E4M3, lse=False),
    "prefills over e4m3": PREFILLS | dict(cache_dtype=E4M3, lse=False),
    "prefills over e4m3, head_dim 256": PREFILLS | dict(cache_dtype=E4M3, lse=False, head_dim=256),
    "a chunk over e4m3, softcap": ragged((700, 3000)) | dict(softcap=50.0, lse=False, cache_dtype=E4M3),
    "a chunk over e4m3, alibi": ragged((700, 3000)) | dict(alibi=True, lse=False, cache_dtype=E4M3),
    "mixed": ragged((300, 3000), (1, 4000), (90, 90)),
    "chunks of 16": ragged(*[(16, 3000)] * 6) | dict(bounds=True),
    "chunks of 64": ragged(*[(64, 5000)] * 12) | dict(bounds=True),
    "chunks of 64, float16": ragged(*[(64, 5000)] * 12) | dict(bounds=True, dtype=torch.float16),
    "invariant": ragged((300, 3000), (1, 4000)) | dict(batch_invariant=True),
    "decodes": DECODES | dict(bounds=True),
    "decodes, float16": DECODES | dict(bounds=True, dtype=torch.float16),
    "decodes, softcap, alibi, sinks": DECODES | dict(bounds=True, softcap=50.0, alibi=True, sinks=True),
    "decodes over e4m3": DECODES | dict(bounds=True, cache_dtype=E4M3),
    "decodes, x-packed": DECODES | PACKED | dict(bounds=True),
    "drafts of 4, x-packed e4m3": ragged(*[(4, 3000)] * 5, (2, 1000)) | PACKED | dict(bounds=True, cache_dtype=E4M3),
    "drafts of 4, x-packed": ragged(*[(4, 3000)] * 5, (2, 1000)) | PACKED | dict(bounds=True),
    "drafts of 2": ragged(*[(2, 3000)] * 5, (1, 1000)) | dict(bounds=True),
    "drafts of 4": ragged(*[(4, 3000)] * 5, (2, 1000)) | dict(bounds=True),
    "drafts of 4 over e4m3": ragged(*[(4, 3000)] * 5, (2, 1000)) | dict(bounds=True, cache_dtype=E4M3),
    "drafts of 8 over e4m3": ragged(*[(8, 3000)] * 5, (2, 1000)) | dict(bounds=True, cache_dtype=E4M3),
}
