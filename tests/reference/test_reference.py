"""The reference against torch's own attention in float64, and against itself in other layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from paged_attn import reference
from tests.support.cases import Case, build
from tests.support.one_sequence import F64, attend, distances, hidden, paged, random_qkv, sdpa


@pytest.mark.parametrize("layout", ["NHD", "HND", "x"])
@pytest.mark.parametrize("queries, keys", [(1, 9), (5, 13), (7, 7)], ids=["decode", "chunk", "prefill"])
def test_causal_attention_equals_sdpa(layout: str, queries: int, keys: int) -> None:
    q, k, v = random_qkv(queries, keys)
    want = sdpa(q, k, v, hidden(distances(queries, keys) > 0).expand(4, -1, -1))
    torch.testing.assert_close(attend(q, k, v, layout), want)


def test_non_causal_attention_equals_sdpa() -> None:
    q, k, v = random_qkv(5, 13)
    want = sdpa(q, k, v, torch.zeros(4, 5, 13, dtype=F64), scale=0.3)
    torch.testing.assert_close(attend(q, k, v, causal=False, softmax_scale=0.3), want)


@pytest.mark.parametrize("window", [(3, -1), (-1, 2), (3, 2), (0, 0)])
@pytest.mark.parametrize("causal", [True, False])
def test_window_equals_sdpa_with_a_band(window: tuple[int, int], causal: bool) -> None:
    q, k, v = random_qkv(5, 13)
    distance = distances(5, 13)
    left, right = (99 if side < 0 else side for side in window)
    outside = (distance < -left) | (distance > (0 if causal else right))
    want = sdpa(q, k, v, hidden(outside).expand(4, -1, -1))
    torch.testing.assert_close(attend(q, k, v, causal=causal, window_size=window), want)


def test_alibi_and_qq_bias_equal_sdpa_with_a_bias() -> None:
    q, k, v = random_qkv(5, 13)
    slopes, qq = torch.tensor([0.5, 0.25, 0.125, 0.0625]), torch.randn(3, 3, dtype=F64)
    distance = distances(5, 13)
    bias = hidden(distance > 0) + slopes.double()[:, None, None] * distance
    bias[:, :3, 8:11] += qq  # the queries stand at 8..12; the matrix covers three of them
    torch.testing.assert_close(attend(q, k, v, alibi_slopes=slopes, qq_bias=qq), sdpa(q, k, v, bias))


def test_sinks_equal_sdpa_with_one_more_key_of_value_zero() -> None:
    q, k, v = random_qkv(5, 13)
    sinks = torch.tensor([-1.0, 0.0, 1.0, 2.0])
    padded_k, padded_v = (torch.cat([t, torch.zeros(1, 2, 8, dtype=F64)]) for t in (k, v))
    bias = torch.cat(
        [hidden(distances(5, 13) > 0).expand(4, -1, -1), sinks.double()[:, None, None].expand(4, 5, 1)], dim=2
    )
    torch.testing.assert_close(attend(q, k, v, sinks=sinks), sdpa(q, padded_k, padded_v, bias))


def test_new_keys_equal_the_same_keys_in_the_cache() -> None:
    q, k, v = random_qkv(5, 13)
    lens = {"seq_lens": torch.tensor([13]), "cu_seqlens_q": torch.tensor([0, 5])}
    split = reference.paged_attention(q, **paged(k[:8], v[:8]), **lens, k_new=k[8:], v_new=v[8:], return_lse=True)
    whole = attend(q, k, v, return_lse=True)
    torch.testing.assert_close(split, whole)


def test_scales_turn_stored_numbers_into_real_ones() -> None:
    q, k, v = random_qkv(3, 5)
    # [kv_heads], but of queries [1, kv_heads]: one axis of a scale of queries that are not fp8 is their tokens
    k_scale, v_scale, q_scale = torch.tensor([2.0, 4.0]), torch.tensor([0.5, 0.25]), torch.tensor([[8.0, 16.0]])
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    stored = (
        q / q_scale[0].double().repeat_interleave(2)[:, None],
        k / k_scale.double()[:, None],
        v / v_scale.double()[:, None],
    )
    torch.testing.assert_close(attend(*stored, **scales), attend(q, k, v))


def test_scales_of_the_cache_leave_new_keys_alone() -> None:
    q, k, v = random_qkv(3, 5)
    lens = {"seq_lens": torch.tensor([5]), "cu_seqlens_q": torch.tensor([0, 3])}
    got = reference.paged_attention(
        q, **paged(k[:2] / 2, v[:2] / 4), **lens, k_new=k[2:], v_new=v[2:], k_scale=2.0, v_scale=torch.tensor([4.0])
    )
    torch.testing.assert_close(got, attend(q, k, v))


POISONED = Case(
    "poisoned",
    (1, 0, 5, 3, 2),
    (20, 7, 33, 2, -1),
    heads=6,
    kv_heads=2,
    head_dim=24,
    page_size=12,
    window_size=(6, -1),
    sinks=True,
    alibi=True,
    softcap=3.0,
    qq_bias=3,
    tree=True,
    padding=2,
    seed=1,
)
VARIANTS: dict[str, dict[str, Any]] = {
    "x": {"layout": "x"},
    "x-of-8": {"layout": "x", "x": 8},
    "hnd": {"layout": "HND"},
    "shared": {"shared_buffer": True},
    "shared-hnd": {"layout": "HND", "shared_buffer": True},
    "shared-x": {"layout": "x", "shared_buffer": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("new", [False, True], ids=["cached", "new"])
def test_layouts_agree_and_poison_is_never_read(variant: str, new: bool) -> None:
    case = replace(POISONED, new=new)
    want = reference.paged_attention(**{**build(case), "out": None})
    assert not any(part.isnan().any() for part in want)
    got = reference.paged_attention(**{**build(replace(case, **VARIANTS[variant])), "out": None})
    torch.testing.assert_close(got, want)


def test_long_prompts_are_cut_into_blocks_without_a_seam() -> None:
    q, k, v = random_qkv(1030, 1040, heads=1, kv_heads=1, head_dim=4)
    want = sdpa(q, k, v, hidden(distances(1030, 1040) > 0)[None])
    torch.testing.assert_close(attend(q, k, v, page_size=16), want)
