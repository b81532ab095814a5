"""Values of another width than keys, and heads beyond 256 dims, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import paged_attn
from paged_attn import reference
from tests.support.cases import E4M3, E5M2, Case, build, run
from tests.support.invariance import assert_the_same_bits_alone

WIDTHS = [(192, 128), (128, 256), (64, 128), (32, 512), (512, 32), (48, 80), (16, 1)]
DECODE: dict[str, Any] = dict(query_lens=(1,) * 4, seq_lens=(1, 40, 0, 130), heads=4, kv_heads=2, decode_form=True)
PREFILL: dict[str, Any] = dict(query_lens=(9, 40), seq_lens=(50, 40), heads=4, kv_heads=2, padding=2)
MIXED: dict[str, Any] = dict(query_lens=(1, 30, 1, 0, 2), seq_lens=(70, 35, 3, 9, 2), heads=4, kv_heads=2, padding=1)
LONG: dict[str, Any] = dict(query_lens=(1,), seq_lens=(3000,), heads=4, kv_heads=2)
FEATURES: dict[str, Any] = dict(window_size=(20, -1), softcap=20.0, alibi=True, sinks=True)
NARROW, BROAD = dict(head_dim=48, value_dim=20), dict(head_dim=24, value_dim=72)


@pytest.mark.parametrize("head_dim, value_dim", WIDTHS)
@pytest.mark.parametrize("layout", ["NHD", "HND", "x"])
def test_values_have_a_width_of_their_own_in_every_layout(
    head_dim: int, value_dim: int, layout: str, device: str
) -> None:
    run(Case("decode", **DECODE, head_dim=head_dim, value_dim=value_dim, layout=layout), device)


@pytest.mark.parametrize("widths", [NARROW, BROAD], ids=["narrow", "broad"])
@pytest.mark.parametrize("batch", [DECODE, PREFILL, MIXED, LONG], ids=["decode", "prefill", "mixed", "long"])
@pytest.mark.parametrize(
    "more",
    [
        FEATURES,
        dict(new=True, strided=True, positions="tree", qq_bias=8, tree=True),
        dict(cache_dtype=E4M3, dtype=torch.bfloat16, scales="per_head"),
        dict(cache_dtype=E5M2, layout="x", scales="float", sinks=True),
        dict(dtype=E4M3, cache_dtype=E4M3, out_dtype=E4M3, scales="tensor"),
        dict(batch_invariant=True, sinks=True),
        dict(shared_buffer=True, page_size=12, layout="HND"),
        dict(own_out=True, dtype=torch.float16),
        dict(only="decode", score_mod="softcap"),
    ],
    ids=["features", "new", "e4m3", "packed e5m2", "all fp8", "invariant", "shared", "own out", "only"],
)
def test_values_of_another_width_beside(
    widths: dict[str, Any], batch: dict[str, Any], more: dict[str, Any], device: str
) -> None:
    run(Case("widths", **{**batch, **widths, **more}), device)


@pytest.mark.parametrize("head_dim", [257, 320, 512])
@pytest.mark.parametrize("batch", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("more", [{}, FEATURES, dict(new=True), dict(cache_dtype=E4M3)], ids=str)
def test_heads_have_up_to_512_dims(head_dim: int, batch: dict[str, Any], more: dict[str, Any], device: str) -> None:
    run(Case("wide", **{**batch, **more}, head_dim=head_dim), device)


def test_states_of_wide_values_are_joined_piece_by_piece(device: str) -> None:
    for widths in (dict(head_dim=512), dict(head_dim=64, value_dim=300)):
        for more in ({}, dict(batch_invariant=True), dict(query_lens=(5,), seq_lens=(4000,))):
            run(Case("long", **{**LONG, **widths, **more}, sinks=True), device)


def test_a_result_of_the_calls_own_is_as_wide_as_values_again_and_again(device: str) -> None:
    inputs = build(Case("twice", **DECODE, **BROAD, own_out=True), device)
    for _ in range(3):
        out, lse = paged_attn.paged_attention(**inputs)
        assert out.shape == (4, 4, 72)
        assert lse.shape == (4, 4)
        assert out.is_contiguous()


def test_merged_states_are_as_wide_as_values(device: str) -> None:
    for width in (20, 300, 512):
        outs, lses = torch.randn(5, 3, 4, width, device=device), torch.randn(5, 3, 4, device=device)
        for got, want in zip(paged_attn.merge_states(outs, lses), reference.merge_states(outs, lses)):
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["NHD", "HND", "x"])
@pytest.mark.parametrize("cache_dtype", [torch.float32, E4M3])
@pytest.mark.parametrize("widths", [NARROW, BROAD, dict(head_dim=512, value_dim=512)], ids=str)
def test_keys_and_values_of_two_widths_are_written(
    widths: dict[str, Any], cache_dtype: Any, layout: str, device: str
) -> None:
    case = Case(
        "write", query_lens=(5,), seq_lens=(5,), heads=3, kv_heads=3, layout=layout, cache_dtype=cache_dtype, **widths
    )
    inputs = build(case, device)
    caches = [inputs["k_cache"], inputs["v_cache"]]
    k, v = torch.randn(4, 3, case.head_dim, device=device), torch.randn(4, 3, case.value_width, device=device)
    scales = {name: 0.5 for name in ("k_scale", "v_scale") if name in inputs}
    want = [x.clone() for x in caches]
    slots = torch.tensor([3, -1, 20, 7], device=device)
    paged_attn.write_kv(k, v, *caches, slots, kv_layout=inputs["kv_layout"], **scales)
    reference.write_kv(k, v, *want, slots, kv_layout=inputs["kv_layout"], **scales)
    for got, expected in zip(caches, want):
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("widths", [NARROW, dict(head_dim=320), dict(head_dim=40, value_dim=300)], ids=str)
def test_a_query_has_the_same_bits_alone_and_in_a_batch_at_any_width(widths: dict[str, Any], device: str) -> None:
    assert_the_same_bits_alone(
        Case("invariant", (1, 20, 1), (1300, 1100, 30), **widths, batch_invariant=True, lse=False), device
    )


def test_memory_of_another_value_width_is_no_call_that_was_made_before(device: str) -> None:
    for width in (24, 40, 24, 48):
        run(Case("again", **DECODE, head_dim=48, value_dim=width), device)
        run(Case("again", **DECODE, head_dim=48, value_dim=width, own_out=True), device)
