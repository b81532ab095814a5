"""One call of write_kv: found again, or checked and described."""

from typing import Any

from torch import Tensor

from ..checks import argument_rows as checks
from ..checks.options import unboxed
from ..kernels.common.records import KeyValues
from ..kernels.portable.cache_write import write_kv_kernel
from ..launching.backend import Device, device_of
from ..launching.launch import Launches, Step
from ..launching.template import arguments_for
from ..records import layout
from ..records.call import scales
from ..records.rounding import cdiv, next_power_of_2
from ..strides import settled
from . import call_cache, checked
from .untraced import untraced


@untraced
def write(
    k: Any, v: Any, k_cache: Any, v_cache: Any, slot_mapping: Any, k_scale: Any, v_scale: Any, kv_layout: Any,
    check: bool | None, part: str | None = None,
) -> None:  # fmt: skip
    """Do what write_kv says; of the "keys" or the "values" alone, if `part` says so.

    v is None: values are the first dims of keys, and written with them.
    """
    scales = (k_scale, v_scale)
    if v is None:
        part = "keys"
    form: tuple[Any, ...] = ("write_kv", kv_layout, part, v is None, v_cache is None)
    tensors: tuple[Any, ...] = (k, v, k_cache, v_cache, slot_mapping)
    if v is None or v_cache is None:  # and a missing one of two is refused
        tensors = tuple([x for x in tensors if x is not None])
    if not (k_scale is v_scale is None):
        form += call_cache.form_of(scales)
        tensors += tuple([x for x in scales if isinstance(x, Tensor)])
    found, of = call_cache.again(form, tensors), None
    if found is None:
        of = call_cache.signature(form, tensors)
        found = call_cache.find(form, tensors, of)
    if found is not None and not (checked.ALWAYS if check is None else check is not False):
        launches, addresses = found
        return launches.first(tensors) if launches.kept is None else launches.again(addresses)
    k_scale, v_scale = unboxed((k_scale, v_scale))
    axes = checks.check_write(
        k, v, k_cache, v_cache, slot_mapping, kv_layout=kv_layout, k_scale=k_scale, v_scale=v_scale
    )  # fmt: skip
    device = device_of(k.device)
    if checked.enabled(check):
        checks.check_write_contents(axes, slot_mapping)
    if axes.tokens == 0:
        return
    given = (k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    with arguments_for([settled(x) for x in given]) as held:
        launches = Launches([_step(held, kv_layout, part, axes, device)], k.device)
    launches.first(tensors)
    call_cache.keep(of, launches)


def _step(held: list[Any], kv_layout: str, part: str | None, axes: checks.Axes, device: Device) -> Step:
    """A program per token and so many of its heads as make some 2048 elements."""
    k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale = held
    dim, value_padded = (max(16, next_power_of_2(x)) for x in (axes.head_dim, axes.value_dim or 1))
    block_heads = min(next_power_of_2(axes.kv_heads), max(1, 2048 // max(dim, value_padded)))
    grid = (axes.tokens, cdiv(axes.kv_heads, block_heads))
    if part == "keys":  # which may have no values beside them
        new, cache = KeyValues(layout.rows(k), None), KeyValues(layout.keys(k_cache, kv_layout), None)
    else:
        new, cache = KeyValues(layout.rows(k), layout.rows(v)), layout.cache(k_cache, v_cache, kv_layout)
    if part == "values":
        new, cache = new._replace(key=None), cache._replace(key=None)
    args = (
        new.key, new.value, cache, slot_mapping,
        scales(1.0, key=k_scale, value=v_scale),
        axes.page_size, axes.kv_heads, axes.head_dim, dim, axes.value_dim, value_padded, block_heads, device.dependent,
    )  # fmt: skip
    return Step(write_kv_kernel, grid, args, {"launch_pdl": True} if device.dependent else {})
