"""Signatures of calls hold all that decides a call: two that differ in one fact are kept apart."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from paged_attn.calls import call_cache
from tests.calls.changed import BASE, BASES, NUMBERS, OPTIONS, TENSOR_CHANGES, TENSORS, changed
from tests.calls.outcomes import outcome, same
from tests.calls.remembered import signature_of
from tests.support.cases import build

# On a failure hypothesis imports what warns, and warnings are errors.
pytestmark = [
    pytest.mark.filterwarnings("ignore:mypy_extensions.TypedDict:DeprecationWarning"),
    pytest.mark.usefixtures("nothing_kept"),
]
few = settings(
    max_examples=30,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@st.composite
def changes(draw: st.DrawFn) -> tuple[str, Any]:
    """(argument, what becomes of it): one fact of a call."""
    if draw(st.booleans()):
        return draw(st.sampled_from(TENSORS)), draw(st.sampled_from(sorted(TENSOR_CHANGES)))
    return draw(st.sampled_from(OPTIONS)), draw(st.sampled_from(NUMBERS))


@few
@given(base=st.sampled_from(sorted(BASES)), change=changes(), back=st.booleans())
def test_one_fact_changed_is_another_call(base: str, change: tuple[str, Any], back: bool, device: str) -> None:
    """Whatever is kept of a call, another one gets the result or the error that it gets alone."""
    inputs = build(BASES[base], device)
    other = changed(inputs, change)
    first, second = (other, inputs) if back else (inputs, other)
    call_cache.clear()
    outcome(first), outcome(first)  # the second time it is found by its signature, and guarded from then on
    after = [outcome(second) for _ in range(3)]
    call_cache.clear()
    alone = outcome(second)
    assert all(same(result, alone) for result in after)


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("how", sorted(TENSOR_CHANGES))
def test_a_tensor_that_differs_has_another_signature(name: str, how: str) -> None:
    inputs = build(BASE, "cpu")
    other = changed(inputs, (name, how))[name]
    if isinstance(other, Tensor) and other.device.type == "cpu":
        facts = [(x.shape, x.stride(), x.dtype, x.data_ptr() % call_cache.ALIGNMENT) for x in (inputs[name], other)]
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
