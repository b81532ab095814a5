"""paged_attention as operators of torch, which graphs of torch.compile hold as they are: torch.ops.paged_attn.

`attention(...)` writes out and returns nothing, `attention_lse(...)` also returns the log-sum-exp.  They take the
arguments of paged_attention, with `out` always given and scales in tensors.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from .lazy import at_first_call

attend = at_first_call("attend", ".attend", globals())

ARGUMENTS = """(
    Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor seq_lens, Tensor? cu_seqlens_q, Tensor(a!) out,
    *, str kv_layout="NHD", SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None,
    Tensor? k_new=None, Tensor? v_new=None, float? softmax_scale=None, bool causal=True,
    int[] window_size=[-1, -1], float softcap=0.0,
    Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? qq_bias=None, Tensor? query_positions=None,
    Tensor? q_scale=None, Tensor? k_scale=None, Tensor? v_scale=None, Tensor? out_scale=None, str? only=None,
    bool batch_invariant=False, bool? check=None
)"""
_library = torch.library.Library("paged_attn", "DEF")


def _attention(
    q: Any, k_cache: Any, v_cache: Any, page_table: Any, seq_lens: Any, cu_seqlens_q: Any, out: Any,
    kv_layout: Any = "NHD", max_seqlen_q: Any = None, max_seqlen_k: Any = None, k_new: Any = None, v_new: Any = None,
    softmax_scale: Any = None, causal: Any = True, window_size: Any = (-1, -1), softcap: Any = 0.0,
    alibi_slopes: Any = None, sinks: Any = None, qq_bias: Any = None, query_positions: Any = None, q_scale: Any = None,
    k_scale: Any = None, v_scale: Any = None, out_scale: Any = None, only: Any = None, batch_invariant: Any = False,
    check: Any = None, return_lse: bool = False,
) -> Any:  # fmt: skip
    """Registered as it is, for a layer more is a microsecond; torch leaves out arguments that are as in ARGUMENTS."""
    result = attend(
        q, k_cache, v_cache, page_table, seq_lens, cu_seqlens_q, out,
        (k_new, v_new, alibi_slopes, sinks, qq_bias, query_positions, q_scale, k_scale, v_scale, out_scale),
        (
            kv_layout, max_seqlen_q, max_seqlen_k, softmax_scale, causal, tuple(window_size), softcap, return_lse, only,
            batch_invariant,
        ),
        check,
    )  # fmt: skip
    return result[1] if return_lse else None


def _no_result(*args: Any, **options: Any) -> None:
    """What torch.compile needs to know: nothing comes back."""


def _no_lse(q: Tensor, *args: Any, **options: Any) -> Tensor:
    """What torch.compile needs to know of the log-sum-exp."""
    return q.new_empty(q.shape[:2], dtype=torch.float32)


def _register() -> None:
    for name, result, function, fake in (
        ("attention", "()", _attention, _no_result),
        ("attention_lse", "Tensor", functools.partial(_attention, return_lse=True), _no_lse),
    ):
        _library.define(f"{name}{ARGUMENTS} -> {result}", tags=(torch.Tag.needs_fixed_stride_order,))
        _library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"paged_attn::{name}", fake, lib=_library)


_register()


def traced(q: Tensor, *args: Any, out: Tensor | None, return_lse: bool, **options: Any) -> Any:
    """paged_attention inside torch.compile: the operator, with what it asks for made around it."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    for name in ("q_scale", "k_scale", "v_scale", "out_scale"):
        if isinstance(options[name], (int, float)):
            options[name] = torch.full((1,), options[name], dtype=torch.float32, device=q.device)
    if not return_lse:
        torch.ops.paged_attn.attention(q, *args, out, **options)
        return out
    return out, torch.ops.paged_attn.attention_lse(q, *args, out, **options)
