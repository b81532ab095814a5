"""The library against the reference: the four systems by name, every size, features in pairs and all at once.

Every case is poisoned (tests/support/cases.py), returns its LSE, and runs with tiles of 32 keys, in one share or in
three.  The edges of a call are in tests/arguments/test_edges.py, and what only a GPU can tell in test_matrix.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch

import paged_attn
from tests.support.cases import E4M3, E5M2, Case, build, compare, run

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
Cut = Callable[..., None]

# One token after 67 keys; a sequence without queries; a chunk; two blocks of a prompt after a context; an empty one
# that is asked all the same; a sequence shorter than its queries.
MIXED = {"query_lens": (1, 0, 5, 18, 1, 2), "seq_lens": (67, 9, 37, 50, 0, 1)}
# The same in short, for keys in several shares: the interpreter merges token by token.
FEW = {"query_lens": (1, 0, 9, 2), "seq_lens": (67, 9, 50, 1)}
# Ends within a tile, at a tile's end, at a page's end; one key; none; fewer than none.
DECODE = {"query_lens": (1,) * 6, "seq_lens": (67, 96, 48, 1, 0, -3)}

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp16": {"dtype": FP16},
    "bf16": {"dtype": BF16},
    "alibi": {"alibi": True},
    "window": {"window_size": (20, -1)},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 2.0, "softmax_scale": 0.5},
    "qq_bias": {"qq_bias": 4},
    "tree": {"qq_bias": 7, "tree": True},
    "fp8_kv": {"dtype": FP16, "cache_dtype": E4M3, "scales": "tensor"},
    "fp8_e5m2_kv": {"dtype": BF16, "cache_dtype": E5M2, "scales": "float"},
    "fp8_query": {"dtype": E4M3, "scales": "per_head"},
    "fp8_out": {"dtype": FP16, "out_dtype": E4M3},
    "head_dim_80": {"head_dim": 80},
    "one_head": {"heads": 1, "kv_heads": 1},
    "non_causal": {"causal": False},
}


def features(system: str, **base: Any) -> Any:
    """Every feature in one system; the ids are the rows of the system's table."""
    return pytest.mark.parametrize(
        "case", [Case(f"{system}: {name}", **{**base, **feature}) for name, feature in FEATURES.items()], ids=FEATURES
    )


# --- the four systems ------------------------------------------------------------------------------------------------


@features("paged decode", **DECODE, heads=6, kv_heads=2, layout="x", decode_form=True)
def test_paged_decode(case: Case, device: str, cut: Cut) -> None:
    cut(segments=1)
    run(case, device)


@features("paged decode, any page size", **DECODE, heads=6, kv_heads=2, layout="x", decode_form=True, page_size=24)
def test_paged_decode_any_page_size(case: Case, device: str, cut: Cut) -> None:
    cut(segments=1)
    run(case, device)


@features("prefix prefill", **MIXED, heads=4, kv_heads=2, layout="x", new=True)
def test_prefix_prefill(case: Case, device: str, cut: Cut) -> None:
    cut(segments=1)
    run(case, device)


@features("unified split-KV", **FEW, heads=4, kv_heads=2, layout="NHD")
def test_unified_split_kv(case: Case, device: str, cut: Cut) -> None:
    cut(segments=3)
    run(case, device)


@pytest.mark.parametrize("only", ["decode", "prefill"])
@pytest.mark.parametrize("new", [False, True], ids=["cached", "new"])
@pytest.mark.parametrize("segments", [1, 3])
def test_only_leaves_the_other_rows_untouched(only: str, new: bool, segments: int, device: str, cut: Cut) -> None:
    cut(segments)
    run(Case(f"only {only}", **MIXED, layout="x", new=new, only=only, padding=2), device)


