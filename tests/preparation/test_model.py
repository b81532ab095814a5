"""What the calls of a model have in common, and that they are told of it as of themselves."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import paged_attn
from paged_attn.calls import launched
from paged_attn.launching import platform
from paged_attn.preparation.model import Lengths, Model, call_of, problem_of
from tests.preparation.models import MODELS


def test_a_model_is_without_a_word_what_prepare_takes_it_for() -> None:
    parameters = inspect.signature(paged_attn.prepare).parameters
    defaults = {name: parameters[name].default for name in Model._fields}
    sizes = {"heads", "kv_heads", "head_dim", "page_size", "dtype", "cache_dtype", "out_dtype"}
    assert Model._fields[: len(sizes)] == tuple(x for x in Model._fields if x in sizes)
    assert Model._field_defaults == {name: x for name, x in defaults.items() if name not in sizes}


class Planned(Exception):
    """Carries what the planner was told."""


@pytest.mark.skipif(not platform.INTERPRET, reason="a model's calls are made of tensors on the CPU")
@pytest.mark.parametrize(
    "batch", [Lengths(False, 3, 3, 1, 200), Lengths(True, 3, 70, 64, 200)], ids=["decode", "ragged"]
)
@pytest.mark.parametrize("name", MODELS)
def test_the_planner_is_told_of_a_model_what_it_is_told_of_its_calls(
    name: str, batch: Lengths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(problem: Any) -> Any:
        raise Planned(problem)

    monkeypatch.setattr(launched, "plan", told)
    model, device = Model(**MODELS[name]), platform.device_of(torch.device("cpu"))
    with pytest.raises(Planned) as planned:
        paged_attn.paged_attention(**call_of(model, batch))
    want = problem_of(model, batch, device)
    # the interpreter computes in float32, and the page table has room for whole pages
    got = planned.value.args[0]._replace(compute=want.compute, max_seqlen_k=want.max_seqlen_k)
    assert got == want


def moved(value: Any, device: str) -> Any:
    """An argument with its tensors on a device."""
    if isinstance(value, tuple):
        return tuple([moved(x, device) for x in value])
    return value.to(device) if isinstance(value, torch.Tensor) else value


def test_a_call_of_every_model_is_a_legal_one(device: str) -> None:
    for fields in MODELS.values():
        call = call_of(Model(**fields), Lengths(True, 2, 9, 5, 40))
        call |= {name: call[name].zero_() for name in ("seq_lens", "cu_seqlens_q")}
        held = call["k_cache"].data_ptr() == call["v_cache"].data_ptr()  # keys hold their values
        values = call["v_cache"].shape[-1]
        call = {name: moved(x, device) for name, x in call.items()}
        if held:
            call["v_cache"] = call["k_cache"][..., :values]
        paged_attn.paged_attention(**call)


@pytest.mark.parametrize("integers", [torch.int32, torch.int64], ids=str)
def test_calls_of_a_model_have_its_integers(integers: torch.dtype) -> None:
    model = Model(**next(iter(MODELS.values())))._replace(integers=integers)
    call = call_of(model, Lengths(True, 2, 3, 2, 20))
    assert {call[name].dtype for name in ("page_table", "seq_lens", "cu_seqlens_q")} == {integers}
