"""Scales and slopes of each sequence, and ALiBi that lowers keys on both sides of a query."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import paged_attn
from paged_attn import reference
from tests.support.cases import E4M3, E5M2, Case, build, compare, run
from tests.support.one_sequence import F64, attend, distances, random_qkv, sdpa

FP16, BF16 = torch.float16, torch.bfloat16
Cut = Callable[..., None]
# Decodes, drafts and prefills; sequences that are empty or shorter than their queries.
LENGTHS: dict[str, Any] = dict(query_lens=(1, 5, 0, 20, 3, 1), seq_lens=(70, 33, 9, 90, -2, 1), heads=4, kv_heads=2)
FP8_CACHE: dict[str, Any] = dict(dtype=FP16, cache_dtype=E4M3, scales="per_seq")
SLOPES: dict[str, Any] = dict(alibi=True, slopes_of_seqs=True)
BOTH_SIDES: dict[str, Any] = dict(alibi=True, alibi_symmetric=True, causal=False)

FEATURES: dict[str, dict[str, Any]] = {
    "scales": FP8_CACHE,
    "scales, turned": FP8_CACHE | dict(scales="per_seq, turned"),
    "scales, padding": FP8_CACHE | dict(padding=3, strided=True),
    "scales of fp8 queries": FP8_CACHE | dict(dtype=E4M3),
    "scales of fp8 queries, fp8 results": FP8_CACHE | dict(dtype=E5M2, out_dtype=E4M3, cache_dtype=E5M2),
    "scales, new": FP8_CACHE | dict(new=True),
    "scales, x": FP8_CACHE | dict(layout="x", page_size=24),
    "scales, a latent cache": FP8_CACHE | dict(latent=True, value_dim=16, kv_heads=1),
    "scales, tokens scaled": FP8_CACHE | dict(token_scales=True, softcap=3.0),
    "scales, invariant": FP8_CACHE | dict(batch_invariant=True),
    "slopes": SLOPES,
    "slopes, strided": SLOPES | dict(strided=True, softcap=3.0, sinks=True),
    "slopes, scales": SLOPES | FP8_CACHE,
    "slopes, trees": SLOPES | dict(positions="tree", window_size=(9, -1)),
    "both sides": BOTH_SIDES,
    "both sides, window": BOTH_SIDES | dict(window_size=(9, 6), softcap=3.0),
    "both sides, slopes of sequences": BOTH_SIDES | SLOPES,
    "both sides, trees": BOTH_SIDES | dict(positions="tree", qq_bias=8),
    "both sides, causal or not": BOTH_SIDES | dict(causal_by_seq=True, prefix=6),
    "both sides, spans": BOTH_SIDES | dict(causal=True, spans=2, sinks=True),
    "both sides, fp8 cache": BOTH_SIDES | FP8_CACHE,
    "both sides, new": BOTH_SIDES | dict(new=True, token_scales=True),
}


@pytest.mark.parametrize("name", FEATURES)
def test_features(name: str, device: str, cut: Cut) -> None:
    for segments in (1, 3):
        cut(segments)
        run(Case(name, **LENGTHS | FEATURES[name]), device)


@pytest.mark.parametrize("name", ["scales of fp8 queries", "slopes", "both sides"])
def test_plans_as_they_are_take_them(name: str, device: str) -> None:
    run(Case("mixed", **LENGTHS | FEATURES[name]), device)
    run(Case("decodes", (1,) * 4, (70, 3, 0, 40), heads=4, kv_heads=2, decode_form=True, **FEATURES[name]), device)


@pytest.mark.parametrize("name", ["scales", "scales, turned", "scales of fp8 queries", "slopes, scales"])
def test_scales_of_the_only_sequence_are_not_read_if_it_has_no_keys(name: str, device: str) -> None:
    for queries, keys in ((1, 0), (20, 0), (20, -2)):
        run(Case(name, (queries,), (keys,), heads=4, kv_heads=2, **FEATURES[name]), device)


def test_scales_of_a_decodes_sequences_are_those_of_its_tokens(device: str) -> None:
    """With one token a sequence [seqs, kv_heads] and [tokens, kv_heads] are one shape, and mean one thing."""
    case = Case(
        "decodes", (1,) * 3, (70, 3, 40), heads=4, kv_heads=2, decode_form=True, **FEATURES["scales of fp8 queries"]
    )
    ragged = build(case, device)
    scale = torch.tensor([[0.5, 1.5], [1.0, 0.25], [2.0, 0.75]], device=device)
    given = ragged | {"q_scale": scale}
    compare(case, *paged_attn.paged_attention(**given), given)
    token = torch.cat([ragged["q"], ragged["q"][-1:]])
    starts = torch.tensor(
        [0, 1, 2, 3], dtype=torch.int32, device=device
    )  # and a token of padding: rows are of sequences
    out = torch.empty_like(token, dtype=torch.bfloat16)
    got, _ = paged_attn.paged_attention(**given | {"q": token, "cu_seqlens_q": starts, "out": out})
    torch.testing.assert_close(got[:-1], given["out"], atol=2e-2, rtol=2e-2)
    assert not got[-1].any()


def test_a_call_again_takes_other_scales_and_slopes(device: str) -> None:
    """What a kept call was made with is not what the next one reads."""
    case = Case("again", **LENGTHS | FP8_CACHE | SLOPES)
    inputs = build(case, device)
    for factor in (1.0, 0.5, 2.0):
        given = inputs | {name: inputs[name] * factor for name in ("k_scale", "v_scale", "alibi_slopes")}
        compare(case, *paged_attn.paged_attention(**given), given)
    for name in ("k_scale", "v_scale", "alibi_slopes"):  # one row for all sequences is another call
        row = inputs[name][:1]
        given = inputs | {name: row.expand(inputs[name].shape)}
        compare(case, *paged_attn.paged_attention(**given), given)
        own = inputs | {name: row if name != "alibi_slopes" else row[0]}
        wanted, _ = reference.paged_attention(**own | {"out": None})
        got, _ = reference.paged_attention(**given | {"out": None})
        assert torch.equal(got, wanted)


def test_symmetric_alibi_is_a_bias_by_distance() -> None:
    q, k, v = random_qkv(5, 9)
    slopes = torch.tensor([0.5, 0.25, 1.0, 2.0])
    bias = -slopes.to(F64)[:, None, None] * distances(5, 9).abs()
    got = attend(q, k, v, alibi_slopes=slopes, alibi_symmetric=True, causal=False)
    torch.testing.assert_close(got, sdpa(q, k, v, bias))


@pytest.mark.parametrize("symmetric", [False, True])
def test_alibi_of_keys_up_to_a_query_is_the_same_either_way(symmetric: bool, device: str) -> None:
    case = Case("causal", **LENGTHS, alibi=True, alibi_symmetric=symmetric)
    run(case, device)
    inputs = build(case, device)
    wanted, _ = reference.paged_attention(**inputs | {"out": None, "alibi_symmetric": not symmetric})
    got, _ = reference.paged_attention(**inputs | {"out": None})
    assert torch.equal(got, wanted)
