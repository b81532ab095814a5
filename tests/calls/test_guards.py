"""Calls that are found without their signature: by a guard, which compares all facts of all tensors at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paged_attn.calls import call_cache
from tests.calls.changed import BASE, BASES, NUMBERS, OPTIONS, TENSOR_CHANGES, TENSORS, Inputs, changed
from tests.calls.outcomes import outcome, same
from tests.calls.remembered import described, recognised, signature_of
from tests.support.cases import Case, build

pytestmark = pytest.mark.usefixtures("nothing_kept")


def guarded(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands in for the launches of a call, which from now on is found without its signature."""
    launches: Any = object()
    call_cache.keep(call_cache.signature(*described(inputs)), launches)
    assert call_cache.find(*described(inputs), call_cache.signature(*described(inputs))) is not None
    monkeypatch.setattr(call_cache, "signature", lambda *_: pytest.fail("its facts were read one by one"))
    assert recognised(inputs) == (launches, [x.data_ptr() for x in described(inputs)[1]])
    return launches


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
    of = call_cache.signature(*described(first))
    call_cache.keep(of, object())  # type: ignore[arg-type]
    call_cache.find(*described(first), of)
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
        monkeypatch.setattr(call_cache, "Guard", None)
    one, other = (build(Case(**{**vars(BASES[base]), "seed": seed}), device) for seed in (1, 7))
    want = outcome(other)
    call_cache.clear()
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
        monkeypatch.setattr(call_cache, "signature", lambda *_: pytest.fail("its facts were read one by one"))
        assert same(outcome(inputs), want)


def test_what_is_recognised_is_checked_if_asked(device: str) -> None:
    inputs = build(BASES["decode"], device)
    for _ in range(3):
        outcome(inputs)
    inputs["seq_lens"] = inputs["seq_lens"] + (1 << 20)
    assert outcome(inputs | {"check": True})[0] is ValueError
    assert outcome(inputs | {"check": 1})[0] is TypeError
