"""The form of a call: all that decides the call, except facts of its tensors.  Every call computes its form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor  # noqa: F401, used in the generated text

from ..arguments import ARGUMENTS, OPTION, PLACES, Options, Tensors
from ..generated import function, listed
from . import call_cache  # noqa: F401
from .untraced import untraced

RAGGED = ("a ragged page table",)
GIVEN = [name for name in Tensors._fields if name not in (*PLACES, "out")]  # tensors that calls give by keyword
# options whose type is part of the form: numbers of different types are equal, and some types are refused
NUMBERS = [
    x.name for x in ARGUMENTS if x.kind == OPTION and x.check[:1] not in ((), ("choice",), ("window",), ("shard",))
]


# (form, tensors) of a call, from its Tensors and Options; the text is generated from the argument table.
form_of: Callable[..., tuple[Any, tuple[Any, ...]]] = untraced(function(f"""\
def form_of({listed(PLACES)} out, others, options):
    tensors = ({listed(PLACES[:-1])}) if cu_seqlens_q is None else ({listed(PLACES)})
    ({listed(Options._fields)}) = options
    try:
        left, right = window_size
    except (TypeError, ValueError):  # a window of another form will be refused
        return [], tensors
    form = (
        options, type(left), type(right), {listed(f"type({name})" for name in NUMBERS)}
        cu_seqlens_q is None, out is None,
    )
    if shard is not None:
        if not isinstance(shard, (tuple, list)):  # it will be refused
            return [], tensors
        form += call_cache.form_of(shard)
    ({listed(GIVEN)}) = others
    if page_starts is not None:
        form += RAGGED
        tensors += (page_starts,)
    if not ({" is ".join(GIVEN[1:])} is None):
        others = others[1:]
        if score_mod_args is not None:
            if not isinstance(score_mod_args, (tuple, list)):  # it will be refused
                return [], tensors
            others = (*others[:-1], *score_mod_args)
        form += call_cache.form_of(others)
        tensors += tuple([x for x in others if isinstance(x, Tensor)])
    return form, tensors if out is None else tensors + (out,)
""", globals()))  # fmt: skip
