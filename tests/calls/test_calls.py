"""Kept calls: a signature holds all that decides a call, and what is launched again is what would be launched anew."""

from __future__ import annotations

import gc
import inspect
import threading
import weakref
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import paged_attn
from paged_attn.calls import attend, memo
from paged_attn.calls.form import form_of
from tests.cases import E4M3, Case, bits, build

Inputs = dict[str, Any]
Cut = Callable[..., None]

# On a failure hypothesis imports what warns, and warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore:mypy_extensions.TypedDict:DeprecationWarning")
few = settings(
    max_examples=30,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
FP16 = torch.float16
BASE = Case(
    "base",
    (1, 3),
    (20, 33),
    heads=4,
    kv_heads=2,
    head_dim=16,
    dtype=FP16,
    sinks=True,
    alibi=True,
    bounds=True,
    positions="tree",
)
BASES = {
    "ragged": BASE,
    "fp8": Case("fp8", (1, 3), (20, 9), head_dim=16, dtype=FP16, cache_dtype=E4M3, scales="float", bounds=True),
    "decode": Case("decode", (1, 1), (20, 9), head_dim=16, decode_form=True, bounds=True),
}
DEFAULTS = {name: x.default for name, x in inspect.signature(paged_attn.paged_attention).parameters.items()}


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    memo.clear()


def outcome(inputs: Inputs) -> Any:
    """The bits of what a call returns, or its error."""
    given_out = inputs.get("out")
    inputs = inputs | ({"out": given_out.clone()} if isinstance(given_out, Tensor) else {})
    if isinstance(given_out, Tensor) and given_out.stride() != inputs["out"].stride():
        strided = torch.empty_strided(
            given_out.shape, given_out.stride(), dtype=given_out.dtype, device=given_out.device
        )
        inputs["out"] = strided.copy_(given_out)
    if inputs["only"] in ("decode", "prefill"):
        inputs["return_lse"] = False  # rows of it that are not asked for hold anything
    try:
        result = paged_attn.paged_attention(**inputs)
    except (ValueError, TypeError) as error:
        return type(error), str(error)
    return list(result) if isinstance(result, tuple) else [result]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) or isinstance(other, tuple):
        return one == other
    return len(one) == len(other) and all(torch.equal(as_bytes(a), as_bytes(b)) for a, b in zip(one, other))


def as_bytes(x: Tensor) -> Tensor:
    """NaN, which marks what was not written, equals itself here."""
    return x.contiguous().flatten().view(torch.uint8)


def spaced(x: Tensor) -> Tensor:
    """The same numbers, other strides."""
    wide = torch.zeros(*x.shape[:-1], x.shape[-1] * 2, dtype=x.dtype, device=x.device)
    bits(wide)[..., : x.shape[-1]] = bits(x)
    return wide[..., : x.shape[-1]]


def shifted(x: Tensor) -> Tensor:
    """The same numbers at an address that is not aligned."""
    memory = torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)
    bits(memory)[1:] = bits(x.contiguous()).flatten()
    return memory[1:].view(x.shape)


TENSORS = ("q", "k_cache", "v_cache", "page_table", "seq_lens", "cu_seqlens_q", "out", "sinks", "alibi_slopes")
TENSORS += ("query_positions",)
NUMBERS: tuple[Any, ...] = (None, True, False, 0, 1, 1.0, 2, 20, 33, 0.0, 0.5, -1.0, "NHD", "HND", (-1, -1), (1, 0))
NUMBERS += ((True, 0), (1.0, 0), [1, 0], (1, 0, 0), float("nan"), "decode", "prefill")
OPTIONS = tuple(name for name in attend.Options._fields if name not in ("score_mod", "batch_invariant"))
OPTIONS += ("check", "k_scale", "v_scale", "q_scale", "out_scale", "qq_bias", "k_new")
TENSOR_CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "none": lambda x: None,
    "list": lambda x: x.tolist() if x.dtype != E4M3 else [],
    "meta": lambda x: x.to("meta"),
    "spaced": spaced,
    "shifted": shifted,
    "longer": lambda x: torch.cat([bits(x), bits(x)[:1]]).view(x.dtype),
    "shorter": lambda x: x[1:],
    "flat": lambda x: x.flatten(),
    "float64": lambda x: x.double(),
    "float32": lambda x: x.float(),
    "int64": lambda x: x.float().nan_to_num().long(),
    "grad": lambda x: x.detach().clone().requires_grad_() if x.is_floating_point() and x.itemsize > 1 else x,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1) if x.ndim > 1 else x,
}


@st.composite
def changes(draw: st.DrawFn) -> tuple[str, Any]:
    """(argument, what becomes of it): one fact of a call."""
    if draw(st.booleans()):
        return draw(st.sampled_from(TENSORS)), draw(st.sampled_from(sorted(TENSOR_CHANGES)))
    return draw(st.sampled_from(OPTIONS)), draw(st.sampled_from(NUMBERS))


