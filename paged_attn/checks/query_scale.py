"""Check of q_scale: a descale of fp8 queries, like the other scales, or a number for each token."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..arguments import scales_tokens
from .axes import Door
from .dtypes import FLOAT32, FP8, names


def check_query_scale(door: Door, value: Any, q: Tensor) -> None:
    """Check q_scale: one number, one for each KV head, or by token.  Queries that are not fp8: by token only."""
    name = "q_scale"
    if not isinstance(value, Tensor):
        door.scale(name, value, "q", q.dtype)
        return
    door.place(name, value, FLOAT32)
    shape, sizes = list(value.shape), door.sizes
    tokens, kv_heads = sizes["tokens"], sizes["kv_heads"]
    if q.dtype not in FP8:
        if shape not in ([tokens], [tokens, 1]):
            wanted = f"None, [tokens] or [tokens, 1] with tokens = {tokens} beside {names((q.dtype,))} queries"
            raise ValueError(f"{name} must be {wanted}, got {shape}")
    elif shape not in ([tokens, 1], [tokens, kv_heads]) or not (value.stride(0) == 0 or scales_tokens(value, q)):
        door.scale(name, value, "q", q.dtype, more=", by token [tokens, 1] or [tokens, kv_heads]")
