"""Numbers at their ends: every scalar argument, and tensors of scalars, over their range, against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.support.cases import E4M3, Case, build, run

# Gemma's 50 and what is next to the border beyond which scores are capped in another way, and far beyond it.
CAPS = [1e-300, 1e-45, 1e-38, 1e-3, 1.0, 30.0, 50.0, 64.0, 64.5, 100.0, 1e3, 1e6, 1e8, 1e20, 2e38]
SMALL: dict[str, Any] = dict(query_lens=(1, 5, 0), seq_lens=(40, 21, 0), heads=4, kv_heads=2, page_size=8)


@pytest.mark.parametrize("cap", CAPS)
def test_softcap_of_any_size(cap: float, device: str) -> None:
    run(Case("cap", **SMALL, softcap=cap), device)


@pytest.mark.parametrize(
    ("cap", "scale"), [(64.5, 1.0), (64.5, 20.0), (100.0, 20.0), (100.0, 1e4), (1e3, 1.0), (1e3, 8.0), (1e6, 8.0)]
)
def test_scores_near_and_beyond_a_large_softcap(cap: float, scale: float, device: str) -> None:
    """From where tanh is its argument to where it is 1."""
    run(Case("cap", **SMALL, softcap=cap, softmax_scale=scale), device, **coarse(device))


def coarse(device: str) -> dict[str, Any]:
    """Queries and keys of few bits, whose products float32 adds up exactly: large scores are right to the last."""
    inputs = build(Case("cap", **SMALL), device)
    return {name: (inputs[name] * 2).round() / 2 for name in ("q", "k_cache")}


@pytest.mark.parametrize("scale", [0.0, -0.2, 1e-45, 1e-40, 1e-38, -1e-30, 10.0, -3.0])
def test_softmax_scale_of_any_size_and_sign(scale: float, device: str) -> None:
    run(Case("scale", **SMALL, softmax_scale=scale), device)


@pytest.mark.parametrize("scale", [1e38, -1e38, 1e30])
@pytest.mark.parametrize("cap", [1e-38, 0.1, 30.0, 1e6])
def test_a_huge_scale_below_a_softcap(scale: float, cap: float, device: str) -> None:
    run(Case("scale", **SMALL, softmax_scale=scale, softcap=cap, lse=cap < 1e3), device)


# Beyond the range that the docstring names, 2^30: right where a product and a sum are rounded one by one.
FAR = pytest.param(1e30, marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU rounds them at once"))


@pytest.mark.parametrize("slope", [0.0, 1e-45, 1e-38, -1e-3, 1e4, -1e4, FAR])
def test_slopes_of_any_size_and_sign(slope: float, device: str) -> None:
    slopes = torch.tensor([slope, 0.5, -slope if abs(slope) < 1 else slope, 0.0], device=device)
    run(Case("slopes", **SMALL, alibi=True), device, alibi_slopes=slopes)


@pytest.mark.parametrize("sink", [-math.inf, -1e38, -1e30, 0.0, 1e4, 1e30, 1e38, math.inf])
def test_sinks_of_any_size(sink: float, device: str) -> None:
    run(Case("sinks", **SMALL, sinks=True), device, sinks=torch.tensor([sink, 0.5, sink, -0.5], device=device))


@pytest.mark.parametrize("bias", [-math.inf, -2e38, -1e30, -1e4, 50.0, FAR])
def test_biases_of_any_size(bias: float, device: str) -> None:
    case = Case("bias", **SMALL, qq_bias=5)
    matrix = torch.where(torch.ones(5, 5, device=device).tril(-1) > 0, bias, 0.0)
    run(case, device, qq_bias=matrix)


@pytest.mark.parametrize("scale", [2.0**-126, 1e-30, 1e-3, 1e3, 1e30])
def test_scales_of_keys_are_undone_by_queries(scale: float, device: str) -> None:
    """Only the product of scales has to be of ordinary size."""
    case = Case("scales", **SMALL, dtype=E4M3, cache_dtype=E4M3, scales="float", out_dtype=torch.float32)
    run(case, device, k_scale=scale, q_scale=1.0 / scale)


@pytest.mark.parametrize("scale", [2.0**-120, 1e-20, 1e20, 1e35])
def test_scales_of_values_are_undone_by_the_output(scale: float, device: str) -> None:
    case = Case("scales", **SMALL, cache_dtype=E4M3, scales="float", out_dtype=E4M3, out_scale=scale / 50)
    run(case, device, v_scale=scale)


@pytest.mark.parametrize("window", [(0, 0), (2**31 - 1, -1), (2**31 - 1, 2**31 - 1), (0, 2**31 - 1), (2**30, 5)])
@pytest.mark.parametrize("causal", [True, False])
def test_windows_of_any_size(window: tuple[int, int], causal: bool, device: str) -> None:
    run(Case("window", **SMALL, window_size=window, causal=causal), device)


def test_bounds_of_zero_serve_sequences_of_nothing(device: str) -> None:
    run(Case("none", (0, 0), (0, 5), padding=3), device, max_seqlen_q=0, max_seqlen_k=5)
    run(Case("none", (0, 0), (0, 0), padding=3), device, max_seqlen_q=0, max_seqlen_k=0)


# ---- Hopper's kernels: of few rows, of blocks with and without tanh's instruction, of fp8 ----------------------------

HOPPER: dict[str, Case] = {
    name: Case(name, heads=8, kv_heads=2, **({"head_dim": 64, "dtype": torch.bfloat16} | fields))  # type: ignore[arg-type]
    for name, fields in {
        "decodes": dict(query_lens=(1,) * 3, seq_lens=(300, 9, 64), decode_form=True),
        "blocks": dict(query_lens=(100,), seq_lens=(160,)),
        "blocks of 128": dict(query_lens=(100,), seq_lens=(300,), head_dim=128),
        "blocks of fp8": dict(query_lens=(100,), seq_lens=(160,), dtype=E4M3, cache_dtype=E4M3),
        "blocks over fp8": dict(query_lens=(100,), seq_lens=(160,), cache_dtype=E4M3),
        "blocks of float16": dict(query_lens=(100,), seq_lens=(300,), head_dim=128, dtype=torch.float16),
    }.items()
}
HOPPER_ENDS: dict[str, dict[str, Any]] = {
    "tiny softcap": dict(softcap=1e-300),
    "softcap of 64": dict(softcap=64.0),
    "softcap of 65": dict(softcap=65.0),
    "softcap of 1e6": dict(softcap=1e6),
    "softcap of 2e38": dict(softcap=2e38),
    "softcap of 1e6, biases": dict(softcap=1e6, alibi=True),
    "scale of 1e38, softcap": dict(softcap=0.1, softmax_scale=1e38),
    "scale of 0": dict(softmax_scale=0.0),
    "denormal scale": dict(softmax_scale=1e-40),
    "negative scale": dict(softmax_scale=-0.3),
}


@pytest.mark.hopper
@pytest.mark.parametrize("lse", [True, False])
@pytest.mark.parametrize("end", HOPPER_ENDS)
@pytest.mark.parametrize("name", HOPPER)
def test_hopper_kernels_at_the_ends(name: str, end: str, lse: bool, on_hopper: None, device: str) -> None:
    from dataclasses import replace

    run(replace(HOPPER[name], lse=lse, **HOPPER_ENDS[end]), device)


@pytest.mark.hopper
@pytest.mark.parametrize("slope", [1e-38, -1e-3, 1e4, 1e6])
@pytest.mark.parametrize("name", ["decodes", "blocks of 128"])
def test_hopper_slopes_and_sinks_at_the_ends(name: str, slope: float, on_hopper: None, device: str) -> None:
    from dataclasses import replace

    slopes = torch.tensor([slope, 0.5] * 4, device=device)
    sinks = torch.tensor([math.inf, -math.inf, 1e30, -1e30] * 2, device=device)
    case = replace(HOPPER[name], alibi=True, sinks=True)
    run(case, device, alibi_slopes=slopes, sinks=sinks.to(case.dtype))
