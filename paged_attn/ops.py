"""The public functions as operators of torch, which graphs of torch.compile hold as they are: torch.ops.paged_attn.

`attention(...)` writes out and returns nothing, `attention_lse(...)` also returns the log-sum-exp; `write_kv(...)`;
`merge_states(outs, lses)`.  They take the arguments of the functions, with `out` always given and scales in tensors.
`causal_seqs` is what is given as `causal` where that is a tensor; `causal` is then False.  `head_windows` is what is
given as `window_size` where that is a tensor; `window_size` is then (-1, -1).

Where torch looks into it, `write_kv` is two operators, each of which changes one cache.  Of one that changes two views
of one buffer torch.compile would copy a view, for it allows each operator one change of a buffer in place.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from .arguments import ARGUMENTS, PLACES, Options, Tensors, schema
from .calls.untraced import at_first_call, untraced
from .checks.axes import values_apart
from .checks.kernel_tensors import refuse_gradient, watched
from .generated import function, listed
from .latent import lies_in, looks_within

attend = at_first_call("attend", ".calls.attend", globals())
write = at_first_call("write", ".calls.write", globals())
merge = at_first_call("merge", ".calls.state_merge", globals())

WRITE = """(
    Tensor k, Tensor? v, Tensor{keys} k_cache, Tensor{values}? v_cache, Tensor slot_mapping,
    *, str kv_layout="NHD", Tensor? k_scale=None, Tensor? v_scale=None, bool? check=None
)"""
_library = torch.library.Library("paged_attn", "DEF")


# The places of a call, of which no operator has a score_mod, and a graph's window is a list.
_NAMES = {name: name for name in (*Tensors._fields, *Options._fields)}
_NAMES |= {x.name: "None" for x in ARGUMENTS if x.schema is None and x.name != "return_lse"}
_NAMES["window_size"] = "tuple(window_size)"
_FIRST = (*PLACES, "out")
_NAMED = [x for x in ARGUMENTS if x.schema is not None and x.name not in _FIRST]

# Registered as it is, for a layer more is a microsecond; torch leaves out arguments that are as in its schema.
_attention: Callable[..., Any] = untraced(function(f"""\
def _attention({listed(_FIRST)} {listed(f"{x.name}={x.default!r}" for x in _NAMED)} return_lse=False):
    result = attend(
        {listed(_FIRST)}
        ({listed(_NAMES[name] for name in Tensors._fields if name not in _FIRST)}),
        ({listed(_NAMES[name] for name in Options._fields)}),
        check,
    )
    return result[1] if return_lse else None
""", globals()))  # fmt: skip


@untraced
def _write(
    k: Any, v: Any, k_cache: Any, v_cache: Any, slot_mapping: Any, kv_layout: Any = "NHD", k_scale: Any = None,
    v_scale: Any = None, check: Any = None, part: str | None = None,
) -> None:  # fmt: skip
    """Both caches in one launch, or one of them."""
    if part is None and watched(k, v, k_cache, v_cache, slot_mapping):
        operators = [torch.ops.paged_attn.write_keys, torch.ops.paged_attn.write_values]
        if v is None:
            _refuse_apart(v_cache, k_cache)
            v_cache, operators = None, operators[:1]
        for operator in operators:
            operator(
                k, v, k_cache, v_cache, slot_mapping, kv_layout=kv_layout, k_scale=k_scale, v_scale=v_scale, check=check
            )
    else:
        write(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, kv_layout, check, part)


def _refuse_apart(v_cache: Any, k_cache: Any) -> None:
    """Values that are written with their keys lie in these, which the first look at a graph tells.

    Where a graph changes nothing in place it writes a copy of the keys, and the view of values is not of that one.
    """
    if isinstance(v_cache, FakeTensor) and isinstance(k_cache, FakeTensor):  # which have no addresses
        begins = [(x.untyped_storage()._cdata, x.storage_offset()) for x in (v_cache, k_cache)]
        inside = begins[0] == begins[1] and looks_within(v_cache, k_cache)
    else:
        inside = v_cache is None or isinstance(k_cache, FunctionalTensor) or lies_in(v_cache, k_cache)
    if not inside:
        raise values_apart(v_cache)


@untraced
def _merge_states(outs: Any, lses: Any) -> Any:
    return merge(outs, lses)


def _nothing(*args: Any) -> None:
    """What comes back of operators that write."""


def _lse(q: Tensor, *args: Any) -> Tensor:
    """What the log-sum-exp looks like."""
    return q.new_empty(q.shape[:2], dtype=torch.float32)


def _state(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """What a merged state looks like."""
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])


def _register(schema: str, function: Callable[..., Any], looks: Callable[..., Any] | None) -> None:
    """An operator; one without a description of its results is made of others wherever torch looks into it."""
    name = schema.split("(")[0]
    _library.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))
    if looks is None:
        _library.impl(name, function, "CompositeImplicitAutograd")
        return
    _library.impl(name, function, "CompositeExplicitAutograd")
    names = [x.name for x in getattr(torch.ops.paged_attn, name).default._schema.arguments]

    def fake(*args: Any, **options: Any) -> Any:
        """A wanted gradient is known here alone: what a compiled graph calls no longer sees that it was."""
        for name, value in (*zip(names, args), *options.items()):
            if isinstance(value, Tensor):
                refuse_gradient(name, value)
        return looks(*args)

    torch.library.register_fake(f"paged_attn::{name}", fake, lib=_library)


_register(f"attention{schema()} -> ()", _attention, _nothing)
_register(f"attention_lse{schema()} -> Tensor", functools.partial(_attention, return_lse=True), _lse)
_register(f"write_kv{WRITE.format(keys='(a!)', values='(b!)')} -> ()", _write, None)
_register(f"write_keys{WRITE.format(keys='(a!)', values='')} -> ()", functools.partial(_write, part="keys"), _nothing)
_register(
    f"write_values{WRITE.format(keys='', values='(a!)')} -> ()", functools.partial(_write, part="values"), _nothing
)
_register("merge_states(Tensor outs, Tensor lses) -> (Tensor, Tensor)", _merge_states, _state)
