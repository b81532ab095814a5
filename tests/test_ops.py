"""The operators of torch: correct in themselves, and what torch.compile makes of paged_attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import paged_attn
from tests.cases import E4M3, Case, build

FP16 = torch.float16
CASES = [
    Case("decode", (1, 1), (20, 33), decode_form=True, dtype=FP16),
    Case("mixed", (1, 0, 5), (37, 4, 20), dtype=FP16, window_size=(9, -1), sinks=True, alibi=True, bounds=True),
    Case("fp8 cache", (1, 3), (20, 33), dtype=FP16, cache_dtype=E4M3, scales="tensor", padding=1),
]


def arguments(case: Case, device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(positional, keyword) arguments of the operator; dead slots and padding are 0, for opcheck compares outputs."""
    inputs = build(case, device)
    for name in ("q", "k_cache", "v_cache", "out"):
        if inputs[name].dtype != E4M3:
            inputs[name] = inputs[name].nan_to_num()
    names = ("q", "k_cache", "v_cache", "page_table", "seq_lens", "cu_seqlens_q", "out")
    given = [inputs.pop(name, None) for name in names]
    inputs.pop("return_lse")
    return tuple(given), {name: value for name, value in inputs.items() if value is not None}


@pytest.mark.parametrize("operator", ["attention", "attention_lse"])
@pytest.mark.parametrize("case", CASES[:2], ids=str)  # opcheck itself multiplies inputs, which fp8 cannot be
def test_opcheck_finds_nothing(case: Case, operator: str, device: str) -> None:
    given, options = arguments(case, device)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(torch.ops.paged_attn, operator).default, given, options, test_utils=checks)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_operator_is_the_function(case: Case, device: str) -> None:
    given, options = arguments(case, device)
    want, want_lse = paged_attn.paged_attention(*given[:-1], **options, return_lse=True)
    out = torch.empty_like(want)
    torch.ops.paged_attn.attention(*given[:-1], out, **options)
    lse = torch.ops.paged_attn.attention_lse(*given, **options)
    assert torch.equal(out, want)
    assert torch.equal(given[-1], want)
    assert torch.equal(lse, want_lse)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch_compile_keeps_the_call_whole(case: Case, device: str) -> None:
    given, options = arguments(case, device)
    *tensors, _ = given

    def layer(*tensors: Any) -> Any:
        out, lse = paged_attn.paged_attention(tensors[0] * 2, *tensors[1:], **options, return_lse=True)
        return out + 1, lse

    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for got, want in zip(compiled(*tensors), layer(*tensors), strict=True):
        assert torch.equal(got, want)


def test_torch_compile_takes_scales_that_are_numbers(device: str) -> None:
    inputs = build(Case("floats", (1, 1), (9, 20), dtype=FP16, cache_dtype=E4M3, scales="float"), device)
    inputs |= {"return_lse": False, "out": None}
    compiled = torch.compile(paged_attn.paged_attention, backend="eager", fullgraph=True)
    assert torch.equal(compiled(**inputs), paged_attn.paged_attention(**inputs))


def test_bad_input_to_the_operator_is_the_functions_error(device: str) -> None:
    given, options = arguments(CASES[0], device)
    with pytest.raises(ValueError, match="seq_lens must be"):
        torch.ops.paged_attn.attention(*given[:4], given[4][:1], *given[5:], **options)
