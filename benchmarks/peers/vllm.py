"""vLLM's Triton unified_attention, with the split over keys that its backend sets up."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.cannot import Cannot, allow
from tests.support.cases import INT4, Case

OF_INT4 = "vllm.v1.attention.ops.int4_per_token_head"
HOMES = ("vllm.v1.attention.ops.triton_unified_attention", "vllm.attention.ops.triton_unified_attention")
SEGMENTS, MIN_PROGRAMS = 16, 128  # as in vLLM's Triton backend
MOST_QUERIES = 8  # the longest query whose keys are split; there is room for a state of each of its tokens


def call(case: Case, inputs: dict[str, Any]) -> Callable[[], Tensor]:
    """Return a call of unified_attention, or, for int4, of its kernel alone, without the rotation of heads."""
    function = _function(case.dtype_of_cache == INT4)
    allow(case, "window", "softcap", "alibi", "sinks", "tree", "wide heads", "fp8", "scales by token")
    if case.layout != "NHD":
        raise Cannot("NHD only")
    q, out, device = inputs["q"].contiguous(), torch.empty_like(inputs["q"]), inputs["q"].device
    threshold = max(1, MIN_PROGRAMS // case.kv_heads)
    states = (threshold * min(max(case.query_lens), MOST_QUERIES), case.heads, SEGMENTS)
    arguments = dict(
        q=q,
        k=inputs["k_cache"],
        v=inputs["v_cache"],
        k_cache=inputs["k_cache"],
        v_cache=inputs["v_cache"],
        out=out,
        cu_seqlens_q=torch.tensor((0, *case.query_lens)).cumsum(0).to(device, torch.int32),
        max_seqlen_q=max(case.query_lens),
        seqused_k=inputs["seq_lens"],
        max_seqlen_k=max(case.seq_lens),
        softmax_scale=case.softmax_scale or case.head_dim**-0.5,
        causal=True,
        window_size=(case.window_size[0], 0) if case.window_size[0] >= 0 else (-1, -1),
        block_table=inputs["page_table"],
        softcap=case.softcap,
        q_descale=None,
        **_scales(case, inputs, device),
        alibi_slopes=inputs.get("alibi_slopes"),
        qq_bias=inputs.get("qq_bias"),
        sinks=inputs.get("sinks"),
        seq_threshold_3D=threshold,
        num_par_softmax_segments=SEGMENTS,
        softmax_segm_output=torch.empty(*states, 1 << (case.head_dim - 1).bit_length(), device=device),
        softmax_segm_max=torch.empty(states, device=device),
        softmax_segm_expsum=torch.empty(states, device=device),
        use_alibi_sqrt=False,
        output_scale=None,
        mm_prefix_range=None,
        packing_factor=2,
    )
    known = inspect.signature(function).parameters  # older versions choose the split themselves
    arguments = {name: value for name, value in arguments.items() if name in known}

    def run() -> Tensor:
        function(**arguments)
        return out

    return run


def _scales(case: Case, inputs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the arguments for the scales of a cache; no scales if the cache has the dtype of the queries."""
    scales = {name: inputs.get(f"{name}_scale") for name in ("k", "v")}
    if case.dtype_of_cache == case.dtype:
        return {"k_descale": None, "v_descale": None}
    modes = importlib.import_module("vllm.v1.kv_cache_interface").KVQuantMode
    if case.scales == "per_token":
        mode = modes.INT8_PER_TOKEN_HEAD if case.dtype_of_cache == torch.int8 else modes.FP8_PER_TOKEN_HEAD
        by_token = {f"{name}_scale_cache": x for name, x in scales.items()}
        return by_token | {"kv_quant_mode": mode, "k_descale": None, "v_descale": None}
    if case.scales not in ("none", "float") or case.dtype_of_cache == torch.int8:
        raise Cannot("fp8 of one scale, or scales by token")
    one = {f"{name}_descale": torch.tensor(1.0 if x is None else x, device=device) for name, x in scales.items()}
    return one | {"kv_quant_mode": modes.FP8_PER_TENSOR}


def _function(of_int4: bool) -> Callable[..., None]:
    """Import unified_attention from where this version has it, or the kernel over int4."""
    if of_int4:
        packed: Callable[..., None] = importlib.import_module(OF_INT4)._launch_packed_attn
        return packed
    try:
        home = importlib.import_module(HOMES[0])
    except ModuleNotFoundError:
        home = importlib.import_module(HOMES[1])
    function: Callable[..., None] = home.unified_attention
    return function
