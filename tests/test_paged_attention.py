"""The library against the reference: the four systems by name, every feature alone, every pair, all at once.

Every case is poisoned (tests/cases.py), returns its LSE, and runs with tiles of 32 keys, in one share or in three.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch

import paged_attn
from tests.cases import E4M3, E5M2, Case, bits, build, compare, run

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


# --- the edges of a call ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_batches_in_which_nobody_sees_anything(segments: int, sinks: bool, device: str, cut: Cut) -> None:
    cut(segments)
    run(Case("nothing", (1, 3, 0, 20), (0, -5, 0, -40), sinks=sinks, padding=5, causal=False), device)
    run(Case("nothing, decode form", (1, 1), (0, -1), sinks=sinks, decode_form=True), device)


@pytest.mark.parametrize("new", [False, True], ids=["cached", "new"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "non_causal"])
def test_sequences_shorter_than_their_queries(new: bool, causal: bool, device: str, cut: Cut) -> None:
    cut(segments=2)
    case = Case("short", (5, 12, 3), (2, 9, 3), new=new, causal=causal, alibi=True, sinks=True, qq_bias=4)
    run(case, device)
    run(replace(case, window_size=(3, 2)), device)


@pytest.mark.parametrize("seqs, tokens", [(0, 0), (0, 3), (2, 0)])
def test_empty_batches(seqs: int, tokens: int, device: str) -> None:
    inputs = build(Case("empty", (0,) * max(seqs, 1), (7,) * max(seqs, 1), padding=tokens), device)
    inputs["page_table"], inputs["seq_lens"] = inputs["page_table"][:seqs], inputs["seq_lens"][:seqs]
    inputs["cu_seqlens_q"] = inputs["cu_seqlens_q"][: seqs + 1]
    out, lse = paged_attn.paged_attention(**inputs)
    assert out.shape[0] == tokens
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("q_bound, k_bound", [(18, 67), (19, 4000), (4000, 67), (None, 67), (18, None)])
def test_bounds_may_be_loose(q_bound: int | None, k_bound: int | None, device: str) -> None:
    run(Case("bounds", **MIXED, dtype=FP16), device, max_seqlen_q=q_bound, max_seqlen_k=k_bound)


@pytest.mark.parametrize("segments", [1, 3])
def test_two_runs_give_the_same_bits(segments: int, device: str, cut: Cut) -> None:
    cut(segments)
    case = Case("twice", **FEW, dtype=FP16)
    first, second = (paged_attn.paged_attention(**build(case, device)) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def test_prefill_only_of_a_decode_batch_writes_nothing(device: str) -> None:
    case = Case("nothing asked", (1, 1), (5, 40), decode_form=True)
    inputs = build(case, device)
    out, _ = paged_attn.paged_attention(**{**inputs, "only": "prefill"})
    assert out.isnan().all()


def test_no_queries_over_a_long_table(device: str) -> None:
    """A table wide enough to cut keys, and nobody who asks: padding is still cleared."""
    inputs = build(Case("no queries", (0, 0), (4000, 9), padding=3), device)
    out, lse = paged_attn.paged_attention(**{**inputs, "max_seqlen_q": 0})
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("window", [(2**31 - 1, 2**31 - 1), (-1, 2**31 - 1), (2**31 - 3, -1)], ids=str)
def test_a_window_wider_than_any_sequence_hides_nothing(window: tuple[int, int], device: str) -> None:
    run(Case("wide", (3, 1, 4), (5, 40, 2), causal=False, window_size=window), device)


@pytest.mark.gpu
def test_a_tensor_on_the_cpu_is_told_where_kernels_run(device: str) -> None:
    with pytest.raises(ValueError, match="compiled for the GPU"):
        paged_attn.paged_attention(**build(Case("cpu", (1,), (5,)), "cpu"))


def test_many_short_prompts_beside_one_long(device: str) -> None:
    lens = (1, 9, 1, 2, 33, 1, 0, 4)
    run(Case("mix", lens, tuple(n + 20 for n in lens), heads=8, kv_heads=1, padding=6), device)


def test_the_result_takes_the_dtype_of_the_query(device: str) -> None:
    case = Case("no out", (1, 5), (20, 30), dtype=FP16)
    inputs = build(case, device)
    given, lse = paged_attn.paged_attention(**inputs)
    made, same_lse = paged_attn.paged_attention(**{**inputs, "out": None})
    alone = paged_attn.paged_attention(**{**inputs, "out": None, "return_lse": False})
    assert made.dtype == alone.dtype == FP16
    assert torch.equal(given, made)
    assert torch.equal(given, alone)
    assert torch.equal(lse, same_lse)


def test_inputs_are_not_written(device: str) -> None:
    inputs = build(replace(EVERYTHING, new=True), device)
    before = {name: bits(x).clone() for name, x in inputs.items() if isinstance(x, torch.Tensor) and name != "out"}
    paged_attn.paged_attention(**inputs)
    for name, copy in before.items():
        torch.testing.assert_close(bits(inputs[name]), copy, rtol=0, atol=0, equal_nan=True, msg=name)


def test_scores_of_any_size_are_safe(device: str, cut: Cut) -> None:
    cut(segments=2)
    run(Case("peaked", **FEW, softmax_scale=6.0), device)  # float32 rounds a score by its size
    run(Case("negative scale", **FEW, softmax_scale=-3.0), device)
    run(Case("flat", **FEW, softmax_scale=0.0), device)


# --- on a GPU --------------------------------------------------------------------------------------------------------

GPU_DTYPES: dict[str, dict[str, Any]] = {
    "fp16": {"dtype": FP16},
    "bf16": {"dtype": BF16},
    "bf16_fp8kv": {"dtype": BF16, "cache_dtype": E4M3, "scales": "per_head"},
    "fp8": {"dtype": E4M3, "out_dtype": E4M3, "scales": "tensor"},
}
GPU_FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window_sinks_softcap": {"window_size": (1023, -1), "sinks": True, "softcap": 20.0},
    "alibi_tree_new": {"alibi": True, "qq_bias": 64, "tree": True, "new": True},
}
GPU_LENGTHS: dict[str, dict[str, Any]] = {
    "decode": {"query_lens": (1,) * 7, "seq_lens": (1, 0, 17, 544, 1500, 2048, 3000), "decode_form": True},
    "mixed": {"query_lens": (1, 0, 700, 33, 1, 128), "seq_lens": (2500, 5, 1900, 33, 0, 100), "padding": 9},
}


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 24, 544])
@pytest.mark.parametrize("layout", ["NHD", "HND", "x"])
@pytest.mark.parametrize("lengths", GPU_LENGTHS)
@pytest.mark.parametrize("feature", GPU_FEATURES)
@pytest.mark.parametrize("dtype", GPU_DTYPES)
def test_matrix(dtype: str, feature: str, lengths: str, layout: str, page_size: int, device: str) -> None:
    options = {**GPU_LENGTHS[lengths], **GPU_FEATURES[feature], **GPU_DTYPES[dtype]}
    run(Case("matrix", **options, layout=layout, page_size=page_size, heads=16, kv_heads=4, head_dim=128), device)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize("lengths", GPU_LENGTHS)
def test_matrix_of_head_dims(dtype: str, head_dim: int, lengths: str, device: str) -> None:
    run(Case("dims", **GPU_LENGTHS[lengths], **GPU_DTYPES[dtype], heads=10, kv_heads=2, head_dim=head_dim), device)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        Case("decode 64 x 4096", (1,) * 64, (4096,) * 64, decode_form=True),
        Case("decode 1 x 32768", (1,), (32768,), decode_form=True, bounds=True),
        Case("prefill 2 x 4096", (4096, 4096), (4096, 4096), page_size=128, bounds=True),
        Case("chunk of 512 after 16384", (512, 1), (16896, 9000), new=True),
    ],
    ids=str,
)
def test_sizes_of_a_server(case: Case, device: str) -> None:
    run(replace(case, heads=32, kv_heads=8, head_dim=128, dtype=BF16), device)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NHD", "HND", "x"])
@pytest.mark.parametrize("cache_dtype", [BF16, E4M3], ids=["bf16", "fp8"])
def test_a_cache_of_more_than_two_to_the_31_elements(layout: str, cache_dtype: torch.dtype, device: str) -> None:
    case = Case("huge", (1, 40), (700, 300), heads=16, kv_heads=8, head_dim=128, dtype=BF16, cache_dtype=cache_dtype)
    case = replace(case, layout=layout, scales="tensor", pages=2**31 // (16 * 8 * 128) + 200)
    inputs = build(case, device)
    live = inputs["page_table"][inputs["page_table"] != 2**31 - 1]
    assert live.min() * inputs["v_cache"].stride(0) >= 2**31
    out, lse = paged_attn.paged_attention(**inputs)
    compare(case, out, lse, inputs)


@pytest.mark.gpu
def test_a_captured_call_follows_its_inputs(device: str) -> None:
    case = Case("graph", (1,) * 8, (300,) * 8, heads=8, kv_heads=2, head_dim=128, dtype=BF16, decode_form=True)
    inputs = build(case, device)
    paged_attn.paged_attention(**inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = paged_attn.paged_attention(**inputs)
    shorter = replace(case, seq_lens=(1, 0, 16, 17, 100, 250, 299, 300))
    inputs["seq_lens"].copy_(torch.tensor(shorter.seq_lens, dtype=torch.int32))
    inputs["q"].copy_(inputs["q"].flip(0))
    out.fill_(torch.nan)
    graph.replay()
    compare(shorter, out, lse, inputs)
