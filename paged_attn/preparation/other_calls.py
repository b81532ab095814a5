"""Calls of a model besides attention: writes of queries, keys and values, and whole pages copied and gathered.

The functions call with tensors on the CPU whose memory is never written or read, in processes that only compile.
"""

from __future__ import annotations

from typing import Any

import torch

from ..checks.projections import Projections, Rotation
from ..records.formats import is_scaled
from .model import Model, new_dtype, new_rows

# Launches that write new keys and values into a cache: one for both, or one each, as in compiled graphs.  A latent
# cache has one launch for keys.  "apart" is a latent cache's launch for values and rest that come as two tensors.
WRITES = ("both", "keys", "values")
POSITIONS = 4096  # rows of cos_sin; kernels depend on whether 16 divides this number


def write(model: Model, call: dict[str, Any], name: str) -> None:
    """Make the write `name`, one of WRITES or "apart", into the caches of a call of attention."""
    from ..calls.writes import write as write_kv

    k, v = new_rows(model, 1)
    caches, scales = (call["k_cache"], call["v_cache"]), _scales(model, call)
    slots, part = torch.empty(1, dtype=torch.int64), None if name == "both" else name
    if name == "apart":
        behind = slice(model.value_width, None)
        k, v, part = k[..., behind], k[..., : model.value_width], None
        caches = caches[0][..., behind], caches[1]
    elif model.latent:
        if name == "values":
            return
        v, caches, scales, part = None, (caches[0], None), (scales[0], None), "keys"
    write_kv(k, v, *caches, slots, *scales, call["kv_layout"], False, part)


def fused_writes(model: Model, call: dict[str, Any], name: str) -> None:
    """Make the calls of write_qkv that go with the write `name`, one of WRITES or "apart".

    Compiled graphs write queries and keys in one launch, and values by write_kv, if both caches lie in one buffer.
    """
    from ..calls.writes import fused_write

    if name == "values":
        return
    part = "keys" if name == "keys" and not model.latent else None
    for tokens in _tokens_written(model):
        x, options = projections(model, call, tokens)
        qkv = x.q if x.packed else (x.q, x.v, x.k) if x.latent else (x.q, x.k, x.v)
        others = (x.positions, x.cos_sin, x.q_norm, x.k_norm, x.k_scale, x.v_scale, x.q_scale)
        fused_write(qkv, x.k_cache, x.v_cache, x.slot_mapping, others, tuple(options), x.q_out, False, part)


def _tokens_written(model: Model) -> tuple[int, ...]:
    """Tokens of example calls of write_qkv: one, and more than a call of few tokens has.

    Sections of positions [3, tokens] are `tokens` apart.  Kernels depend on whether this stride is 1, a multiple of 16
    or neither.
    """
    from ..calls.launched import few_tokens

    behind = model.value_width if model.latent else 0
    few = few_tokens(model.heads, model.kv_heads, model.head_dim - behind, model.value_width)
    many = (few // 16 + 1) * 16
    return (1, many) if model.mrope_sections is None else (1, 2, 16, many, many + 1)


def projections(model: Model, call: dict[str, Any], tokens: int) -> tuple[Projections, Rotation]:
    """Arguments of write_qkv for `tokens` tokens and the caches of a call of attention."""
    heads, kv_heads, value_dim = model.heads, model.kv_heads, model.value_width
    dim, dtype = model.head_dim - (value_dim if model.latent else 0), new_dtype(model)
    if model.qkv == "packed":
        q, k, v = torch.empty(tokens, (heads + 2 * kv_heads) * model.head_dim, dtype=dtype), None, None
    else:
        sizes = (heads, dim), (kv_heads, dim), (kv_heads, value_dim)
        q, k, v = (torch.empty(tokens, *size, dtype=dtype) for size in sizes)
    turned, norm, sections = dim if model.rotary_dim is None else model.rotary_dim, model.qk_norm, model.mrope_sections
    positions = torch.empty(tokens if sections is None else (3, tokens), dtype=torch.int64) if turned else None
    k_scale, v_scale = _scales(model, call)
    given = Projections(
        q, k, v, call["k_cache"], None if model.latent else call["v_cache"], torch.empty(tokens, dtype=torch.int64),
        positions=positions,
        cos_sin=torch.empty(POSITIONS, turned, dtype=model.cos_sin or dtype) if turned else None,
        q_norm=None if norm is None or model.latent else torch.empty(dim, dtype=norm),
        k_norm=None if norm is None else torch.empty(value_dim if model.latent else dim, dtype=norm),
        k_scale=k_scale,
        v_scale=None if model.latent else v_scale,
        q_scale=_scale(model) if is_scaled(model.dtype) else None,
        q_out=torch.empty(tokens, heads, dim, dtype=model.dtype) if is_scaled(model.dtype) else None,
    )  # fmt: skip
    return given, Rotation(call["kv_layout"], model.interleaved, sections, 1e-6, 0.0)


def whole_pages(model: Model, call: dict[str, Any]) -> None:
    """Call copy_pages, which has the kernel of move_pages, and gather_pages."""
    from ..pages import copy_pages, gather_pages

    k, v, page_table = call["k_cache"], call["v_cache"], call["page_table"]
    ids = torch.zeros(1, dtype=model.integers)
    copy_pages([k] if model.latent else [k, v], ids, ids, check=False)
    dtype = new_dtype(model) if is_scaled(model.cache_dtype) else None
    for cache, scale in zip((k, v), _scales(model, call)):
        layout = "HDN" if model.kv_layout == "x" and cache is v else call["kv_layout"]
        gather_pages(
            cache, page_table, call["seq_lens"], kv_layout=layout, tokens=1, dtype=dtype, scale=scale, check=False
        )


def _scales(model: Model, call: dict[str, Any]) -> tuple[Any, Any]:
    """k_scale and v_scale for calls without sequences, which get scales by head in place of scales by sequence."""
    if model.scales == "per_seq" and is_scaled(model.cache_dtype):
        return _scale(model), _scale(model)
    return call.get("k_scale"), call.get("v_scale")


def _scale(model: Model) -> Any:
    """The scale of a call without sequences: a float, or a tensor [kv_heads] or [1]."""
    by_head = torch.empty(model.kv_heads)
    return dict(number=1.0, per_head=by_head, per_seq=by_head).get(model.scales, torch.empty(1))
