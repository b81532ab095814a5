"""On a GPU: dtypes x features x lengths x layouts x pages, sizes of a server, a huge cache, a captured call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import paged_attn
from tests.support import hopper_plans
from tests.support.cases import E4M3, Case, build, compare, run

pytestmark = pytest.mark.gpu
FP16, BF16 = torch.float16, torch.bfloat16


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


@pytest.mark.parametrize("page_size", [16, 24, 544])
@pytest.mark.parametrize("layout", ["NHD", "HND", "x"])
@pytest.mark.parametrize("lengths", GPU_LENGTHS)
@pytest.mark.parametrize("feature", GPU_FEATURES)
@pytest.mark.parametrize("dtype", GPU_DTYPES)
def test_matrix(dtype: str, feature: str, lengths: str, layout: str, page_size: int, device: str) -> None:
    options = {**GPU_LENGTHS[lengths], **GPU_FEATURES[feature], **GPU_DTYPES[dtype]}
    with hopper_plans.mixed() if page_size < 544 else hopper_plans.long():
        run(Case("matrix", **options, layout=layout, page_size=page_size, heads=16, kv_heads=4, head_dim=128), device)


@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize("lengths", GPU_LENGTHS)
@hopper_plans.mixed()
def test_matrix_of_head_dims(dtype: str, head_dim: int, lengths: str, device: str) -> None:
    run(Case("dims", **GPU_LENGTHS[lengths], **GPU_DTYPES[dtype], heads=10, kv_heads=2, head_dim=head_dim), device)


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
