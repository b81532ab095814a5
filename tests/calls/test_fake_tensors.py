"""Tensors that only look like some: fake, on meta, wrapped, sparse; an error names them, operators take the fake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import paged_attn
from paged_attn.calls import call_cache
from tests.calls.test_gradients import ALL_FP8, PLAIN, POSITIONAL, attention, operator, states, writing
from tests.support.cases import E4M3

Inputs = dict[str, Any]


class Wrapper(torch.Tensor):
    """A tensor without memory, as distributed ones are."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} of a wrapper")


class Named(torch.Tensor):
    """A tensor with memory and another class."""


def fake(x: Any) -> Any:
    return FakeTensorMode().from_tensor(x) if isinstance(x, Tensor) else x


def on_meta(inputs: Inputs) -> Inputs:
    return {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in inputs.items()}


MEMORY = "a tensor with memory of its own"
PRETENDERS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "fake": (fake, f"{MEMORY}, got FakeTensor"),
    "subclass": (Wrapper, f"{MEMORY}, got Wrapper"),
    "sparse": (lambda x: x.to_sparse(), "a strided tensor, got sparse_coo"),
}
CALLS = {
    "paged_attention": lambda device: attention(PLAIN, device),
    "write_kv": lambda device: writing(device),
    "merge_states": lambda device: states(device),
}
TENSORS = {
    "paged_attention": (*POSITIONAL, "k_new", "v_new", "sinks", "alibi_slopes", "qq_bias"),
    "write_kv": ("k", "v", "k_cache", "v_cache", "slot_mapping", "k_scale", "v_scale"),
    "merge_states": ("outs", "lses"),
}


@pytest.mark.parametrize("function, name", [(x, name) for x, names in TENSORS.items() for name in names])
@pytest.mark.parametrize("kept", [False, True])
def test_a_tensor_without_memory_is_named(function: str, name: str, kept: bool, device: str) -> None:
    """Also where the same call with true tensors was made before: what is kept is launched with no address of 0."""
    inputs = CALLS[function](device)
    call_cache.clear()
    for _ in range(2 if kept else 0):
        getattr(paged_attn, function)(**inputs)
    for how, (pretend, text) in PRETENDERS.items():
        if how == "sparse" and inputs[name].dtype == E4M3:
            continue
        with pytest.raises(TypeError) as raised:
            getattr(paged_attn, function)(**inputs | {name: pretend(inputs[name])})
        assert str(raised.value) == f"{name} must be {text}"
    with pytest.raises(TypeError) as raised:
        torch.func.functionalize(lambda x: getattr(paged_attn, function)(**inputs | {name: x}))(inputs[name])
    assert str(raised.value) == f"{name} must be {MEMORY}, got one that torch.func wraps"


@pytest.mark.parametrize("function, first", [("paged_attention", "q"), ("write_kv", "k"), ("merge_states", "outs")])
def test_a_call_on_meta_and_a_fake_call_are_named_by_their_first_argument(
    function: str, first: str, device: str
) -> None:
    inputs = CALLS[function](device)
    with pytest.raises(TypeError, match=f"^{first} must be {MEMORY}, got one on meta$"):
        getattr(paged_attn, function)(**on_meta(inputs))
    with FakeTensorMode() as mode:
        given = {name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in inputs.items()}
        with pytest.raises(TypeError, match=f"^{first} must be {MEMORY}, got FakeTensor$"):
            getattr(paged_attn, function)(**given)


def test_what_vmap_wraps_is_named(device: str) -> None:
    inputs = attention(PLAIN, device)
    with pytest.raises(TypeError, match=f"^q must be {MEMORY}, got one that torch.func wraps$"):
        torch.vmap(lambda q: paged_attn.paged_attention(**inputs | {"q": q}))(inputs["q"][None])
    with pytest.raises(ValueError, match="q requires grad, but paged attention has no backward pass"):
        torch.func.grad(lambda q: paged_attn.paged_attention(**inputs | {"q": q}).sum())(inputs["q"])


def test_a_nested_tensor_is_named(device: str) -> None:
    inputs = attention(PLAIN, device)
    nested = torch.nested.nested_tensor([inputs["q"]], layout=torch.jagged)
    with pytest.raises(TypeError, match="q must be a strided tensor, got a nested one"):
        paged_attn.paged_attention(**inputs | {"q": nested})


def test_a_tensor_of_another_class_is_served_if_it_has_memory(device: str) -> None:
    inputs = attention(PLAIN, device) | {"out": None}
    want = paged_attn.paged_attention(**inputs)
    for _ in range(3):
        got = paged_attn.paged_attention(**inputs | {"q": inputs["q"].as_subclass(Named)})
        assert torch.equal(got.as_subclass(Tensor).nan_to_num(), want.nan_to_num())


# ---- operators ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fake", "meta"])
@pytest.mark.parametrize("name", ["attention", "attention_lse", "write_kv", "merge_states"])
def test_operators_take_tensors_without_memory(name: str, kind: str, device: str) -> None:
    case = ALL_FP8 if name == "attention" else PLAIN
    inputs = {"write_kv": writing, "merge_states": states}.get(name, lambda device: attention(case, device))(device)
    with FakeTensorMode() as mode:
        fakes = {x: mode.from_tensor(y) if isinstance(y, Tensor) else y for x, y in inputs.items()}
        result = operator(name, fakes) if kind == "fake" else None
    if kind == "meta":
        result = operator(name, on_meta(inputs))
    shapes = {"attention_lse": (4, 4), "merge_states": ((3, 4, 16), (3, 4))}.get(name)
    if isinstance(result, tuple):
        assert tuple(tuple(x.shape) for x in result) == shapes
    else:
        assert shapes == (None if result is None else tuple(result.shape))


def test_vmap_of_an_operator_is_refused_by_name(device: str) -> None:
    inputs = attention(PLAIN, device)
    with pytest.raises(RuntimeError, match="paged_attn::attention"):
        torch.vmap(lambda q: operator("attention", inputs | {"q": q}))(inputs["q"][None])
