"""A scale of scores for each token: a temperature by position, beside any queries and the descale of fp8 ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import paged_attn
from paged_attn import reference
from tests.explain.asked import ask
from tests.support.bad_input import refuses
from tests.support.cases import E4M3, E5M2, Case, build, compare, run

FP16, BF16 = torch.float16, torch.bfloat16
Cut = Callable[..., None]
# decodes, drafts and prefills; sequences that are empty or shorter than their queries
LENGTHS: dict[str, Any] = dict(query_lens=(1, 5, 0, 20, 3, 1), seq_lens=(70, 33, 9, 90, -2, 1), heads=4, kv_heads=2)

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding, strided": {"padding": 3, "strided": True},
    "softcap": {"softcap": 3.0},
    "window, sinks, softcap, alibi": {"window_size": (9, -1), "sinks": True, "softcap": 3.0, "alibi": True},
    "chunk": {"chunk": 16},
    "tree": {"qq_bias": 16, "tree": True, "positions": "tree", "window_size": (9, -1), "causal": False},
    "a user's function": {"score_mod": "relative"},
    "a scale below zero": {"softmax_scale": -0.2},
    "spans, a prefix": {"spans": 2, "prefix": 6},
    "new": {"new": True},
    "x, page 24": {"layout": "x", "page_size": 24},
    "float16": {"dtype": FP16, "gate": True},
    "fp8 cache": {"dtype": FP16, "cache_dtype": E4M3, "scales": "per_head"},
    "fp8 queries": {"dtype": E4M3, "scales": "float"},
    "fp8 queries, scales by head": {"dtype": E5M2, "scales": "per_head", "out_dtype": E4M3},
    "fp8 queries, scales by head, expanded": {"dtype": E4M3, "scales": "per_head, expanded"},
    "invariant": {"batch_invariant": True, "sinks": True},
    "a latent cache": {"latent": True, "value_dim": 16, "kv_heads": 1},
    "prefills only": {"only": "prefill", "padding": 2},
}


@pytest.mark.parametrize("name", FEATURES)
def test_features(name: str, device: str, cut: Cut) -> None:
    for segments in (1, 3):
        cut(segments)
        run(Case(name, **LENGTHS | FEATURES[name], token_scales=True), device)


def test_plans_as_they_are_take_scales_of_tokens(device: str) -> None:
    run(Case("decodes", (1,) * 4, (70, 3, 0, 40), heads=4, kv_heads=2, decode_form=True, token_scales=True), device)
    run(Case("mixed", **LENGTHS, token_scales=True), device)


def test_the_reference_multiplies_scores_of_a_token() -> None:
    """Two keys of scores 0 and 1: their weights are as 1 to e^scale."""
    k = torch.tensor([[0.0], [1.0]]).view(1, 2, 1, 1)
    call = dict(
        q=torch.ones(2, 1, 1), k_cache=k, v_cache=k, page_table=torch.zeros(2, 1, dtype=torch.int32),
        seq_lens=torch.tensor([2, 2], dtype=torch.int32), softmax_scale=1.0,
    )  # fmt: skip
    out, lse = reference.paged_attention(**call, q_scale=torch.tensor([1.0, 2.0]), return_lse=True)
    e = torch.tensor([1.0, 2.0], dtype=torch.float64).exp()
    torch.testing.assert_close(out.flatten(), e / (1 + e))
    torch.testing.assert_close(lse.flatten(), (1 + e).log())


@pytest.mark.parametrize("form", ["[tokens]", "[tokens, 1]"])
def test_scales_of_tokens_are_those_of_the_queries_themselves(form: str, device: str) -> None:
    """Powers of two, by which queries may be multiplied without a loss; tokens as many as KV heads are tokens still."""
    case = Case("powers", (1, 1), (40, 33), heads=4, kv_heads=2, decode_form=True)
    inputs = build(case, device)
    scale = torch.tensor([0.5, 4.0], device=device)
    out, lse = paged_attn.paged_attention(**inputs, q_scale=scale if form == "[tokens]" else scale[:, None])
    wanted, wanted_lse = paged_attn.paged_attention(**inputs | {"q": inputs["q"] * scale[:, None, None], "out": None})
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse)


def test_of_fp8_queries_a_row_is_of_heads_and_a_column_of_tokens(device: str) -> None:
    """As many tokens as KV heads: [kv_heads] and [seqs, kv_heads] expanded mean what they did before."""
    case = Case("both", (1, 1), (40, 33), heads=4, kv_heads=2, dtype=E4M3, decode_form=True)
    inputs = build(case, device)
    scale = torch.tensor([0.5, 1.5], device=device)
    for by_head in (scale, scale[None], scale.expand(2, 2)):
        given = inputs | {"q_scale": by_head}
        compare(case, *paged_attn.paged_attention(**given), given)
        wanted, _ = reference.paged_attention(**given | {"out": None, "q_scale": scale})
        got, _ = reference.paged_attention(**given | {"out": None})
        assert torch.equal(got, wanted)
    for by_token in (scale[:, None], torch.stack([scale, 2 * scale]), scale[:, None].expand(2, 2)):
        given = inputs | {"q_scale": by_token}
        compare(case, *paged_attn.paged_attention(**given), given)


@pytest.mark.parametrize("form", ["one", "by head"])
def test_of_fp8_queries_a_row_for_all_tokens_may_be_expanded(form: str, device: str) -> None:
    """To as many tokens as there are, which is not the number of sequences."""
    case = Case("expanded", (5,), (40,), heads=4, kv_heads=2, dtype=E4M3)
    inputs = build(case, device)
    row = torch.tensor([0.5] if form == "one" else [0.5, 1.5], device=device)
    given = inputs | {"q_scale": row.expand(5, -1)}
    compare(case, *paged_attn.paged_attention(**given), given)
    wanted, _ = reference.paged_attention(**inputs | {"out": None, "q_scale": row})
    got, _ = reference.paged_attention(**given | {"out": None})
    assert torch.equal(got, wanted)


def test_ones_change_no_bit_that_two_calls_share(device: str) -> None:
    """Scores are scaled first either way."""
    inputs = build(Case("ones", **LENGTHS, alibi=True), device)
    ones = torch.ones(len(inputs["q"]), device=device)
    scaled = [x.clone() for x in paged_attn.paged_attention(**inputs, q_scale=ones)]
    assert all(map(torch.equal, scaled, paged_attn.paged_attention(**inputs)))


def test_a_call_again_takes_other_scales(device: str) -> None:
    case = Case("again", **LENGTHS, token_scales=True, lse=False)
    inputs = build(case, device)
    for seed in range(4):
        scale = build(replace(case, seed=seed), device)["q_scale"]
        given = inputs | {"q_scale": scale if seed < 3 else None}
        compare(case, paged_attn.paged_attention(**given), None, given)


def test_the_operator_takes_scales_of_tokens(device: str) -> None:
    case = Case("operator", **LENGTHS, token_scales=True, lse=False)
    inputs = {name: x for name, x in build(case, device).items() if name != "return_lse"}
    torch.ops.paged_attn.attention(**inputs)
    compare(case, inputs["out"], None, inputs)


CHECKED = Case("checked", (1, 4, 2, 0), (20, 4, 33, 0), page_size=8, padding=1, token_scales=True)


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(
    "token, number, text",
    [
        (0, 0.0, "q_scale[0] = 0.0 (sequence 0), but scales must be finite and > 0"),
        (3, -1.5, "q_scale[3] = -1.5 (sequence 1), but scales must be finite and > 0"),
        (6, torch.nan, "q_scale[6] = nan (sequence 2), but scales must be finite and > 0"),
        (6, torch.inf, "q_scale[6] = inf (sequence 2), but scales must be finite and > 0"),
    ],
)
def test_a_scale_that_is_none_is_named(
    token: int, number: float, text: str, checked: dict[str, Any], device: str
) -> None:
    inputs = build(CHECKED, device)
    inputs["q_scale"][token] = number
    refuses(paged_attn.paged_attention, inputs | checked, ValueError, text)


def test_scales_of_padding_may_be_anything(device: str) -> None:
    inputs = build(CHECKED, device)
    assert inputs["q_scale"].isnan().sum() == 1
    run(CHECKED, device, check=True)


def test_explain_knows_of_scales_of_tokens() -> None:
    assert ask(token_scales=True).problem == ask().problem._replace(token_scales=True)
