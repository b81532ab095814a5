"""cuDNN's paged attention through its graph API (nvidia-cudnn-frontend).

cuDNN documents contiguous pages [pages, kv_heads, page_size, head_dim]; an NHD cache is copied into this form before
the timing.  Ragged queries are packed, and ragged offsets, in elements, tell where each sequence starts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.cannot import allow
from tests.support.cases import Case


def call(case: Case, inputs: dict[str, Any]) -> Callable[[], Tensor]:
    import cudnn

    allow(case, "window", "sinks")
    device, seqs, longest = inputs["q"].device, len(case.seq_lens), max(case.query_lens)
    columns = -(-max(case.seq_lens) // case.page_size)
    q, out = inputs["q"].contiguous(), torch.empty_like(inputs["q"])
    k, v = (inputs[name] if case.layout == "HND" else _hnd(inputs[name]) for name in ("k_cache", "v_cache"))
    table = inputs["page_table"][:, :columns].contiguous().view(seqs, 1, columns, 1)
    query_lens = torch.tensor(case.query_lens, dtype=torch.int32, device=device).view(seqs, 1, 1, 1)
    seq_lens = inputs["seq_lens"].view(seqs, 1, 1, 1)
    row = case.heads * case.head_dim
    starts = torch.tensor((0, *case.query_lens)).cumsum(0).mul(row).to(device, torch.int32).view(-1, 1, 1, 1)

    types = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}
    dtype, single = types[case.dtype], cudnn.data_type.FLOAT
    graph = cudnn.pygraph(
        io_data_type=dtype, intermediate_data_type=single, compute_data_type=single, handle=_handle(device.index)
    )
    shape = (seqs, case.heads, longest, case.head_dim)
    strides = (longest * row, case.head_dim, row, 1)
    tensors = {name: graph.tensor_like(x) for name, x in (("k", k), ("v", v))}
    tensors["q"] = graph.tensor(name="q", dim=shape, stride=strides, data_type=dtype)
    memory = {tensors["q"]: q, tensors["k"]: k, tensors["v"]: v}
    for name, x in (("k_table", table), ("v_table", table), ("query_lens", query_lens), ("seq_lens", seq_lens)):
        tensors[name] = graph.tensor_like(x)
        memory[tensors[name]] = x
    offsets = None
    if len(set(case.query_lens)) > 1:
        offsets = graph.tensor_like(starts)
        memory[offsets] = starts
        tensors["q"].set_ragged_offset(offsets)

    options: dict[str, Any] = {}
    if longest > 1 or case.window_size[0] >= 0:  # a single query sees everything without a mask
        options.update(diagonal_alignment=cudnn.diagonal_alignment.BOTTOM_RIGHT, diagonal_band_right_bound=0)
    if case.window_size[0] >= 0:
        options["diagonal_band_left_bound"] = case.window_size[0] + 1  # cuDNN counts the query's own position
    if case.sinks:
        sinks = inputs["sinks"].float().view(1, case.heads, 1, 1)
        options["sink_token"] = graph.tensor_like(sinks)
        memory[options["sink_token"]] = sinks
    result, _ = graph.sdpa(
        name="sdpa",
        q=tensors["q"],
        k=tensors["k"],
        v=tensors["v"],
        generate_stats=False,
        attn_scale=case.softmax_scale or case.head_dim**-0.5,
        use_padding_mask=True,
        seq_len_q=tensors["query_lens"],
        seq_len_kv=tensors["seq_lens"],
        paged_attention_k_table=tensors["k_table"],
        paged_attention_v_table=tensors["v_table"],
        paged_attention_max_seq_len_kv=columns * case.page_size,
        **options,
    )
    result.set_output(True).set_dim(shape).set_stride(strides).set_data_type(dtype)
    if offsets is not None:
        result.set_ragged_offset(offsets)
    memory[result] = out

    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=device)

    def run() -> Tensor:
        handle = _handle(device.index)
        cudnn.set_stream(handle, torch.cuda.current_stream(device).cuda_stream)  # a graph capture has its own stream
        graph.execute(memory, workspace, handle=handle)
        return out

    return run


@functools.cache
def _handle(device: int) -> Any:
    import cudnn

    return cudnn.create_handle()


def _hnd(cache: Tensor) -> Tensor:
    """Copy an NHD cache into contiguous [pages, kv_heads, page_size, head_dim]."""
    return cache.transpose(1, 2).contiguous()
