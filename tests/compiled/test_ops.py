"""The operators of torch: correct in themselves, and the functions they are named after."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import paged_attn
from paged_attn import ops
from paged_attn.calls.writes import write
from tests.support.cases import E4M3, Case, bits, build

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


def written(device: str) -> tuple[Any, ...]:
    """The arguments of write_kv, the caches two views of one buffer."""
    k, v = torch.randn(2, 3, 2, 32, device=device).to(FP16)
    caches = torch.zeros(2, 4, 8, 2, 32, dtype=FP16, device=device)
    return k, v, *caches.unbind(), torch.tensor([5, -1, 17], device=device)


def states(device: str) -> tuple[Any, ...]:
    """The arguments of merge_states."""
    return torch.randn(2, 3, 4, 32, device=device), torch.randn(2, 3, 4, device=device)


@pytest.mark.parametrize("operator", ["attention", "attention_lse"])
@pytest.mark.parametrize("case", CASES[:2], ids=str)  # opcheck itself multiplies inputs, which fp8 cannot be
def test_opcheck_finds_nothing(case: Case, operator: str, device: str) -> None:
    given, options = arguments(case, device)
    torch.library.opcheck(getattr(torch.ops.paged_attn, operator).default, given, options)


@pytest.mark.parametrize("operator", ["write_kv", "write_keys", "write_values"])
def test_opcheck_finds_nothing_of_writes(operator: str, device: str) -> None:
    torch.library.opcheck(getattr(torch.ops.paged_attn, operator).default, written(device))


def test_opcheck_finds_nothing_of_merges(device: str) -> None:
    torch.library.opcheck(torch.ops.paged_attn.merge_states.default, states(device))


def test_write_kv_the_operator_is_the_function_in_one_launch(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, wanted = written(device), written(device)
    for k, other in zip(given[:2], wanted[:2]):
        other.copy_(k)
    paged_attn.write_kv(*wanted)
    launched = []
    monkeypatch.setattr(ops, "write", lambda *args: launched.append(args[-1]) or write(*args))
    torch.ops.paged_attn.write_kv(*given)
    assert launched == [None]
    assert all(torch.equal(x, y) for x, y in zip(given, wanted))


@pytest.mark.parametrize("part", ["keys", "values"])
@pytest.mark.parametrize("layout", ["NHD", "HND", "x"])
@pytest.mark.parametrize("dtype", [FP16, E4M3])
def test_half_a_write_leaves_the_other_cache_alone(part: str, layout: str, dtype: torch.dtype, device: str) -> None:
    k, v, *_, slots = written(device)
    given = build(Case("write", (1,), (20,), heads=2, kv_heads=2, dtype=FP16, cache_dtype=dtype, layout=layout), device)
    caches = [bits(given[name]).zero_().view(dtype) for name in ("k_cache", "v_cache")]
    wanted = [x.clone() for x in caches]
    scales = {"k_scale": torch.full((1,), 0.5, device=device), "v_scale": torch.full((1,), 2.0, device=device)}
    options = {"kv_layout": "HND" if layout == "HND" else "NHD"} | (scales if dtype == E4M3 else {})
    paged_attn.write_kv(k, v, *wanted, slots, **options)
    for _ in range(2):  # the second time it is a call that was made before
        getattr(torch.ops.paged_attn, f"write_{part}")(k, v, *caches, slots, **options)
    half = ["keys", "values"].index(part)
    assert torch.equal(bits(caches[half]), bits(wanted[half]))
    assert not bits(caches[1 - half]).any()
    assert bits(wanted[1 - half]).any()


def test_merge_states_the_operator_is_the_function(device: str) -> None:
    given = states(device)
    for got, want in zip(torch.ops.paged_attn.merge_states(*given), paged_attn.merge_states(*given)):
        assert torch.equal(got, want)


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


def test_bad_input_to_the_operator_is_the_functions_error(device: str) -> None:
    given, options = arguments(CASES[0], device)
    with pytest.raises(ValueError, match="seq_lens must be"):
        torch.ops.paged_attn.attention(*given[:4], given[4][:1], *given[5:], **options)


def test_bad_input_to_a_half_of_a_write_is_the_functions_error(device: str) -> None:
    """Both halves check all, so that nothing is written where anything is wrong."""
    k, v, k_cache, v_cache, slots = written(device)
    with pytest.raises(ValueError, match="v must be"):
        torch.ops.paged_attn.write_keys(k, v[:1], k_cache, v_cache, slots)
    assert not k_cache.any()


def test_what_torch_looks_into_sees_the_halves_of_a_write(device: str) -> None:
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    given = written(device)
    with Seen():
        torch.ops.paged_attn.write_kv(*given)
    assert [x for x in names if "paged" in x] == ["paged_attn.write_keys.default", "paged_attn.write_values.default"]
    assert given[2].any()
    assert given[3].any()
