"""One call of write_kv: found in the cache of calls, or checked and launched."""

from typing import Any

from torch import Tensor

from ..checks import argument_rows as checks
from ..checks.options import unboxed
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
    if v is None or v_cache is None:  # the checks refuse a call with only one of v and v_cache
        tensors = tuple([x for x in tensors if x is not None])
    if not (k_scale is v_scale is None):
        form += call_cache.form_of_values(scales)
        tensors += tuple([x for x in scales if isinstance(x, Tensor)])
    found, of = call_cache.again(form, tensors), None
    if found is None:
        of = call_cache.signature(form, tensors)
        found = call_cache.find(form, tensors, of)
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
