"""The reference against torch's own attention in float64, and against numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from paged_attn import reference
from tests.cases import E4M3, E5M2, Case, build, compare

F64 = torch.float64


def paged(k: Tensor, v: Tensor, page_size: int = 4, layout: str = "NHD", x: int = 4) -> dict[str, Any]:
    """One sequence's keys [N, kv_heads, head_dim] in pages handed out backwards; the rest of the cache is NaN."""
    num_pages = -(-len(k) // page_size)
    caches = []
    for keys in (k, v):
        cache = torch.full((num_pages + 1, page_size, *k.shape[1:]), torch.nan, dtype=k.dtype)
        for pos, key in enumerate(keys):
            cache[num_pages - pos // page_size, pos % page_size] = key
        caches.append(cache)
    if layout == "HND":
        caches = [cache.transpose(1, 2).contiguous() for cache in caches]
    if layout == "x":
        caches = [caches[0].unflatten(-1, (-1, x)).permute(0, 2, 3, 1, 4), caches[1].permute(0, 2, 3, 1)]
    table = torch.arange(num_pages, 0, -1, dtype=torch.int32)[None]
    return {
        "k_cache": caches[0],
        "v_cache": caches[1],
        "page_table": table,
        "kv_layout": "HND" if layout == "HND" else "NHD",
    }


def attend(q: Tensor, k: Tensor, v: Tensor, layout: str = "NHD", page_size: int = 4, **options: Any) -> Any:
    """The reference on one sequence: queries [T, heads, head_dim] at the end of keys [N, kv_heads, head_dim]."""
    lens = {"seq_lens": torch.tensor([len(k)]), "cu_seqlens_q": torch.tensor([0, len(q)])}
    return reference.paged_attention(q, **paged(k, v, page_size, layout), **lens, **options)


def sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float | None = None) -> Tensor:
    """torch's attention of [T, H, D] over [N, G, D] with bias [H, T, N] added to the scores."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=bias[None], scale=scale)[0].transpose(0, 1)


def random_qkv(queries: int, keys: int, heads: int = 4, kv_heads: int = 2, head_dim: int = 8) -> tuple[Tensor, ...]:
    rng = torch.Generator().manual_seed(queries * 100 + keys)
    shapes = (queries, heads, head_dim), (keys, kv_heads, head_dim), (keys, kv_heads, head_dim)
    return tuple(torch.randn(shape, dtype=F64, generator=rng) for shape in shapes)


def distances(queries: int, keys: int) -> Tensor:
    """key position - query position, [T, N], the queries being the last of the keys."""
    return torch.arange(keys)[None, :] - torch.arange(keys - queries, keys)[:, None]


def hidden(mask: Tensor) -> Tensor:
    """A bias [..., T, N] that removes the keys where mask is True."""
    return torch.zeros(mask.shape, dtype=F64).masked_fill(mask, -torch.inf)


# --- against torch ---------------------------------------------------------------------------------------------------


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


# --- by hand ---------------------------------------------------------------------------------------------------------


def flat(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """n queries and n keys of one head with all scores 0, and values 1, 2, 3 ..."""
    return torch.zeros(n, 1, 2, dtype=F64), torch.zeros(n, 1, 2, dtype=F64), values(range(1, n + 1))


def values(numbers: Iterable[float]) -> Tensor:
    """[N, 1, 2], a value per key"""
    return torch.tensor(list(numbers), dtype=F64)[:, None, None].repeat(1, 1, 2)


def test_equal_scores_give_the_mean_and_the_log_of_the_count() -> None:
    out, lse = attend(*flat(4), return_lse=True)
    assert out[:, 0, 0].tolist() == pytest.approx([1, 1.5, 2, 2.5])
    assert lse[:, 0].tolist() == pytest.approx([math.log(n) for n in (1, 2, 3, 4)])


def test_window_of_one_returns_the_own_value() -> None:
    out = attend(*flat(4), window_size=(0, 0), causal=False)
    assert out[:, 0, 0].tolist() == [1, 2, 3, 4]


def test_window_counts_the_keys_before_the_query() -> None:
    out = attend(*flat(4), window_size=(1, -1))
    assert out[:, 0, 0].tolist() == pytest.approx([1, 1.5, 2.5, 3.5])


def test_sink_as_strong_as_the_key_halves_its_weight() -> None:
    out, lse = attend(*flat(2), window_size=(0, -1), sinks=torch.tensor([0.0]), return_lse=True)
    assert out[:, 0, 0].tolist() == pytest.approx([0.5, 1])
    assert lse[:, 0].tolist() == pytest.approx([math.log(2)] * 2)


def test_alibi_counts_from_the_querys_own_position() -> None:
    out, lse = attend(*flat(2), alibi_slopes=torch.tensor([math.log(3)]), return_lse=True)
    assert out[1, 0, 0].item() == pytest.approx((1 / 3 * 1 + 1 * 2) / (4 / 3))  # the key before weighs a third
    assert lse[1, 0].item() == pytest.approx(math.log(4 / 3))


def test_softcap_bounds_a_score_by_its_tanh() -> None:
    q, k, v = flat(2)
    q[:], k[0] = 1, 10
    lse = attend(q, k, v, softmax_scale=1.0, softcap=5.0, return_lse=True)[1]  # scores 20 and 0
    assert lse[:, 0].tolist() == pytest.approx([5 * math.tanh(4), math.log(math.exp(5 * math.tanh(4)) + 1)])


def test_softcap_comes_before_alibi() -> None:
    q, k, v = flat(2)
    q[:], k[:] = 1, 10
    lse = attend(q, k, v, softmax_scale=1.0, softcap=5.0, alibi_slopes=torch.tensor([2.0]), return_lse=True)[1]
    capped = 5 * math.tanh(4)
    assert lse[1, 0].item() == pytest.approx(math.log(math.exp(capped) + math.exp(capped - 2)))


def test_qq_bias_counts_rows_and_columns_from_the_first_query() -> None:
    q, k, v = flat(3)
    bias = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]])
    out = attend(q[1:], k, v, qq_bias=bias)  # context 1: the queries stand at 1 and 2
    assert out[:, 0, 0].tolist() == pytest.approx([1.5, (1 + 3 * 2 + 3) / 5])


def test_pruned_branches_of_a_tree_are_not_seen() -> None:
    bias = torch.tensor([[0.0, -torch.inf], [-torch.inf, 0.0]])
    q, k, v = flat(3)
    assert attend(q[1:], k, v, qq_bias=bias)[:, 0, 0].tolist() == pytest.approx([1.5, 2])


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


@pytest.mark.parametrize("dtype, limit", [(E4M3, 448.0), (E5M2, 57344.0)], ids=["e4m3", "e5m2"])
def test_fp8_output_is_divided_clamped_and_rounded_to_nearest(dtype: torch.dtype, limit: float) -> None:
    q, k, v = flat(4)
    v = values([1.0, 1.9, -2000.0, 1e9])
    out = torch.full((4, 1, 2), torch.nan).to(dtype)
    got = attend(q, k, v, window_size=(0, -1), out=out, out_scale=2.0)
    assert got is out
    nearest = {E4M3: (0.5, 0.9375, -448.0, limit), E5M2: (0.5, 1.0, -1024.0, limit)}[dtype]
    assert out[:, 0, 0].float().tolist() == list(nearest)


def test_rows_that_see_no_key_give_zero_even_beside_nan() -> None:
    q, k, v = flat(4)
    call = dict(**paged(k, v), cu_seqlens_q=torch.tensor([0, 1, 3]), seq_lens=torch.tensor([0, 1]), return_lse=True)
    call["page_table"] = torch.tensor([[2**31 - 1], [1]])
    out, lse = reference.paged_attention(q, **call)  # empty; one key for two queries; one token of padding
    assert out[:, 0, 0].tolist() == [0, 0, 1, 0]
    assert lse[:, 0].tolist() == [-math.inf, -math.inf, 0, -math.inf]
    out, lse = reference.paged_attention(q, **call, sinks=torch.tensor([0.25]))
    assert out[:, 0, 0].tolist() == pytest.approx([0, 0, 1 / (1 + math.exp(0.25)), 0])
    assert lse[:, 0].tolist() == pytest.approx([0.25, 0.25, math.log(1 + math.exp(0.25)), -math.inf])


@pytest.mark.parametrize("only, untouched", [("decode", [1, 2, 3]), ("prefill", [0, 3]), (None, [])])
def test_only_leaves_the_other_rows_of_out_untouched(only: str | None, untouched: list[int]) -> None:
    q, k, v = flat(4)
    pages = paged(k, v)
    pages["page_table"] = pages["page_table"].expand(2, 1)
    out = torch.full((4, 1, 2), torch.nan)
    lens = {"seq_lens": torch.tensor([4, 4]), "cu_seqlens_q": torch.tensor([0, 1, 3])}
    reference.paged_attention(q, **pages, **lens, out=out, only=only)
    assert out[:, 0, 0].isnan().nonzero()[:, 0].tolist() == untouched


def test_without_cu_seqlens_every_sequence_has_one_query() -> None:
    q, k, v = flat(4)
    pages = paged(k, v)
    pages["page_table"] = pages["page_table"].expand(3, 1)
    out = reference.paged_attention(q[:3], **pages, seq_lens=torch.tensor([1, 2, 4]))
    assert out[:, 0, 0].tolist() == pytest.approx([1, 1.5, 2.5])


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


# --- write_kv and merge_states ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["NHD", "HND", "x"])
def test_written_keys_are_read_back(layout: str) -> None:
    q, k, v = random_qkv(5, 13)
    pages = paged(torch.zeros_like(k), torch.zeros_like(v), layout=layout)
    pos = torch.arange(13)
    slots = pages["page_table"][0, pos // 4].long() * 4 + pos % 4
    order = torch.randperm(13)
    reference.write_kv(
        k[order], v[order], pages["k_cache"], pages["v_cache"], slots[order], kv_layout=pages["kv_layout"]
    )
    got = reference.paged_attention(q, **pages, seq_lens=torch.tensor([13]), cu_seqlens_q=torch.tensor([0, 5]))
    torch.testing.assert_close(got, attend(q, k, v))


def test_negative_slots_write_nothing() -> None:
    k_cache, v_cache = torch.zeros(2, 3, 2, 1, 4)  # 3 pages of 2 slots
    reference.write_kv(torch.ones(2, 1, 4), torch.ones(2, 1, 4), k_cache, v_cache, torch.tensor([-1, 3]))
    for cache in (k_cache, v_cache):
        assert cache[1, 1].tolist() == [[1, 1, 1, 1]]
        assert cache.sum() == 4


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_fp8_caches_hold_clamped_rounded_quotients(dtype: torch.dtype) -> None:
    k = torch.tensor([[[1.0, 3.1], [1e6, -1e6]]])  # [1 token, 2 heads, 2]
    cache = torch.zeros(2, 1, 1, 2, 2).to(dtype)
    reference.write_kv(k, k, cache[0], cache[1], torch.tensor([0]), k_scale=torch.tensor([2.0, 4.0]), v_scale=0.5)
    limit = torch.finfo(dtype).max
    rounded = {E4M3: (1.5, 6.0), E5M2: (1.5, 6.0)}[dtype]  # 1.55 and 6.2 to 4 or 3 significant bits
    assert cache[0].float().flatten().tolist() == [0.5, rounded[0], limit, -limit]
    assert cache[1].float().flatten().tolist() == [2.0, rounded[1], limit, -limit]


def test_merged_parts_equal_the_whole() -> None:
    q, k, v = random_qkv(1, 12)
    parts = [attend(q, k[a:b], v[a:b], causal=False, return_lse=True) for a, b in ((0, 5), (5, 6), (6, 12))]
    outs, lses = torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])
    torch.testing.assert_close(reference.merge_states(outs, lses), attend(q, k, v, return_lse=True))
    first = reference.merge_states(outs[:2], lses[:2])
    both = torch.stack([first[0], outs[2]]), torch.stack([first[1], lses[2]])
    torch.testing.assert_close(reference.merge_states(*both), reference.merge_states(outs, lses))


def test_empty_parts_count_for_nothing() -> None:
    outs = torch.tensor([torch.nan, 3.0, 0.0]).reshape(3, 1, 1, 1).expand(3, 1, 1, 2)
    lses = torch.tensor([-torch.inf, 1.0, -torch.inf]).reshape(3, 1, 1)
    out, lse = reference.merge_states(outs, lses)
    assert out.tolist() == [[[3.0, 3.0]]]
    assert lse.item() == 1.0
    out, lse = reference.merge_states(outs[::2], lses[::2])
    assert out.tolist() == [[[0.0, 0.0]]]
    assert lse.item() == -math.inf


# --- the comparison itself -------------------------------------------------------------------------------------------


def test_compare_accepts_the_rounded_reference_and_rejects_a_wrong_weight() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        case = Case("long", (1,), (900,), dtype=dtype, padding=1)
        inputs = build(case)
        out, lse = reference.paged_attention(**inputs)
        assert compare(case, out, lse.float(), inputs) <= 1
        short = {**inputs, "seq_lens": inputs["seq_lens"] - 40, "causal": False}  # forty keys forgotten
        wrong, wrong_lse = reference.paged_attention(**{**short, "out": torch.empty_like(out)})
        with pytest.raises(AssertionError, match="long: out"):
            compare(case, wrong, lse.float(), inputs)
        with pytest.raises(AssertionError, match="long: lse"):
            compare(case, out, wrong_lse.float(), inputs)


@pytest.mark.parametrize("base", [0.0, -1e30, 1e30, -1e300, 3e38])
def test_states_of_equal_and_extreme_log_sum_exps_are_the_mean(base: float) -> None:
    outs = torch.tensor([1.0, 5.0], dtype=torch.float64)[:, None, None, None]
    out, lse = reference.merge_states(outs, torch.full((2, 1, 1), base, dtype=torch.float64))
    assert out.item() == 3.0
    assert lse.item() == base + math.log(2)


@pytest.mark.parametrize(
    ("lses", "weights", "lse"),
    [
        ((0.0, math.log(3)), (0.25, 0.75), math.log(4)),
        ((-math.inf, -1e30), (0.0, 1.0), -1e30),
        ((-math.inf, -math.inf), (0.0, 0.0), -math.inf),
        ((math.inf, 7.0), (0.0, 0.0), math.inf),
        ((math.inf, math.inf), (0.0, 0.0), math.inf),
        ((1e30, 0.0), (1.0, 0.0), 1e30),
    ],
)
def test_states_at_their_ends(lses: tuple[float, float], weights: tuple[float, float], lse: float) -> None:
    outs = torch.eye(2, dtype=torch.float64)[:, None, None]
    got, got_lse = reference.merge_states(outs, torch.tensor(lses, dtype=torch.float64)[:, None, None])
    torch.testing.assert_close(got.flatten(), torch.tensor(weights, dtype=torch.float64))
    assert got_lse.item() == pytest.approx(lse, rel=1e-15)


@pytest.mark.parametrize(
    ("scores", "options", "weights"),
    [
        ((1e30, 1e30), {}, (0.5, 0.5)),
        ((-1e30, -1e30), {}, (0.5, 0.5)),
        ((1e30, 2e30), {}, (0.0, 1.0)),
        ((3.0, -3.0), {"softcap": 1e-300}, (0.5, 0.5)),
        ((0.0, math.log(3)), {"softcap": 1e300}, (0.25, 0.75)),
        ((1e6, -1e6), {"softcap": math.log(3) / 2}, (0.75, 0.25)),
        ((0.0, 0.0), {"sinks": torch.tensor([1e30])}, (0.0, 0.0)),
        ((0.0, 0.0), {"sinks": torch.tensor([-1e30])}, (0.5, 0.5)),
        ((5.0, 5.0), {"sinks": torch.tensor([math.inf])}, (0.0, 0.0)),
        ((7.0, -7.0), {"softmax_scale": 0.0}, (0.5, 0.5)),
        ((0.0, math.log(3)), {"softmax_scale": -1.0}, (0.75, 0.25)),
    ],
)
def test_weights_at_the_ends_of_scores(
    scores: tuple[float, float], options: dict[str, Any], weights: tuple[float, float]
) -> None:
    """One query of 1 over keys that are the scores, and values that tell the weights of two keys apart."""
    k = torch.tensor([*scores], dtype=torch.float64)[None, :, None, None].expand(1, 2, 1, 2)
    v = torch.eye(2, dtype=torch.float64)[None, :, None]
    q = torch.tensor([[[1.0, 0.0]]], dtype=torch.float64)
    lens, table = torch.tensor([2]), torch.tensor([[0]])
    out = reference.paged_attention(q, k, v, table, lens, **{"softmax_scale": 1.0, **options})
    torch.testing.assert_close(out.flatten(), torch.tensor(weights, dtype=torch.float64))