def changed(inputs: Inputs, change: tuple[str, Any]) -> Inputs:
    name, how = change
    if name not in TENSORS:
        return inputs | {name: how}
    return inputs | {name: TENSOR_CHANGES[how](inputs[name])} if inputs.get(name) is not None else inputs


@few
@given(base=st.sampled_from(sorted(BASES)), change=changes(), back=st.booleans())
def test_one_fact_changed_is_another_call(base: str, change: tuple[str, Any], back: bool, device: str) -> None:
    """Whatever is kept of a call, another one gets the result or the error that it gets alone."""
    inputs = build(BASES[base], device)
    other = changed(inputs, change)
    first, second = (other, inputs) if back else (inputs, other)
    memo.clear()
    outcome(first), outcome(first)  # the second time it is found by its signature, and guarded from then on
    after = [outcome(second) for _ in range(3)]
    memo.clear()
    alone = outcome(second)
    assert all(same(result, alone) for result in after)


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("how", sorted(TENSOR_CHANGES))
def test_a_tensor_that_differs_has_another_signature(name: str, how: str) -> None:
    inputs = build(BASE, "cpu")
    other = changed(inputs, (name, how))[name]
    if isinstance(other, Tensor) and other.device.type == "cpu":
        facts = [(x.shape, x.stride(), x.dtype, x.data_ptr() % memo.ALIGNMENT) for x in (inputs[name], other)]
        if facts[0] == facts[1] and not (name == "q" and other.requires_grad):
            pytest.skip("it has the same shape, strides, dtype and alignment: all that a signature holds of a tensor")
    assert signature_of(inputs | {name: other}) != signature_of(inputs)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_differs_even_in_type_has_another_signature(name: str) -> None:
    """Except where neither is legal, so that neither is ever kept.  `check` decides nothing that is kept."""
    inputs = build(BASE, "cpu")
    for one, other in combinations(NUMBERS, 2):
        first, second = (inputs | {name: value} for value in (one, other))
        if signature_of(first) == signature_of(second) is not None and name != "check":
            assert outcome(first)[0] in (TypeError, ValueError), one
            assert outcome(second)[0] in (TypeError, ValueError), other


def described(inputs: Inputs) -> tuple[Any, tuple[Any, ...]]:
    """The form and the tensors of a call."""
    inputs = dict.fromkeys(attend.Tensors._fields) | DEFAULTS | inputs
    inputs["score_mod_args"] = inputs["score_mod_args"] or None
    *others, out = (inputs[name] for name in attend.Tensors._fields)
    options = (inputs[name] for name in attend.Options._fields)
    return form_of(*others[:6], out, tuple(others[6:]), tuple(options))


def signature_of(inputs: Inputs) -> Any:
    if getattr(inputs["q"], "requires_grad", True):
        return None
    of = memo.signature(*described(inputs))
    return of and of[0]


# ---- calls that are found without their signature ----------------------------------------------------------------


