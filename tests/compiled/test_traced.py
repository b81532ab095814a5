"""Arguments inside torch.compile: what the functions take, and their errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import paged_attn
from tests.support.cases import E4M3, Case, build
from tests.support.compiled_layer import COMPILES, FP16, PAGE, PAGES, step

pytestmark = COMPILES

Inputs = dict[str, Any]
CASES = [
    Case("decode", (1, 1), (5, 9), dtype=FP16, decode_form=True),
    Case("mixed", (1, 3), (5, 9), dtype=FP16, window_size=(9, -1), sinks=True, alibi=True, bounds=True),
    Case("fp8 cache", (1, 3), (5, 9), dtype=FP16, cache_dtype=E4M3, scales="tensor", padding=1),
    Case("another width", (1, 3), (5, 9), dtype=FP16, value_dim=24, new=True),
    Case("ragged page table", (1, 3), (5, 9), dtype=FP16, table="views"),
    Case("windows by head", (1, 3), (5, 9), dtype=FP16, head_windows=((2, -1), (-1, -1))),
]


def call_of(case: Case, device: str, **changes: Any) -> Inputs:
    return build(case, device) | {"out": None} | changes


def equal(one: Any, other: Any) -> bool:
    one, other = (x if isinstance(x, tuple) else (x,) for x in (one, other))
    return all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(one, other, strict=True))


ARGUMENTS: dict[str, tuple[Case, Inputs]] = {
    **{case.name: (case, {}) for case in CASES},
    "window in a list": (CASES[1], {"window_size": [3, 0]}),
    "numbers": (CASES[1], {"softmax_scale": 1, "softcap": 30, "causal": False, "kv_layout": "NHD"}),
    "scales that are numbers": (CASES[2], {"k_scale": 0.5, "v_scale": 2}),
    "checked": (CASES[1], {"check": True}),
    "batch invariant, no log-sum-exp": (CASES[1], {"batch_invariant": True, "return_lse": False}),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_compiled_call_takes_what_the_function_takes(name: str, device: str) -> None:
    case, changes = ARGUMENTS[name]
    inputs = call_of(case, device, **changes)
    compiled = torch.compile(paged_attn.paged_attention, backend="aot_eager", fullgraph=True)
    assert equal(compiled(**inputs), paged_attn.paged_attention(**inputs))


def test_a_compiled_call_writes_into_out_and_leaves_rows_alone(device: str) -> None:
    inputs = call_of(CASES[1], device, only="decode", return_lse=False)
    inputs["out"] = torch.full_like(inputs["q"], 7)
    given = inputs["out"]
    result = torch.compile(paged_attn.paged_attention, backend="aot_eager", fullgraph=True)(**inputs)
    assert result.data_ptr() == given.data_ptr()
    assert (given[1:] == 7).all()
    assert not (given[0] == 7).any()


def test_numbers_that_change_from_call_to_call_are_followed(device: str) -> None:
    compiled = torch.compile(paged_attn.paged_attention, backend="aot_eager", fullgraph=True)
    for scale, bound in ((0.5, 9), (0.25, 10), (0.125, 11)):
        inputs = call_of(CASES[1], device, softmax_scale=scale, max_seqlen_k=bound)
        assert equal(compiled(**inputs), paged_attn.paged_attention(**inputs))


def test_autocast_changes_no_call(device: str) -> None:
    inputs = call_of(CASES[1], device)
    want = paged_attn.paged_attention(**inputs)
    compiled = torch.compile(paged_attn.paged_attention, backend="aot_eager", fullgraph=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        for call in (paged_attn.paged_attention, compiled):
            got = call(**inputs)
            assert [x.dtype for x in got] == [FP16, torch.float32]
            assert equal(got, want)


BAD: dict[str, tuple[Case, Inputs]] = {
    "causal": (CASES[1], {"causal": 1}),
    "softcap": (CASES[1], {"softcap": -1.0}),
    "window_size": (CASES[1], {"window_size": [1.5, 0]}),
    "only": (CASES[1], {"only": "both"}),
    "kv_layout": (CASES[1], {"kv_layout": None}),
    "check": (CASES[1], {"check": "yes"}),
    "k_scale": (CASES[2], {"k_scale": 0.0}),
    "v_scale": (CASES[2], {"v_scale": None}),
    "seq_lens": (CASES[1], {"seq_lens": torch.ones(1, dtype=torch.int32)}),
    "sinks": (CASES[1], {"sinks": torch.ones(2, dtype=torch.float64)}),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_argument_is_the_functions_error(name: str, device: str) -> None:
    """Of a whole graph, what is found while it is traced is an error of torch that holds the function's words."""
    case, changes = BAD[name]
    changes = {x: y.to(device) if isinstance(y, Tensor) else y for x, y in changes.items()}
    inputs = call_of(case, device, **changes)
    with pytest.raises((TypeError, ValueError)) as eager:
        paged_attn.paged_attention(**inputs)
    with pytest.raises((TypeError, ValueError)) as raised:
        torch.compile(paged_attn.paged_attention, backend="aot_eager")(**inputs)
    assert (type(raised.value), str(raised.value)) == (type(eager.value), str(eager.value))
    torch.compiler.reset()
    with pytest.raises((TypeError, ValueError, RuntimeError)) as whole:
        torch.compile(paged_attn.paged_attention, backend="aot_eager", fullgraph=True)(**inputs)
    assert str(eager.value) in str(whole.value).replace("\\'", "'")


def test_compiled_calls_are_checked_if_asked(checked: Inputs, device: str) -> None:
    """Each time the graph runs: what the device holds is not known when it is traced."""
    given = step("halves", device)

    def layer(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        paged_attn.write_kv(k, v, k_cache, v_cache, slots, **checked)

    compiled = torch.compile(layer, fullgraph=True)
    compiled(*given[1:6])
    given[5][1] = PAGES * PAGE
    before = given[3].clone()
    with pytest.raises(ValueError, match=f"slot_mapping.1. = {PAGES * PAGE} .token 1., but the cache has"):
        compiled(*given[1:6])
    assert torch.equal(given[3], before)
