"""A cache of earlier calls: signature -> launches.

The form of a call is all that decides the call, except facts of its tensors.  Every call computes its form.

A signature holds every fact on which plan, compiled kernels and their arguments depend.  Calls of equal signature
differ only in the addresses of their tensors.  Checks depend on the facts, too, except checks of overlaps, which depend
on addresses.  Of these, kept calls check again at new addresses (`apart`) whether both caches of a write, the caches of
a copy, or a gathered cache and `out` share memory.  They look for no other overlap.  A call without a signature is
checked and planned each time.

Reading these facts one by one takes longer than a launch, but the layers of a model make calls with equal facts.  So
the latest call of each form is kept with a guard of torch, which compares all facts except those of addresses at once.
The facts of addresses are alignment and which tensors begin at the same address.
"""

import contextlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import ARGUMENTS, OPTION, PLACES, Options, Tensors
from ..checks.overlap import overlap
from ..launching.locks import left_free
from .untraced import from_text, listed, untraced
from .ways import Runs

LIMIT = (
    4096  # signatures kept; steps of a server differ in shapes, so the oldest are dropped; also addresses in `apart`
)
# Bytes.  Kernels depend on addresses modulo 16 bytes, or, for x-packed values, modulo 16 elements of up to 4 bytes.
ALIGNMENT = 64
PLAIN = {torch.Tensor, torch.nn.Parameter}  # tensors of other classes may have no memory of their own

# A guard compares class, dispatch keys (device, layout, modes), dtype, sizes, strides and requires_grad.  It holds no
# tensor, and always fails for a tensor that is given twice.  torch.compile guards its graphs by the same class.
Guard: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)
transforms: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack  # innermost transform of torch.func, or None

RAGGED = ("a ragged page table",)
# Fields of Tensors between cu_seqlens_q and out.
GIVEN = [name for name in Tensors._fields if name not in (*PLACES, "out")]
# options whose type is part of the form, because True, 1 and 1.0 are equal, but the checks refuse some types
NUMBERS = [
    x.name for x in ARGUMENTS if x.kind == OPTION and x.check[:1] not in ((), ("choice",), ("window",), ("shard",))
]

Addresses = Sequence[int]
Signature = tuple[Hashable, Addresses]  # the facts that decide a call, and its addresses


class Latest(NamedTuple):
    """The latest call of a form."""

    matches: Callable[..., bool]  # whether given tensors have the facts of the latest call's tensors
    launches: Runs


_kept: dict[Hashable, Runs] = {}
_latest: dict[Hashable, Latest] = {}
_forgetting = left_free()  # held to drop the oldest entry and to add one


def form_of_values(others: Sequence[Any]) -> tuple[Any, ...]:
    """Form of arguments that may be tensors, numbers or None, without facts of tensors.

    The form also has the types of numbers, because True equals 1, but only 1 is a valid scale.
    """
    return tuple([type(x) if x is None or isinstance(x, Tensor) else (type(x), x) for x in others])


# (form, tensors) of a call, from its Tensors and Options; the text is generated from the argument table.
form_of: Callable[..., tuple[Any, tuple[Any, ...]]] = untraced(from_text(f"""\
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
        form += form_of_values(shard)
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
        form += form_of_values(others)
        tensors += tuple([x for x in others if isinstance(x, Tensor)])
    return form, tensors if out is None else tensors + (out,)
""", globals()))  # fmt: skip


def again(form: Hashable, tensors: tuple[Any, ...]) -> tuple[Runs, Addresses] | None:
    """(launches, addresses) of the latest call of this form if the guard and the alignment match; otherwise None.

    Neither compares which tensors begin at the same address.  `attend` compares the addresses of k_cache and v_cache.
    """
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


def apart(found: tuple[Runs, Addresses], tensors: tuple[Any, ...], i: int, j: int) -> bool:
    """Whether tensors i and j of a kept call share no memory; False: the checks are to name what is wrong.

    Between calls of equal signature, the answer depends only on the distance of the two addresses.
    """
    launches, addresses = found
    distance = addresses[j] - addresses[i]
    if distance in launches.apart:
        return True
    return not overlap(tensors[i], tensors[j]) and remember(launches, distance)


def remember(launches: Runs, addresses: Hashable) -> bool:
    """Keep addresses, or a distance of addresses, at which tensors are known to share no memory; return True."""
    if len(launches.apart) >= LIMIT:
        launches.apart.clear()
    launches.apart.add(addresses)
    return True


def signature(form: Hashable, tensors: tuple[Any, ...]) -> Signature | None:
    """Signature of a call of this form with these tensors, or None.

    The facts include strides even of contiguous tensors, because sizes do not imply strides where a size is 0 or 1.
    Inside a transform of torch.func no call has a signature: data_ptr of a wrapped tensor returns a number, but the
    tensor has no memory there.
    """
    try:
        if not {*map(type, tensors)} <= PLAIN or _wants_gradient(tensors) or transforms() is not None:
            return None
        addresses = tuple([x.data_ptr() for x in tensors])
        facts = [
            (x.shape, x.stride(), x.dtype, x.device, x.is_neg(), y % ALIGNMENT) for x, y in zip(tensors, addresses)
        ]
        # The key also tells which tensors begin at the same address.  If v_cache is a view of k_cache (a latent cache),
        # both begin there, and the kernels read each latent once.
        key = (form, tuple(map(addresses.index, addresses)), *facts)
        hash(key)
        return key, addresses
    except (AttributeError, TypeError, RuntimeError):  # not tensors, tensors without memory, options without a hash
        return None


def find(form: Hashable, tensors: tuple[Any, ...], of: Signature | None) -> tuple[Runs, Addresses] | None:
    """(launches, addresses) of a signature, or None if no launches are kept.

    If launches are kept and `_guard` can compare the tensors, this call becomes the latest call of its form.  `again`
    then finds these launches for the next call.
    """
    launches = None if of is None else _kept.get(of[0])
    if of is None or launches is None:
        return None
    _guard(form, tensors, of[1], launches)
    return launches, of[1]


def _guard(form: Hashable, tensors: tuple[Any, ...], addresses: Addresses, launches: Runs) -> None:
    """Keep the latest call of a form, if no tensor comes twice and all addresses are multiples of ALIGNMENT."""
    if Guard is None or len({*map(id, tensors)}) < len(tensors) or any(x % ALIGNMENT for x in addresses):
        return
    with contextlib.suppress(TypeError, ValueError, RuntimeError):  # another torch, or tensors that torch cannot guard
        matches = Guard(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        if any(x.requires_grad for x in tensors):  # grad mode is off now; with grad mode on, the call is an error
            matches = _while_no_gradient(matches)
        _put(_latest, form, Latest(matches, launches))


def _while_no_gradient(matches: Callable[..., bool]) -> Callable[..., bool]:
    return lambda *tensors: not torch.is_grad_enabled() and matches(*tensors)


def _wants_gradient(tensors: tuple[Any, ...]) -> bool:
    """Whether a call asks for a gradient.  The checks refuse the call, so it has no signature."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def keep(of: Signature | None, launches: Runs) -> None:
    """Keep launches that succeeded, and drop the oldest ones beyond LIMIT."""
    if of is not None:
        _put(_kept, of[0], launches)


def _put(store: dict[Hashable, Any], key: Hashable, value: Any) -> None:
    with _forgetting:
        while len(store) >= LIMIT:
            del store[next(iter(store))]
        store[key] = value


def clear() -> None:
    """Drop all calls, after a change of something on which plans depend."""
    with _forgetting:
        _kept.clear()
        _latest.clear()
