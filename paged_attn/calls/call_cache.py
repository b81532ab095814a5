"""Calls that were made before: by everything that decides a call but addresses, what has been found out about it.

A signature holds every fact that the checks, the plan, the compiled kernels and their arguments depend on, so calls of
equal signature differ in nothing but where their tensors lie.  Whatever cannot be described so has none, and is checked
and planned each time.

To read these facts one by one takes longer than a launch.  The layers of a model are called with the same facts, so of
each form of call the latest is remembered with a guard, torch's own, which compares all facts of all tensors at once.
"""

import contextlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from ..launching.locks import left_free
from .ways import Runs

LIMIT = 4096  # signatures kept; a server's steps differ in lengths, so old ones are dropped
ALIGNMENT = 64  # bytes that kernels are compiled for: 16, or 16 elements of x-packed values
PLAIN = {torch.Tensor, torch.nn.Parameter}  # tensors of other classes may have no memory of their own

# Compares class, dispatch keys (device, layout, modes), dtype, sizes, strides and requires_grad; holds no tensor, and
# always fails for a tensor that is given twice.  torch.compile guards its graphs by it.
Guard: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)
transforms: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack  # the innermost of torch.func, or None

Addresses = Sequence[int]
Signature = tuple[Hashable, Addresses]  # what decides a call, and the addresses that do not


class Latest(NamedTuple):
    """The latest call of a form."""

    matches: Callable[..., bool]  # whether these tensors have the facts that its own had
    launches: Runs


_kept: dict[Hashable, Runs] = {}
_latest: dict[Hashable, Latest] = {}
_forgetting = left_free()  # what is oldest, no thread may ask while another adds


def form_of(others: Sequence[Any]) -> tuple[Any, ...]:
    """What decides of arguments that may be tensors, numbers or None, but facts of tensors.

    Types of numbers, too: True equals 1, but only one of them is a scale.
    """
    return tuple([type(x) if x is None or isinstance(x, torch.Tensor) else (type(x), x) for x in others])


def again(form: Hashable, tensors: tuple[Any, ...]) -> tuple[Runs, Addresses] | None:
    """The launches of the latest call of this form, if it was one with tensors like these, and their addresses."""
    try:
        latest = _latest.get(form)
        if latest is None or not latest.matches(*tensors):
            return None
    except TypeError:  # a form that cannot be hashed
        return None
    addresses = []
    for x in tensors:
        address = x.data_ptr()
        if address % ALIGNMENT:
            return None
        addresses.append(address)
    return latest.launches, addresses


def signature(form: Hashable, tensors: tuple[Any, ...]) -> Signature | None:
    """Of a call of this form with these tensors; None if it has none.

    Strides even of contiguous tensors, for sizes do not imply them where one is 0 or 1.  What torch.func
    wraps has an address, too, but no memory there.
    """
    try:
        if not {*map(type, tensors)} <= PLAIN or _wants_gradient(tensors) or transforms() is not None:
            return None
        addresses = tuple([x.data_ptr() for x in tensors])
        facts = [
            (x.shape, x.stride(), x.dtype, x.device, x.is_neg(), y % ALIGNMENT) for x, y in zip(tensors, addresses)
        ]
        # which begin at the same address: values that lie in keys are read once
        key = (form, tuple(map(addresses.index, addresses)), *facts)
        hash(key)
        return key, addresses
    except (AttributeError, TypeError, RuntimeError):  # not tensors, tensors without memory, options without a hash
        return None


def find(form: Hashable, tensors: tuple[Any, ...], of: Signature | None) -> tuple[Runs, Addresses] | None:
    """The launches of a signature, if they are kept, and its addresses; the next call of the form finds it `again`."""
    launches = None if of is None else _kept.get(of[0])
    if of is None or launches is None:
        return None
    _guard(form, tensors, of[1], launches)
    return launches, of[1]


def _guard(form: Hashable, tensors: tuple[Any, ...], addresses: Addresses, launches: Runs) -> None:
    """Remember the latest call of a form, if its tensors are different ones and lie as well as kernels can tell."""
    if Guard is None or len({*map(id, tensors)}) < len(tensors) or any(x % ALIGNMENT for x in addresses):
        return
    with contextlib.suppress(TypeError, ValueError, RuntimeError):  # another torch, or tensors that it does not guard
        matches = Guard(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        if any(x.requires_grad for x in tensors):  # tensors like these may, and grad mode is off now
            matches = _while_no_gradient(matches)
        _put(_latest, form, Latest(matches, launches))


def _while_no_gradient(matches: Callable[..., bool]) -> Callable[..., bool]:
    return lambda *tensors: not torch.is_grad_enabled() and matches(*tensors)


def _wants_gradient(tensors: tuple[Any, ...]) -> bool:
    """Such a call is no call that was made before, but an error."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def keep(of: Signature | None, launches: Runs) -> None:
    """Remember launches that went well, and forget the oldest."""
    if of is not None:
        _put(_kept, of[0], launches)


def _put(store: dict[Hashable, Any], key: Hashable, value: Any) -> None:
    with _forgetting:
        while len(store) >= LIMIT:
            del store[next(iter(store))]
        store[key] = value


def clear() -> None:
    """Forget everything, for those who change what calls are planned by."""
    with _forgetting:
        _kept.clear()
        _latest.clear()
