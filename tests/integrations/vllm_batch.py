"""Batches of vLLM's own classes, caches in its layouts, and what attention over them has to be."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata

import paged_attn
from paged_attn.integrations.vllm.impl import Impl
from paged_attn.integrations.vllm.metadata import Builder, Metadata

HEADS, KV_HEADS, DIM, PAGE, PAGES = 4, 2, 32, 16, 40
# (query tokens, keys with them) of each sequence
DECODE = [(1, 34), (1, 5), (1, 17)]
PREFILL = [(20, 20), (5, 5)]
MIXED = [(20, 37), (1, 34), (1, 1)]
DRAFTS = [(4, 40), (4, 23), (3, 19)]
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def batch(lengths: list[tuple[int, int]], **others: Any) -> CommonAttentionMetadata:
    """Pages in no order, tails of the table far out of range."""
    rng = torch.Generator().manual_seed(1)
    ids = torch.randperm(PAGES, generator=rng)
    width = max(4, *(-(-keys // PAGE) for _, keys in lengths))
    table = torch.full((len(lengths), width), 2**31 - 1, dtype=torch.int32)
    slots, used = [], 0
    for row, (new, keys) in enumerate(lengths):
        own = ids[used : (used := used + -(-keys // PAGE))]
        table[row, : len(own)] = own.int()
        places = torch.arange(keys - new, keys)
        slots.append(own[places // PAGE] * PAGE + places % PAGE)
    starts = torch.tensor([0] + [q for q, _ in lengths]).cumsum(0).int()
    given = dict(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor([k for _, k in lengths], dtype=torch.int32),
        num_reqs=len(lengths),
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(q for q, _ in lengths),
        max_seq_len=max(k for _, k in lengths),
        block_table_tensor=table,
        slot_mapping=torch.cat(slots),
        causal=True,
    )
    return CommonAttentionMetadata(**given | others)


def cache(layout: str = "HND", dtype: torch.dtype = torch.float32, tail: int = 0, dims: int = DIM) -> Tensor:
    """[blocks, kv_heads, block, 2 head_size] of random numbers, as the layout puts them; the second of three layers.

    tail: elements behind keys and behind values.  dims: elements of a head.  uint8: any bytes.
    """
    rng = torch.Generator().manual_seed(2)
    orders = {"HND": (0, 1, 2, 3, 4), "NHD": (0, 1, 3, 2, 4), "layers inside": (1, 2, 0, 3, 4)}  # of L, B, H, N, C
    order = orders[layout]
    shape = (3, PAGES, KV_HEADS, PAGE, 2 * (dims + tail))
    memory = torch.randn([shape[i] for i in order], generator=rng)
    memory = (memory * 64).to(torch.int32).to(dtype) if dtype == torch.uint8 else memory.to(dtype)
    whole = memory.view(torch.uint8) if dtype.itemsize == 1 else memory
    return whole.permute([order.index(i) for i in range(5)])[1]


def implementation(**options: Any) -> Impl:
    given = dict(num_heads=HEADS, head_size=DIM, scale=DIM**-0.5, num_kv_heads=KV_HEADS) | options
    return Impl(**given)


def layer(scale: Any = 1.0) -> Any:
    """The scales of a layer: tensors of no axis, as vLLM's are, or one for each head."""
    return SimpleNamespace(**{f"_{name}_scale": torch.tensor(scale) for name in "qkv"})


def config(mode: Any = None, max_model_len: int = 4096) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=max_model_len),
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
    )


def build(made: CommonAttentionMetadata) -> Metadata:
    return Builder(None, ["layer"], config(), torch.device("cpu")).build(0, made)


def tensors(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(tokens, heads, DIM, generator=rng) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return q.to(dtype), k, v


def attend(impl: Impl, kv: Tensor, lengths: list[tuple[int, int]], pad: int = 3, of: Any = None, update: bool = True,
           out_dtype: torch.dtype = torch.float32, query: torch.dtype = torch.float32, output_scale: Any = None,
           **others: Any) -> tuple[Tensor, dict[str, Any]]:  # fmt: skip
    """The rows of the batch, padding checked, and what the reference has to be told."""
    common = batch(lengths, **others)
    tokens, of = common.num_actual_tokens, of or layer()
    q, k, v = tensors(tokens + pad, query)
    out = torch.full((tokens + pad, HEADS, DIM), 7.0).to(out_dtype)
    made = build(common)
    if update:
        impl.do_kv_cache_update(of, k, v, kv, made.slot_mapping)
    impl.forward(of, q, k, v, kv, made, out, output_scale=output_scale)
    assert not out[tokens:].float().any(), "rows of padding are zeros"
    pages = kv if impl.fp8 is None else kv.view(impl.fp8)
    dims = pages.shape[-1] // 2 - impl.tail
    k_cache, v_cache = (x[..., :dims] for x in pages.chunk(2, -1))
    told = dict(
        q=q[:tokens], k_cache=k_cache, v_cache=v_cache, page_table=common.block_table_tensor,
        seq_lens=common.seq_lens, cu_seqlens_q=common.query_start_loc, kv_layout="HND",
    )  # fmt: skip
    return out[:tokens], told


def wanted(told: dict[str, Any], **options: Any) -> Tensor:
    return paged_attn.reference.paged_attention(**told, **options).float()  # type: ignore[union-attr]


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)
