"""Keywords of other libraries are told ours; what is right is neither slower to read nor taken for wrong."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import paged_attn
from paged_attn.checks import keywords

CACHE = torch.zeros(4, 8, 2, 16)
CALL: dict[str, Any] = dict(
    q=torch.zeros(2, 4, 16), k_cache=CACHE, v_cache=CACHE.clone(), page_table=torch.zeros(2, 1, dtype=torch.int32),
    seq_lens=torch.tensor([3, 4], dtype=torch.int32),
)  # fmt: skip
FUNCTIONS = (paged_attn.paged_attention, paged_attn.write_kv, paged_attn.write_qkv, paged_attn.merge_states)


def refused(function: Callable[..., Any], **given: Any) -> str:
    with pytest.raises(TypeError) as raised:
        function(**given)
    return str(raised.value)


@pytest.mark.parametrize(
    "name, words",
    [
        ("block_table", "page_table"), ("block_tables", "page_table"), ("scale", "softmax_scale"),
        ("sm_scale", "softmax_scale"), ("sliding_window", "window_size = (sliding_window - 1, -1)"),
        ("cache_seqlens", "seq_lens"), ("seqused_k", "seq_lens"), ("logits_soft_cap", "softcap"),
        ("cu_seqlens", "cu_seqlens_q"), ("cu_seqlens_k", "not their sums"),
        ("paged_kv_indptr", "page_table = (indptr, indices)"), ("kv_indices", "page_table = (indptr, indices)"),
        ("num_splits", "the planner decides"),
        ("s_aux", "sinks"), ("k_descale", "k_scale"), ("block_size", "shapes"), ("custom_mask", "qq_bias"),
        ("sliding_window_size", "window_size = (sliding_window_size, -1)"), ("num_splits", "batch_invariant"),
        ("paged_kv_last_page_len", "(pages - 1) * page_size + last_page_len"), ("cu_seq_q", "cu_seqlens_q"),
        ("is_causal", "last key"),
        ("q_nope", "side by side"), ("attention_chunk", "chunk"), ("mask_mod", "score_mod"),
    ],
)  # fmt: skip
def test_a_name_of_another_library_is_told_ours(name: str, words: str) -> None:
    said = refused(paged_attn.paged_attention, **CALL, **{name: 1})
    assert said.startswith(f"paged_attention() has no argument '{name}' (here: ")
    assert words in said


def test_a_name_in_the_place_of_a_required_one_is_told_first() -> None:
    """Python itself would name the argument that is missing, which the caller believes to have given."""
    given = {name: value for name, value in CALL.items() if name not in ("page_table", "seq_lens")}
    said = refused(paged_attn.paged_attention, **given, block_table=1, cache_seqlens=2)
    assert "'block_table' (here: page_table" in said
    assert "'cache_seqlens' (here: seq_lens" in said


def test_a_slip_is_told_the_nearest_name_and_nonsense_none() -> None:
    assert "'sofcap' (did you mean softcap?)" in refused(paged_attn.paged_attention, **CALL, sofcap=1.0)
    assert "'zzz' (nor one like it)" in refused(paged_attn.paged_attention, **CALL, zzz=1.0)


def test_the_other_functions_tell_theirs() -> None:
    k = torch.zeros(1, 2, 16)
    said = refused(paged_attn.write_kv, key=k, value=k, key_cache=CACHE, value_cache=CACHE, slot_mapping=k)
    assert said == (
        "write_kv() has no argument 'key' (here: k), 'value' (here: v), 'key_cache' (here: k_cache), 'value_cache' "
        "(here: v_cache)"
    )
    assert refused(paged_attn.merge_states, v=k, s=k) == (
        "merge_states() has no argument 'v' (here: outs, [n, tokens, heads, head_dim]), 's' (here: lses, [n, tokens, "
        "heads], natural logarithms)"
    )


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "page_table", "seq_lens"])
def test_what_is_missing_alone_is_refused_by_its_name(name: str) -> None:
    given = {key: value for key, value in CALL.items() if key != name}
    said = refused(paged_attn.paged_attention, **given)
    assert said.startswith(f"{name} must be a tensor of ")
    assert said.endswith(", got nothing")


def test_a_compiled_graph_tells_it_too() -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"has no argument 'sm_scale' \(here: softmax_scale\)"):
        torch.compile(lambda: paged_attn.paged_attention(**CALL, sm_scale=1.0), backend="eager")()


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_signature_has_no_more_than_what_people_need(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters.values()
    assert all(x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY) for x in parameters)
    assert not any(isinstance(x.default, keywords.nothing) for x in parameters)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_no_name_of_ours_is_taken_for_another(function: Callable[..., Any]) -> None:
    """And each hint that is a name alone is a name of the function."""
    own, known = inspect.signature(function).parameters, keywords.OTHERS[function.__name__]
    assert not own.keys() & known.keys()
    alone = {hint for hint in known.values() if hint.isidentifier()}
    assert alone <= own.keys()
    assert all(hint.split(",")[0].split()[0] in {*own, "nothing"} for hint in known.values())
