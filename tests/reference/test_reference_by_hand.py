"""The reference against numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from paged_attn import reference
from tests.support.cases import E4M3, E5M2
from tests.support.one_sequence import F64, attend, paged


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


def test_symmetric_alibi_lowers_keys_on_both_sides() -> None:
    slopes = torch.tensor([math.log(3)])
    out = attend(*flat(3), alibi_slopes=slopes, alibi_symmetric=True, causal=False)
    assert out[:, 0, 0].tolist() == pytest.approx(
        [(1 + 2 / 3 + 3 / 9) / (13 / 9), (1 / 3 + 2 + 3 / 3) / (5 / 3), (1 / 9 + 2 / 3 + 3) / (13 / 9)]
    )
    raised = attend(*flat(2), alibi_slopes=slopes, causal=False)
    assert raised[0, 0, 0].item() == pytest.approx((1 + 3 * 2) / 4)  # the key after weighs three times as much


def test_slopes_of_a_sequence_are_its_own() -> None:
    q, k, v = flat(2)
    pages = paged(k, v)
    pages["page_table"] = pages["page_table"].expand(2, 1)
    slopes = torch.tensor([[math.log(3)], [math.log(2)]])
    lens = {"seq_lens": torch.tensor([2, 2]), "cu_seqlens_q": torch.tensor([0, 1, 2])}
    lse = reference.paged_attention(q, **pages, **lens, alibi_slopes=slopes, return_lse=True)[1]
    assert lse[:, 0].tolist() == pytest.approx([math.log(4 / 3), math.log(3 / 2)])


@pytest.mark.parametrize("rows", ["of sequences", "of tokens"])
def test_scales_of_a_sequence_are_its_own(rows: str) -> None:
    """Two sequences, of two queries and one, see one key of 1 and value 1; as many as tokens are scales of these."""
    one = torch.ones(3, 1, 1).to(E4M3)
    count = 2 if rows == "of sequences" else 3
    starts, lens = ([0, 2, 3], [2, 1]) if count == 2 else ([0, 1, 2, 3], [1, 1, 1])
    scales = torch.tensor([[2.0], [3.0], [5.0]])[:count]
    out, lse = reference.paged_attention(
        one, one.view(3, 1, 1, 1), one.view(3, 1, 1, 1), torch.zeros(count, 2, dtype=torch.int32),
        torch.tensor(lens), torch.tensor(starts), softmax_scale=1.0, window_size=(0, -1),
        q_scale=scales, k_scale=scales, v_scale=scales, return_lse=True,
    )  # fmt: skip
    assert out.flatten().tolist() == ([2, 2, 3] if count == 2 else [2, 3, 5])
    assert lse.flatten().tolist() == pytest.approx([4, 4, 9] if count == 2 else [4, 9, 25])


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