def guarded(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands in for the launches of a call, which from now on is found without its signature."""
    launches: Any = object()
    memo.keep(memo.signature(*described(inputs)), launches)
    assert memo.find(*described(inputs), memo.signature(*described(inputs))) is not None
    monkeypatch.setattr(memo, "signature", lambda *_: pytest.fail("its facts were read one by one"))
    assert recognised(inputs) == (launches, [x.data_ptr() for x in described(inputs)[1]])
    return launches


def recognised(inputs: Inputs) -> Any:
    return memo.again(*described(inputs))


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("how", sorted(TENSOR_CHANGES))
def test_a_tensor_that_differs_is_not_recognised(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = build(BASE, "cpu")
    other = changed(inputs, (name, how))
    if signature_of(other) == signature_of(inputs):
        pytest.skip("this change leaves alone what decides")
    guarded(inputs, monkeypatch)
    assert recognised(other) is None


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("one", NUMBERS, ids=repr)
def test_an_option_that_differs_even_in_type_is_not_recognised(name: str, one: Any) -> None:
    inputs = build(BASE, "cpu")
    first = inputs | {name: one}
    of = memo.signature(*described(first))
    memo.keep(of, object())  # type: ignore[arg-type]
    memo.find(*described(first), of)
    for other in NUMBERS:
        second = inputs | {name: other}
        assert recognised(second) is None or signature_of(second) == signature_of(first)


def test_a_tensor_in_another_place_is_not_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    """sinks may be just like alibi_slopes."""
    inputs = build(BASE, "cpu") | {"sinks": None}
    guarded(inputs, monkeypatch)
    assert recognised(inputs | {"sinks": inputs["alibi_slopes"], "alibi_slopes": None}) is None


def test_a_tensor_that_has_become_another_is_not_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = build(BASE, "cpu")
    guarded(inputs, monkeypatch)
    table = inputs["page_table"]
    table.data = torch.cat([table, table], 1)
    assert recognised(inputs) is None


def test_a_parameter_and_a_view_of_other_bits_are_not_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = build(BASE, "cpu") | {"sinks": torch.zeros(4)}
    guarded(inputs, monkeypatch)
    assert recognised(inputs | {"sinks": torch.nn.Parameter(inputs["sinks"])}) is None
    assert recognised(inputs | {"sinks": torch._neg_view(inputs["sinks"])}) is None


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("guard", [True, False])
def test_a_third_call_is_the_first_and_follows_its_tensors(
    base: str, guard: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not guard:
        monkeypatch.setattr(memo, "Guard", None)
    one, other = (build(Case(**{**vars(BASES[base]), "seed": seed}), device) for seed in (1, 7))
    want = outcome(other)
    memo.clear()
    outcome(one), outcome(one)
    for without_out in (False, True):
        for _ in range(2 if without_out else 1):
            assert same(outcome(other | ({"out": None} if without_out else {})), want)


def test_one_tensor_in_two_places_is_served(device: str) -> None:
    inputs = build(BASES["decode"], device)
    inputs["v_cache"] = inputs["k_cache"]
    want = outcome(inputs | {"v_cache": inputs["k_cache"].clone()})
    assert all(same(outcome(inputs), want) for _ in range(3))


def test_inference_mode_is_recognised_too(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = build(BASES["decode"], device) | {"out": None}
    want = outcome(inputs)
    outcome(inputs)
    with torch.inference_mode():
        assert all(same(outcome(inputs), want) for _ in range(2))
        monkeypatch.setattr(memo, "signature", lambda *_: pytest.fail("its facts were read one by one"))
        assert same(outcome(inputs), want)


def test_what_is_recognised_is_checked_if_asked(device: str) -> None:
    inputs = build(BASES["decode"], device)
    for _ in range(3):
        outcome(inputs)
    inputs["seq_lens"] = inputs["seq_lens"] + (1 << 20)
    assert outcome(inputs | {"check": True})[0] is ValueError
    assert outcome(inputs | {"check": 1})[0] is TypeError


# ---- what is kept ------------------------------------------------------------------------------------------------


def test_a_second_call_is_not_checked_and_planned_again(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = build(BASE, device)
    first = outcome(inputs)
    monkeypatch.setattr(attend.checks, "check_attention", lambda *_, **__: pytest.fail("checked again"))
    assert same(outcome(inputs), first)


def test_a_kept_call_follows_its_tensors(device: str) -> None:
    """Other tensors of the same signature, in every place, are the ones that are read and written."""
    one, other = (build(BASES["fp8"], device) for _ in range(2))
    for name in ("q", "k_cache", "v_cache"):
        other[name] = build(Case(**{**vars(BASES["fp8"]), "seed": 7}), device)[name]
    other["page_table"] = build(Case(**{**vars(BASES["fp8"]), "seed": 7}), device)["page_table"]
    want = outcome(other)
    memo.clear()
    assert not same(outcome(one), want)
    assert same(outcome(other), want)


def test_a_kept_write_follows_its_tensors(device: str) -> None:
    caches = torch.zeros(2, 2, 4, 2, 16, device=device)
    for number in (1.0, 2.0, 3.0):
        k = torch.full((3, 2, 16), number, device=device)
        cache = torch.zeros_like(caches)
        paged_attn.write_kv(k, k + 1, cache[0], cache[1], torch.tensor([0, 5, -1], device=device))
        assert cache[0].sum() == number * 2 * 32
        assert cache[1].sum() == (number + 1) * 2 * 32


def test_what_is_kept_holds_no_tensor(device: str) -> None:
    inputs = build(BASES["fp8"], device)
    watched = [weakref.ref(x) for x in inputs.values() if isinstance(x, Tensor)]
    for _ in range(3):
        outcome(inputs)
    assert len(memo._kept) == len(memo._latest) == 1
    del inputs
    gc.collect()
    assert [x() for x in watched] == [None] * len(watched)


def test_what_is_kept_is_bounded(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memo, "LIMIT", 3)
    inputs = build(BASES["decode"], device)
    for bound in range(20, 28):
        outcome(inputs | {"max_seqlen_k": bound})
        outcome(inputs | {"max_seqlen_k": bound})
        assert len(memo._kept) <= 3
        assert len(memo._latest) <= 3
    assert recognised(inputs | {"max_seqlen_k": 27}) is not None


class Cleared(dict[Any, Any]):
    """Kept calls that another thread forgets, or tries to, while the oldest of them is looked for."""

    def __iter__(self) -> Any:
        keys = super().__iter__()
        self.other = threading.Thread(target=memo.clear)
        self.other.start()
        self.other.join(0.1)
        return keys


def test_threads_that_forget_calls_at_once_do_not_disturb_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Cleared(first=None, second=None)
    monkeypatch.setattr(memo, "LIMIT", 2)
    monkeypatch.setattr(memo, "_kept", store)
    memo._put(store, "third", None)
    store.other.join()
    assert not store
