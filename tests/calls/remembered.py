"""How a call is described to the memo, and found there."""

from __future__ import annotations

import inspect
from typing import Any

import paged_attn
from paged_attn.calls import attend, call_cache
from paged_attn.calls.call_cache import form_of

Inputs = dict[str, Any]
DEFAULTS = {name: x.default for name, x in inspect.signature(paged_attn.paged_attention).parameters.items()}


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
    of = call_cache.signature(*described(inputs))
    return of and of[0]


def recognised(inputs: Inputs) -> Any:
    return call_cache.again(*described(inputs))
