"""One call of write_kv or write_qkv: found in the cache of calls, or checked and launched."""

from typing import Any

import torch
from torch import Tensor

from ..checks import argument_rows as checks
from ..checks.options import unboxed
from ..checks.overlap import same_elements
from ..checks.projections import (
    Projections,
    Rotation,
    check_projection_contents,
    check_projections,
    packed_shape,
    three,
)
from ..launching.platform import device_of
from ..strides import settled
from . import call_cache, checked
from .untraced import untraced
from .ways import way_of


@untraced
def write(
    k: Any, v: Any, k_cache: Any, v_cache: Any, slot_mapping: Any, k_scale: Any, v_scale: Any, kv_layout: Any,
    check: bool | None, part: str | None = None,
) -> None:  # fmt: skip
    """Write as write_kv specifies, or only the part "keys" or "values".

    If v is None, values are the first dims of keys, and are written with the keys.
    """
    scales = (k_scale, v_scale)
    if v is None:
        part = "keys"
    form: tuple[Any, ...] = ("write_kv", kv_layout, part, v is None, v_cache is None)
    tensors: tuple[Any, ...] = (k, v, k_cache, v_cache, slot_mapping)
    if v is None or v_cache is None:  # with v = None, v_cache may be a view of the keys; v without v_cache is refused
        tensors = tuple([x for x in tensors if x is not None])
    if not (k_scale is v_scale is None):
        form += call_cache.form_of_values(scales)
        tensors += tuple([x for x in scales if isinstance(x, Tensor)])
    found, of = call_cache.again(form, tensors), None
    if found is None:
        of = call_cache.signature(form, tensors)
        found = call_cache.find(form, tensors, of)
    if found is not None and v is not None and not call_cache.apart(found, tensors, 2, 3):
        found = found if same_elements(k, v) and same_elements(k_cache, v_cache) else None
    if found is not None and not (checked.by_default(found[0]) if check is None else check is not False):
        runs, addresses = found
        if runs.kept is None:
            runs.first(tensors)
        else:
            runs.again(addresses)
        return
    k_scale, v_scale = unboxed((k_scale, v_scale))
    axes = checks.check_write(
        k, v, k_cache, v_cache, slot_mapping, kv_layout=kv_layout, k_scale=k_scale, v_scale=v_scale
    )  # fmt: skip
    device = device_of(k.device)
    if checked.enabled(check, device):
        checks.check_write_contents(axes, slot_mapping)
    if axes.tokens == 0:
        return
    given = tuple([settled(x) for x in (k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)])
    runs = way_of(device).write_of(given, kv_layout, part, axes, device)
    runs.first(tensors)
    call_cache.keep(of, runs)


@untraced
def fused_write(
    qkv: Any, k_cache: Any, v_cache: Any, slot_mapping: Any, others: tuple[Any, ...], options: tuple[Any, ...],
    q_out: Any, check: bool | None, part: str | None = None,
) -> Tensor:  # fmt: skip
    """Make a call of write_qkv.

    others: the fields of Projections from positions to q_scale.  options: the fields of Rotation.  part: "keys": write
    queries and keys, but no values; None: write all.
    """
    heads = _heads_of(qkv, v_cache)
    in_place = q_out is heads[0] is not None  # the guard of kept calls takes no tensor twice
    tensors = tuple([x for x in (*heads, k_cache, v_cache, slot_mapping, *others) if isinstance(x, Tensor)])
    kv_layout, interleaved, sections, eps, norm_offset = options
    form = (
        "write_qkv", part, len(heads), heads[-1] is None, v_cache is None, in_place, q_out is None, options,
        type(interleaved), type(eps), type(norm_offset), *call_cache.form_of_values(others),
    )  # fmt: skip
    if sections is not None:
        form += call_cache.form_of_values(sections) if isinstance(sections, tuple) else (type(sections),)
    if not (in_place or q_out is None):
        tensors += (q_out,)
    found, of = call_cache.again(form, tensors), None
    if found is None:
        of = call_cache.signature(form, tensors)
        found = call_cache.find(form, tensors, of)
    at = sum(x is not None for x in heads)  # index of k_cache
    if found is not None and v_cache is not None and not call_cache.apart(found, tensors, at, at + 1):
        found = None
    if found is None or (checked.by_default(found[0]) if check is None else check is not False):
        return _fused_write_new(
            (heads, k_cache, v_cache, slot_mapping, others), options, q_out, in_place, check, part, of
        )
    runs, addresses = found
    made: tuple[Tensor, ...] = ()
    if q_out is None:
        q_out = _like_queries(heads, k_cache, kv_layout)
        made = (q_out,)
    if runs.kept is None:
        runs.first(tensors + made)
    else:
        runs.again([*addresses, *[x.data_ptr() for x in made]] if made else addresses)
    result: Tensor = q_out
    return result


def _fused_write_new(
    given: tuple[Any, ...], options: tuple[Any, ...], q_out: Any, in_place: bool, check: bool | None,
    part: str | None, of: call_cache.Signature | None,
) -> Tensor:  # fmt: skip
    """Check and launch a call, and keep its launch for calls of equal signature.  of: its signature, or None."""
    heads, *caches, others = given
    x = Projections._make((*heads, *caches, *unboxed(others), q_out))
    host = Rotation._make(unboxed(options))
    axes = check_projections(x, host)
    device = device_of(x.q.device)
    if checked.enabled(check, device):
        check_projection_contents(axes, x)
    if q_out is None:
        q_out = _like_queries(heads, x.k_cache, host.kv_layout)
    result: Tensor = q_out
    if axes.tokens == 0:
        return result
    x = Projections._make([settled(y) for y in x._replace(q_out=None if in_place else q_out)])
    runs = way_of(device).qkv_write_of(x, host, axes, device, part)
    runs.first(tuple([y for y in x if isinstance(y, Tensor)]))
    call_cache.keep(of, runs)
    return result


def _heads_of(qkv: Any, v_cache: Any) -> tuple[Any, ...]:
    """(q, k, v) as in Projections: (qkv, None, None) for a packed tensor, (q_rope, k_rope, latent) for latents."""
    if not isinstance(qkv, (tuple, list)):
        return qkv, None, None
    q, k, v = three(qkv)
    return (q, v, k) if v_cache is None else (q, k, v)


def _like_queries(heads: tuple[Any, ...], k_cache: Tensor, kv_layout: str) -> Tensor:
    """A new tensor for the queries, [tokens, heads, dims of q] in the dtype of q."""
    q = heads[0]
    if heads[1] is not None:
        return torch.empty_like(q, memory_format=torch.contiguous_format)
    return torch.empty(packed_shape(q, k_cache, kv_layout), dtype=q.dtype, device=q.device)
