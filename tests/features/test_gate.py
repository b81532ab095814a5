"""A gate of results: what it means, in all company, and that it changes nothing where there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import paged_attn
from paged_attn import reference
from paged_attn.explain.question import memory
from tests.explain.asked import ask
from tests.support.cases import E4M3, E5M2, Case, build, compare, run

FP16, BF16 = torch.float16, torch.bfloat16
Cut = Callable[..., None]
# decodes, drafts and prefills; sequences that are empty or shorter than their queries
LENGTHS: dict[str, Any] = dict(query_lens=(1, 5, 0, 20, 3, 1), seq_lens=(70, 33, 9, 90, -2, 1), heads=4, kv_heads=2)

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding": {"padding": 3},
    "strided": {"strided": True},
    "window, sinks, softcap, alibi": {"window_size": (9, -1), "sinks": True, "softcap": 3.0, "alibi": True},
    "not causal": {"causal": False},
    "tree": {"qq_bias": 16, "tree": True, "positions": "tree", "window_size": (9, -1)},
    "a user's function": {"score_mod": "relative"},
    "spans, a prefix": {"spans": 2, "prefix": 6},
    "new": {"new": True},
    "new, x": {"new": True, "layout": "x"},
    "hnd, page 24": {"layout": "HND", "page_size": 24},
    "float16": {"dtype": FP16},
    "fp8 cache": {"dtype": FP16, "cache_dtype": E4M3, "scales": "per_head"},
    "fp8 queries": {"dtype": E4M3, "scales": "tensor"},
    "fp8 out": {"out_dtype": E4M3, "scales": "tensor"},
    "e5m2 out": {"dtype": FP16, "out_dtype": E5M2},
    "invariant": {"batch_invariant": True, "sinks": True},
    "head_dim 1": {"head_dim": 1},
    "head_dim 40": {"head_dim": 40},
    "own out": {"own_out": True},
    "decodes only": {"only": "decode"},
    "prefills only": {"only": "prefill", "padding": 2},
    "no lse": {"lse": False},
}


@pytest.mark.parametrize("name", FEATURES)
def test_features(name: str, device: str, cut: Cut) -> None:
    for segments in (1, 3):
        cut(segments)
        run(Case(name, **LENGTHS, gate=True, **FEATURES[name]), device)


@pytest.mark.parametrize("name", FEATURES)
def test_plans_as_they_are_take_a_gate(name: str, device: str) -> None:
    run(Case(name, **LENGTHS, gate=True, **FEATURES[name]), device)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_a_gate_may_be_float32_beside_any_queries(dtype: torch.dtype, device: str) -> None:
    """The reference's own, of which nothing is rounded but the result."""
    case = Case("float32 gate", **LENGTHS, gate=True)
    inputs = build(case, device)
    out = torch.full_like(inputs["q"], torch.nan, dtype=dtype)
    got, lse = paged_attn.paged_attention(**inputs | {"out": out})
    compare(replace(case, out_dtype=dtype), got, lse, inputs | {"out": out})


def test_the_reference_multiplies_by_the_logistic_function_of_the_gate() -> None:
    """One key: its value is the result."""
    v = torch.tensor([1.0, -2.0, 4.0, 8.0])
    call = dict(
        q=torch.zeros(1, 1, 4), k_cache=torch.zeros(1, 1, 1, 4), v_cache=v.view(1, 1, 1, 4),
        page_table=torch.zeros(1, 1, dtype=torch.int32), seq_lens=torch.ones(1, dtype=torch.int32),
    )  # fmt: skip
    gate = torch.tensor([0.0, 1.0986122886681098, -torch.inf, torch.inf]).view(1, 1, 4)  # of 3 the logarithm
    out, lse = reference.paged_attention(**call, gate=gate, return_lse=True)
    torch.testing.assert_close(
        out.flatten(), torch.tensor([0.5, -1.5, 0.0, 8.0], dtype=torch.float64), rtol=1e-7, atol=0
    )
    assert lse.item() == 0


