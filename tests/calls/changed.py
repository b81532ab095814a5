"""Calls that are like another but for one fact: an argument, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paged_attn.calls import attend
from tests.support.cases import E4M3, Case, bits

Inputs = dict[str, Any]
FP16 = torch.float16
BASE = Case(
    "base",
    (1, 3),
    (20, 33),
    heads=4,
    kv_heads=2,
    head_dim=16,
    dtype=FP16,
    sinks=True,
    alibi=True,
    bounds=True,
    positions="tree",
)
BASES = {
    "ragged": BASE,
    "fp8": Case("fp8", (1, 3), (20, 9), head_dim=16, dtype=FP16, cache_dtype=E4M3, scales="float", bounds=True),
    "decode": Case("decode", (1, 1), (20, 9), head_dim=16, decode_form=True, bounds=True),
}


def spaced(x: Tensor) -> Tensor:
    """A copy with other strides."""
    wide = torch.zeros(*x.shape[:-1], x.shape[-1] * 2, dtype=x.dtype, device=x.device)
    bits(wide)[..., : x.shape[-1]] = bits(x)
    return wide[..., : x.shape[-1]]


def shifted(x: Tensor) -> Tensor:
    """A copy at an address that is not aligned."""
    memory = torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)
    bits(memory)[1:] = bits(x.contiguous()).flatten()
    return memory[1:].view(x.shape)


TENSORS = ("q", "k_cache", "v_cache", "page_table", "seq_lens", "cu_seqlens_q", "out", "sinks", "alibi_slopes")
TENSORS += ("query_positions",)
NUMBERS: tuple[Any, ...] = (None, True, False, 0, 1, 1.0, 2, 20, 33, 0.0, 0.5, -1.0, "NHD", "HND", (-1, -1), (1, 0))
NUMBERS += ((True, 0), (1.0, 0), [1, 0], (1, 0, 0), float("nan"), "decode", "prefill")
OPTIONS = tuple(name for name in attend.Options._fields if name not in ("score_mod", "batch_invariant"))
OPTIONS += ("check", "k_scale", "v_scale", "q_scale", "out_scale", "qq_bias", "k_new")
TENSOR_CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "none": lambda x: None,
    "list": lambda x: x.tolist() if x.dtype != E4M3 else [],
    "meta": lambda x: x.to("meta"),
    "spaced": spaced,
    "shifted": shifted,
    "longer": lambda x: torch.cat([bits(x), bits(x)[:1]]).view(x.dtype),
    "shorter": lambda x: x[1:],
    "flat": lambda x: x.flatten(),
    "float64": lambda x: x.double(),
    "float32": lambda x: x.float(),
    "int64": lambda x: x.float().nan_to_num().long(),
    "grad": lambda x: x.detach().clone().requires_grad_() if x.is_floating_point() and x.itemsize > 1 else x,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1) if x.ndim > 1 else x,
}


def changed(inputs: Inputs, change: tuple[str, Any]) -> Inputs:
    name, how = change
    if name not in TENSORS:
        return inputs | {name: how}
    return inputs | {name: TENSOR_CHANGES[how](inputs[name])} if inputs.get(name) is not None else inputs
