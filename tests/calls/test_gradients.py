"""There is no backward pass: whoever wants a gradient is told so, by the argument's name, in every path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import paged_attn
from paged_attn.calls import call_cache
from paged_attn.launching import launch
from tests.support.cases import E4M3, Case, build

Inputs = dict[str, Any]
FP16 = torch.float16
SIZES = dict(heads=4, kv_heads=2, head_dim=16)
PLAIN = Case("plain", (1, 3), (20, 33), **SIZES, dtype=FP16, sinks=True, alibi=True, qq_bias=4, new=True)
ALL_FP8 = Case("fp8", (1, 3), (20, 33), **SIZES, dtype=E4M3, cache_dtype=E4M3, out_dtype=E4M3, scales="tensor")
ATTENTION = {
    **dict.fromkeys(("q", "k_cache", "v_cache", "k_new", "v_new", "sinks", "alibi_slopes", "qq_bias", "out"), PLAIN),
    **dict.fromkeys(("q_scale", "k_scale", "v_scale", "out_scale"), ALL_FP8),
}
POSITIONAL = ("q", "k_cache", "v_cache", "page_table", "seq_lens", "cu_seqlens_q", "out")


def text(name: str) -> str:
    return f"{name} requires grad, but paged attention has no backward pass: call it under torch.no_grad()"


def attention(case: Case, device: str) -> Inputs:
    inputs = build(case, device) | {"return_lse": False}
    if case.out_dtype == E4M3:
        inputs["out_scale"] = torch.full((1,), 0.5, device=device)
    return inputs


def writing(device: str) -> Inputs:
    k, v = torch.randn(2, 3, 2, 16, device=device)
    k_cache, v_cache = (torch.zeros(4, 8, 2, 16, device=device).to(E4M3) for _ in range(2))
    scales = {name: torch.ones(1, device=device) for name in ("k_scale", "v_scale")}
    return dict(k=k, v=v, k_cache=k_cache, v_cache=v_cache, slot_mapping=torch.arange(3, device=device), **scales)


def states(device: str) -> Inputs:
    return dict(outs=torch.randn(2, 3, 4, 16, device=device), lses=torch.randn(2, 3, 4, device=device))


def operator(name: str, inputs: Inputs) -> Any:
    """Make the call through torch.ops."""
    if not name.startswith("attention"):
        positional = [inputs.pop(x) for x in list(inputs) if not x.endswith("_scale")]
        return getattr(torch.ops.paged_attn, name)(*positional, **inputs)
    given = {x: y for x, y in inputs.items() if y is not None and x != "return_lse"}
    return getattr(torch.ops.paged_attn, name)(*[given.pop(x, None) for x in POSITIONAL], **given)


def refused(name: str, call: Any, *args: Any, **inputs: Any) -> None:
    with pytest.raises(ValueError) as raised:
        call(*args, **inputs)
    assert type(raised.value) is ValueError
    assert str(raised.value) == text(name)


CALLS = [
    *[("attention", name) for name in ATTENTION],
    *[("write_kv", name) for name in ("k", "v", "k_cache", "v_cache", "k_scale", "v_scale")],
    *[("merge_states", name) for name in ("outs", "lses")],
]


@pytest.mark.parametrize("call, name", CALLS)
def test_what_requires_grad_is_named_in_first_calls_kept_calls_and_operators(
    call: str, name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch.Launches, "first", lambda *_: None)  # what is kept is kept, and nothing runs
    function = {"attention": "paged_attention"}.get(call, call)
    inputs = {
        "attention": lambda: attention(ATTENTION[name], device),
        "write_kv": lambda: writing(device),
        "merge_states": lambda: states(device),
    }[call]()
    public = getattr(paged_attn, function)
    call_cache.clear()
    with torch.no_grad():  # the same call without a gradient is kept
        for _ in range(3):
            public(**inputs)
    inputs[name] = inputs[name].detach().requires_grad_()
    refused(name, public, **inputs)
    refused(name, operator, call, dict(inputs))
    with torch.no_grad():
        for _ in range(3):
            public(**inputs)
    refused(name, public, **inputs)
    call_cache.clear()
    refused(name, public, **inputs)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_parameter_is_a_kept_call_where_grad_mode_is_off(
    mode: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = attention(PLAIN, device)
    want = paged_attn.paged_attention(**inputs).clone()
    inputs["sinks"] = torch.nn.Parameter(inputs["sinks"])
    call_cache.clear()
    with mode():
        for _ in range(2):
            paged_attn.paged_attention(**inputs)
        monkeypatch.setattr(call_cache, "signature", lambda *_: pytest.fail("its facts were read one by one"))
        got = paged_attn.paged_attention(**inputs)
    assert torch.equal(got.nan_to_num(), want.nan_to_num())


def test_a_call_without_gradients_is_kept_in_grad_mode(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = attention(PLAIN, device)
    call_cache.clear()
    for _ in range(2):
        paged_attn.paged_attention(**inputs)
    monkeypatch.setattr(call_cache, "signature", lambda *_: pytest.fail("its facts were read one by one"))
    monkeypatch.setattr(call_cache, "_wants_gradient", lambda _: pytest.fail("it was asked for gradients"))
    paged_attn.paged_attention(**inputs)


# ---- torch.compile -----------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize("call, name", [("attention", "sinks"), ("write_kv", "k"), ("merge_states", "outs")])
def test_what_requires_grad_is_named_in_a_compiled_call(call: str, name: str, device: str) -> None:
    function = {"attention": "paged_attention"}.get(call, call)
    inputs = {"attention": lambda: attention(PLAIN, device), "write_kv": lambda: writing(device)}.get(
        call, lambda: states(device)
    )()
    call_cache.clear()
    for _ in range(2):  # what a kept call is found by, torch.compile could not look into
        getattr(paged_attn, function)(**inputs)
    inputs[name] = inputs[name].detach().requires_grad_()
    compiled = torch.compile(getattr(paged_attn, function), backend="aot_eager")
    refused(name, compiled, **inputs)
    torch.compiler.reset()
    whole = torch.compile(getattr(paged_attn, function), backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError) as raised:
        whole(**inputs)
    assert text(name) in str(raised.value)
    with torch.no_grad():
        whole(**inputs)


def test_an_operator_in_a_compiled_call_names_what_requires_grad(device: str) -> None:
    inputs = attention(PLAIN, device)
    given = [inputs[x] for x in POSITIONAL]

    def layer(*tensors: Tensor) -> None:
        torch.ops.paged_attn.attention(*tensors[:-1], sinks=tensors[-1])

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError) as raised:
        compiled(*given, torch.nn.Parameter(inputs["sinks"]))
    assert text("sinks") in str(raised.value)


def test_a_compiled_training_step_may_hold_a_call_without_gradients(device: str) -> None:
    """The call's own graph is one that torch differentiates; grad mode is off around the call alone."""
    inputs = attention(PLAIN, device) | {"out": None}
    inputs["sinks"] = torch.nn.Parameter(inputs["sinks"])
    inputs["q"] = inputs["q"].nan_to_num()
    weight = torch.nn.Parameter(torch.ones(16, dtype=FP16, device=device))

    def step(weight: Tensor, q: Tensor, **others: Any) -> Tensor:
        q = q * weight
        with torch.no_grad():
            out = paged_attn.paged_attention(q, **others)
        return (q * out.nan_to_num()).float().sum()

    q = inputs.pop("q")
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    compiled(weight, q, **inputs).backward()
    got, weight.grad = weight.grad, None
    step(weight, q, **inputs).backward()
    torch.testing.assert_close(got, weight.grad)