def test_log_sum_exps_do_not_know_of_a_gate(device: str) -> None:
    inputs = build(Case("lse", **LENGTHS, sinks=True, gate=True), device)
    _, with_gate = paged_attn.paged_attention(**inputs)
    _, without = paged_attn.paged_attention(**inputs | {"gate": None})
    assert torch.equal(with_gate, without)


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("segments", [1, 3])
def test_rows_that_see_no_key_give_zeros_whatever_their_gates(
    sinks: bool, segments: int, device: str, cut: Cut
) -> None:
    """Where nothing is seen: in empty sequences, before the first key, and behind a tree's hidden keys."""
    cut(segments)
    case = Case("nothing", (1, 3, 20, 2), (0, -5, 12, 2), sinks=sinks, padding=5, gate=True)
    inputs = build(case, device)
    blind = [0, 1, 2, 3, *range(4, 12), 26, 27, 28, 29, 30]  # the first 8 of 20 queries stand before key 0
    for poison in (torch.nan, torch.inf, -torch.inf):
        inputs["gate"][blind] = poison
        out, lse = paged_attn.paged_attention(**inputs)
        assert (out[blind] == 0).all()
        compare(case, out, lse, inputs)


@pytest.mark.parametrize("invariant", [False, True])
def test_an_open_gate_changes_no_bit(invariant: bool, device: str, cut: Cut) -> None:
    for segments in (1, 3):
        cut(segments)
        inputs = build(Case("open", **LENGTHS, batch_invariant=invariant), device)
        gate = torch.full_like(inputs["q"], torch.inf)
        with_gate = [x.clone() for x in paged_attn.paged_attention(**inputs, gate=gate)]
        assert all(map(torch.equal, with_gate, paged_attn.paged_attention(**inputs)))


def test_a_gate_is_of_the_merged_result_and_not_of_its_parts(device: str, cut: Cut) -> None:
    """Keys in two calls: merge_states joins what neither gated, and one gate at the end is that of all keys."""
    cut(1)
    case = Case("parts", (4, 1), (64, 64), heads=4, kv_heads=2, causal=False, gate=True)
    inputs = build(case, device)
    gate = inputs.pop("gate")
    parts = []
    for columns in (slice(0, 2), slice(2, 4)):
        part = inputs | {"page_table": inputs["page_table"][:, columns], "out": None}
        parts.append(paged_attn.paged_attention(**part | {"seq_lens": torch.full_like(inputs["seq_lens"], 32)}))
    merged, _ = paged_attn.merge_states(*map(torch.stack, zip(*parts)))
    whole, _ = paged_attn.paged_attention(**inputs, gate=gate)
    torch.testing.assert_close(merged * torch.sigmoid(gate), whole, atol=2e-5, rtol=2e-5)


def test_a_call_again_takes_another_gate(device: str) -> None:
    case = Case("again", **LENGTHS, gate=True, lse=False)
    inputs = build(case, device)
    for seed in range(4):
        gate = build(replace(case, seed=seed), device)["gate"]
        given = inputs | {"gate": gate if seed < 3 else None}
        compare(case, paged_attn.paged_attention(**given), None, given)


def test_the_operator_takes_a_gate(device: str) -> None:
    case = Case("operator", **LENGTHS, gate=True, lse=False)
    inputs = {name: x for name, x in build(case, device).items() if name != "return_lse"}
    torch.ops.paged_attn.attention(**inputs)
    compare(case, inputs["out"], None, inputs)


def test_a_gate_may_have_the_strides_of_a_projection_that_holds_queries_too(device: str) -> None:
    """Qwen3-Next's: [tokens, heads, 2 * head_dim], a query and its gate side by side."""
    case = Case("projection", **LENGTHS)
    inputs = build(case, device)
    both = torch.randn(*inputs["q"].shape[:2], 64, device=device)
    q, gate = both.chunk(2, dim=-1)
    given = inputs | {"q": q, "gate": gate}
    out, lse = paged_attn.paged_attention(**given)
    compare(replace(case, gate=True), out, lse, given)


def test_explain_counts_the_bytes_of_a_gate() -> None:
    options = dict(queries="1", keys="100", batch=8, device="sm80")
    plain, gated = ask(**options), ask(**options, gate=True)
    assert gated.problem == plain.problem  # no plan depends on it
    assert set(memory(gated).items()) - set(memory(plain).items()) == {("gate", memory(plain)["results"])}