@pytest.mark.parametrize("layout", ["NHD", "x"])
@pytest.mark.parametrize("new", [False, True], ids=["cached", "new"])
def test_pages_of_544(layout: str, new: bool, device: str, cut: Cut) -> None:
    cut(segments=3, tile=128)
    case = Case("page 544", (1, 4), (1100, 547), layout=layout, page_size=544, new=new, dtype=FP16)
    run(case, device)


# --- every size ------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, dict[str, Any]] = {
    "nhd": {"layout": "NHD"},
    "hnd": {"layout": "HND"},
    "x4": {"layout": "x", "x": 4},
    "x8": {"layout": "x", "x": 8},
    "x16": {"layout": "x", "x": 16},
    "shared_nhd": {"layout": "NHD", "shared_buffer": True},
    "shared_hnd": {"layout": "HND", "shared_buffer": True},
    "shared_x": {"layout": "x", "shared_buffer": True},
    "strided": {"strided": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("new", [False, True], ids=["cached", "new"])
def test_layouts(layout: str, new: bool, device: str, cut: Cut) -> None:
    cut(segments=1)
    run(Case(layout, **MIXED, heads=4, kv_heads=2, dtype=FP16, new=new, **LAYOUTS[layout]), device)


@pytest.mark.parametrize("page_size", [1, 12, 16, 24, 128])
@pytest.mark.parametrize("layout", ["NHD", "HND", "x"])
def test_page_sizes(page_size: int, layout: str, device: str, cut: Cut) -> None:
    cut(segments=3)
    run(Case(f"page {page_size}", **FEW, layout=layout, page_size=page_size, window_size=(30, -1)), device)


@pytest.mark.parametrize("head_dim", [16, 24, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("layout, new", [("NHD", False), ("x", True)], ids=["nhd", "x_new"])
def test_head_dims(head_dim: int, layout: str, new: bool, device: str, cut: Cut) -> None:
    cut(segments=2)
    run(Case(f"head_dim {head_dim}", (1, 18), (40, 50), head_dim=head_dim, layout=layout, new=new, dtype=FP16), device)


@pytest.mark.parametrize("group, kv_heads", [(1, 1), (1, 2), (3, 2), (5, 1), (7, 2), (8, 1), (16, 1), (16, 2), (64, 1)])
def test_groups(group: int, kv_heads: int, device: str, cut: Cut) -> None:
    cut(segments=2 if group <= 8 else 1)
    lens = {"query_lens": (1, 0, 9, 2), "seq_lens": (40, 5, 30, 1)}
    case = Case(f"group {group}", **lens, heads=group * kv_heads, kv_heads=kv_heads, head_dim=16, padding=1)
    run(replace(case, sinks=True, alibi=True), device)


@pytest.mark.parametrize("cache_dtype", [None, E4M3, E5M2], ids=["same", "e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32, E4M3, E5M2], ids=["fp16", "bf16", "fp32", "e4m3", "e5m2"])
def test_dtypes_of_query_and_cache(dtype: torch.dtype, cache_dtype: torch.dtype, device: str, cut: Cut) -> None:
    cut(segments=1)
    case = Case("dtypes", **FEW, dtype=dtype, cache_dtype=cache_dtype, scales="per_head", heads=4, kv_heads=2)
    run(case, device)


@pytest.mark.parametrize("out_dtype", [FP16, BF16, FP32, E4M3, E5M2], ids=["fp16", "bf16", "fp32", "e4m3", "e5m2"])
@pytest.mark.parametrize("segments", [1, 3])
def test_dtypes_of_out(out_dtype: torch.dtype, segments: int, device: str, cut: Cut) -> None:
    cut(segments)
    run(Case("out", **FEW, dtype=FP16, out_dtype=out_dtype), device)


@pytest.mark.parametrize("out_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("segments", [1, 3])
def test_fp8_output_saturates(out_dtype: torch.dtype, segments: int, device: str, cut: Cut) -> None:
    cut(segments)
    case = Case("saturated", (1, 5), (3, 7), dtype=FP32, out_dtype=out_dtype, out_scale=1e-5)
    inputs = build(case, device)
    out, lse = paged_attn.paged_attention(**inputs)
    compare(case, out, lse, inputs)
    assert (out.float().abs() == torch.finfo(out_dtype).max).any()


def test_a_cache_of_half_precision_under_an_fp8_query(device: str, cut: Cut) -> None:
    cut(segments=1)
    run(Case("fp8 query, fp16 cache", **FEW, dtype=E4M3, cache_dtype=FP16, new=True, scales="float"), device)


@pytest.mark.parametrize("scales", ["none", "float", "tensor", "per_head"])
@pytest.mark.parametrize("new", [False, True], ids=["cached", "new"])
def test_scales(scales: str, new: bool, device: str, cut: Cut) -> None:
    cut(segments=2)
    case = Case(scales, **FEW, heads=4, kv_heads=2, dtype=E4M3, scales=scales, out_dtype=E4M3, new=new)
    run(case, device)


# --- features that touch ---------------------------------------------------------------------------------------------

PAIRED: dict[str, dict[str, Any]] = {
    "window": {"window_size": (20, -1)},
    "two_sided": {"window_size": (9, 4), "causal": False},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 2.0, "softmax_scale": 0.5},
    "alibi": {"alibi": True},
    "qq_bias": {"qq_bias": 4},
    "tree": {"qq_bias": 7, "tree": True},
    "new": {"new": True},
    "fp8_kv": {"dtype": FP16, "cache_dtype": E4M3, "scales": "per_head", "heads": 4, "kv_heads": 2},
    "fp8_query": {"dtype": E5M2, "scales": "tensor"},
    "fp8_out": {"out_dtype": E4M3},
    "x_page_24": {"layout": "x", "page_size": 24},
    "odd_dim": {"head_dim": 24, "heads": 6},
    "decode_only": {"only": "decode", "padding": 1},
}


@pytest.mark.parametrize("one, other", list(combinations(PAIRED, 2)))
def test_pairs_of_features(one: str, other: str, device: str, cut: Cut) -> None:
    cut(segments=3)
    run(Case(f"{one} x {other}", **{**FEW, **PAIRED[one], **PAIRED[other]}), device)


WINDOWS = [(0, 0), (0, -1), (5, 0), (-1, 0), (-1, 3), (7, 3), (16, 16), (31, 32), (500, 500), (0, 40)]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "non_causal"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows(window: tuple[int, int], causal: bool, device: str, cut: Cut) -> None:
    cut(segments=2)
    run(Case(f"window {window}", **FEW, window_size=window, causal=causal, page_size=12), device)


EVERYTHING = Case(
    "everything",
    **FEW,
    heads=6,
    kv_heads=2,
    head_dim=24,
    page_size=12,
    dtype=FP16,
    cache_dtype=E4M3,
    out_dtype=E4M3,
    window_size=(20, -1),
    softmax_scale=0.4,
    softcap=3.0,
    alibi=True,
    sinks=True,
    qq_bias=6,
    tree=True,
    scales="per_head",
    padding=3,
    strided=True,
    bounds=True,
    shared_buffer=True,
)


@pytest.mark.parametrize("layout", ["NHD", "HND", "x"])
@pytest.mark.parametrize("new", [False, True], ids=["cached", "new"])
@pytest.mark.parametrize("segments", [1, 4])
def test_everything_at_once(layout: str, new: bool, segments: int, device: str, cut: Cut) -> None:
    cut(segments)
    run(replace(EVERYTHING, layout=layout, new=new), device)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_everything_at_once_with_fp8_queries_both_ways(dtype: torch.dtype, device: str, cut: Cut) -> None:
    cut(segments=3)
    run(replace(EVERYTHING, dtype=dtype, cache_dtype=dtype, causal=False, window_size=(15, 6), new=True), device)
