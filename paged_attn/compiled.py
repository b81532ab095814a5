"""The public functions inside torch.compile and torch.export: calls of operators, with their arguments prepared.

torch traces this file.  The file refuses only errors that an operator cannot see: types that a schema converts, and
gradients.  Operators check everything else when the compiled graph runs.
"""

from typing import Any

import torch
from torch import Tensor

from . import ops  # noqa: F401, registers the operators
from .arguments import ARGUMENTS, OPTION, PLACES, SCALE, of_kind
from .checks.argument_rows import check_options
from .checks.kernel_tensors import refuse_gradient
from .checks.options import boolean, choice, scale_number
from .checks.swapped import LAYOUTS

OPTIONS = [x.name for x in ARGUMENTS if x.kind == OPTION and x.schema is not None]
SCALES = of_kind(SCALE)


def paged_attention(out: Tensor | None, check: bool | None, return_lse: bool, **given: Any) -> Any:
    """paged_attention as an operator.  given: the other arguments that operators have, by name."""
    check_options(**{name: given[name] for name in OPTIONS}, return_lse=return_lse)
    if check is not None:
        boolean("check", check, "True, False or None")
    _no_gradients(given | {"out": out})
    q = given["q"]
    out = _results_like(q, given["k_cache"], given["v_cache"]) if out is None else out
    tensors = [given.pop(name) for name in PLACES]
    given |= _scales({name: given[name] for name in SCALES}, q)
    if not return_lse:
        torch.ops.paged_attn.attention(*tensors, out, **given, check=check)
        return out
    return out, torch.ops.paged_attn.attention_lse(*tensors, out, **given, check=check)


def write_kv(
    k: Tensor, v: Tensor | None, k_cache: Tensor, v_cache: Tensor | None, slot_mapping: Tensor, kv_layout: str,
    k_scale: Any, v_scale: Any, check: bool | None,
) -> None:  # fmt: skip
    choice("kv_layout", kv_layout, tuple(LAYOUTS))
    if check is not None:
        boolean("check", check, "True, False or None")
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    _no_gradients({"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, **scales})
    torch.ops.paged_attn.write_kv(
        k, v, k_cache, v_cache, slot_mapping, kv_layout=kv_layout, check=check, **_scales(scales, k)
    )


def merge_states(outs: Tensor, lses: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    _no_gradients({"outs": outs, "lses": lses, "sinks": sinks})
    out, lse = torch.ops.paged_attn.merge_states(outs, lses, sinks)
    return out, lse


def _results_like(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    """Empty results, as wide as values; as wide as queries for caches that the operator will refuse."""
    axis = 2 if k_cache.ndim == 5 else 3
    if v_cache.ndim != 4 or v_cache.shape[axis] == q.shape[-1]:
        return torch.empty_like(q, memory_format=torch.contiguous_format)
    return q.new_empty((*q.shape[:-1], v_cache.shape[axis]))


def _no_gradients(given: dict[str, Any]) -> None:
    for name, value in given.items():
        if isinstance(value, Tensor):
            refuse_gradient(name, value)


def _scales(given: dict[str, Any], like: Tensor) -> dict[str, Any]:
    """Scales with numbers turned into tensors, because a schema has no type for both."""
    made = dict(given)
    for name, value in given.items():
        if value is not None and not isinstance(value, Tensor):
            scale_number(name, value)
            made[name] = torch.full((1,), value, dtype=torch.float32, device=like.device)
    return made
