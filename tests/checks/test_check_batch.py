"""What paged_attention says of queries, caches, tables and lengths that do not fit, word for word."""

from __future__ import annotations

import pytest
import torch

import paged_attn
from tests.support.bad_input import (
    HND,
    NHD,
    NHD_VALUES,
    PACKED_K,
    PACKED_V,
    QUERY,
    Change,
    call_of,
    gapped,
    like,
    refuses,
    shaped,
    tensor,
    to,
    value,
)
from tests.support.cases import E5M2


def pair(
    indptr: tuple[int, ...], of: torch.dtype = torch.int32, shape: tuple[int, ...] = (21,),
    dtype: torch.dtype = torch.int64,
) -> Change:  # fmt: skip
    """A ragged page table of these sizes and types."""
    return lambda c: {"page_table": (like(c["q"], *indptr, dtype=of), like(c["q"], *shape, dtype=dtype))}


# (call, change, error, text)
BATCH: list[tuple[str, Change, type[Exception], str]] = [
    # q
    ("plain", value(q=None), TypeError, f"q must be a tensor of {QUERY}, got None"),
    (
        "plain",
        value(q=[1.0]),
        TypeError,
        f"q must be a tensor of {QUERY}, got list: torch.tensor(q, dtype=torch.float16, device=...)",
    ),
    ("plain", to("q", torch.int32), TypeError, f"q must be {QUERY}, got int32: q.to(torch.float16)"),
    ("plain", to("q", torch.float64), TypeError, f"q must be {QUERY}, got float64: q.to(torch.float16)"),
    (
        "plain",
        shaped("q", 5, 192),
        ValueError,
        "q must be [tokens, heads, head_dim], got [5, 192]: q.unflatten(-1, (heads, head_dim))",
    ),
    ("plain", gapped("q"), ValueError, "q must be contiguous along head_dim, got strides [384, 64, 2]: q.contiguous()"),
    (
        "plain",
        shaped("q", 5, 7, 32),
        ValueError,
        f"q must have heads a positive multiple of kv_heads = 2, got heads = 7: k_cache was read as NHD: {NHD} = "
        "[12, 8, 2, 32]",
    ),
    (
        "plain",
        shaped("q", 5, 0, 32),
        ValueError,
        f"q must have heads a positive multiple of kv_heads = 2, got heads = 0: k_cache was read as NHD: {NHD} = "
        "[12, 8, 2, 32]",
    ),
    (
        "plain",
        lambda c: {"q": c["q"].detach().requires_grad_()},
        ValueError,
        "q requires grad, but paged attention has no backward pass: call it under torch.no_grad()",
    ),
    (
        "plain",
        lambda c: {
            "q": like(c["q"], 5, 6, 577),
            "k_cache": like(c["q"], 12, 8, 2, 577),
            "v_cache": like(c["q"], 12, 8, 2, 577),
        },
        ValueError,
        "head_dim must be between 1 and 512, got 577",
    ),
    ("plain", shaped("v_cache", 12, 8, 2, 513), ValueError, "value_dim must be between 1 and 512, got 513"),
    ("plain", shaped("v_cache", 12, 8, 2, 0), ValueError, "value_dim must be between 1 and 512, got 0"),
    (
        "plain",
        lambda c: {name: like(c[name], *c[name].shape[:-1], 0) for name in ("q", "k_cache", "v_cache")},
        ValueError,
        "head_dim must be between 1 and 512, got 0",
    ),
    # k_cache, v_cache
    (
        "plain",
        value(k_cache=None),
        TypeError,
        "k_cache must be a tensor of bfloat16 | float8_e4m3fn | float8_e5m2 | int8 | uint8, for q is bfloat16, "
        "got None",
    ),
    (
        "plain",
        to("k_cache", torch.float16),
        TypeError,
        "k_cache must be bfloat16 | float8_e4m3fn | float8_e5m2 | int8 | uint8, for q is bfloat16, "
        "got float16: q.to(torch.float16), or a cache of bfloat16",
    ),
    (
        "plain",
        to("k_cache", torch.float32),
        TypeError,
        "k_cache must be bfloat16 | float8_e4m3fn | float8_e5m2 | int8 | uint8, for q is bfloat16, "
        "got float32: q.to(torch.float32), or a cache of bfloat16",
    ),
    (
        "fp8",
        to("k_cache", torch.float32),
        TypeError,
        "k_cache must be float16 | bfloat16 | float8_e4m3fn | float8_e5m2 | int8 | uint8, for q is float8_e4m3fn, "
        "got float32: k_cache.to(torch.float16)",
    ),
    (
        "plain",
        shaped("k_cache", 12, 8, 2),
        ValueError,
        f"k_cache must be {NHD} with head_dim = 32 from q, got [12, 8, 2]",
    ),
    (
        "plain",
        shaped("k_cache", 12, 8, 2, 64),
        ValueError,
        f"k_cache must be {NHD} with head_dim = 32 from q, got [12, 8, 2, 64]",
    ),
    (
        "hnd",
        shaped("k_cache", 12, 2, 8, 64),
        ValueError,
        f"k_cache must be {HND} with head_dim = 32 from q, got [12, 2, 8, 64]",
    ),
    (
        "plain",
        gapped("k_cache"),
        ValueError,
        "k_cache must be contiguous along head_dim, got strides [1024, 128, 64, 2]: k_cache.contiguous()",
    ),
    (
        "plain",
        value(v_cache=None),
        TypeError,
        "v_cache must be a tensor of bfloat16, for k_cache is bfloat16, "
        "got None: k_cache[..., :value_dim] where keys hold their values",
    ),
    (
        "plain",
        to("v_cache", torch.float16),
        TypeError,
        "v_cache must be bfloat16, for k_cache is bfloat16, got float16: v_cache.to(torch.bfloat16)",
    ),
    (
        "fp8 cache",
        to("v_cache", E5M2),
        TypeError,
        "v_cache must be float8_e4m3fn, for k_cache is float8_e4m3fn, got float8_e5m2: v_cache.to(torch.float8_e4m3fn)",
    ),
    (
        "plain",
        shaped("v_cache", 12, 8, 3, 32),
        ValueError,
        f"v_cache must be {NHD_VALUES} with kv_heads = 2 from k_cache, got [12, 8, 3, 32]",
    ),
    (
        "plain",
        shaped("v_cache", 8, 4, 2, 32),
        ValueError,
        f"v_cache must be {NHD_VALUES} with pages = 12, page_size = 8 from k_cache, got [8, 4, 2, 32]",
    ),
    (
        "plain",
        gapped("v_cache"),
        ValueError,
        "v_cache must be contiguous along value_dim, got strides [1024, 128, 64, 2]: v_cache.contiguous()",
    ),
    (
        "packed",
        shaped("k_cache", 12, 2, 3, 8, 8),
        ValueError,
        f"k_cache must be {PACKED_K} with head_dim = 32 from q, got [12, 2, 3, 8, 8]",
    ),
    (
        "packed",
        gapped("k_cache"),
        ValueError,
        "k_cache must be contiguous along x, got strides [1024, 512, 128, 16, 2]: k_cache.contiguous()",
    ),
    (
        "packed",
        shaped("v_cache", 12, 2, 32, 4),
        ValueError,
        f"v_cache must be {PACKED_V} with page_size = 8 from k_cache, got [12, 2, 32, 4]",
    ),
    (
        "packed",
        gapped("v_cache"),
        ValueError,
        "v_cache must be contiguous along page_size, got strides [1024, 512, 16, 2]: v_cache.contiguous()",
    ),
    (
        "plain",
        lambda c: {"k_cache": like(c["q"], 12, 0, 2, 32), "v_cache": like(c["q"], 12, 0, 2, 32)},
        ValueError,
        "k_cache must have page_size >= 1, got [12, 0, 2, 32]",
    ),
    (
        "plain",
        lambda c: {"k_cache": like(c["q"], 12, 8, 0, 32), "v_cache": like(c["q"], 12, 8, 0, 32)},
        ValueError,
        "k_cache must have kv_heads >= 1, got [12, 8, 0, 32]",
    ),
    # kv_layout
    ("plain", value(kv_layout="NDH"), ValueError, "kv_layout must be 'NHD' or 'HND', got 'NDH': 'NHD'?"),
    ("plain", value(kv_layout=None), TypeError, "kv_layout must be 'NHD' or 'HND', got None"),
    # page_table
    ("plain", value(page_table=None), TypeError, "page_table must be a tensor of int32 | int64, got None"),
    (
        "plain",
        to("page_table", torch.int16),
        TypeError,
        "page_table must be int32 | int64, got int16: page_table.to(torch.int32)",
    ),
    (
        "plain",
        shaped("page_table", 21),
        ValueError,
        "page_table must be [seqs, max_pages], got [21]: page_table.unsqueeze(0)",
    ),
    (
        "plain",
        gapped("page_table"),
        ValueError,
        "page_table must be contiguous along max_pages, got strides [14, 2]: page_table.contiguous()",
    ),
    (
        "plain",
        value(page_table=[[5, 9], [1], [2]]),
        TypeError,
        "page_table must be a tensor or (indptr, indices), two tensors, "
        "got list of (list, list, list): pad_batch makes a tensor of rows",
    ),
    (
        "plain",
        lambda c: {"page_table": (None, c["page_table"])},
        TypeError,
        "page_table must be a tensor or (indptr, indices), two tensors, got tuple of (None, Tensor)",
    ),
    (
        "plain",
        pair((4,), torch.float32),
        TypeError,
        "indptr of page_table must be int32 | int64, got float32: indptr.to(torch.int32)",
    ),
    (
        "plain",
        pair((3,)),
        ValueError,
        "indptr of page_table must be [seqs + 1] with seqs + 1 = 4 from seq_lens, got [3]",
    ),
    (
        "plain",
        pair((4, 1)),
        ValueError,
        "indptr of page_table must be [seqs + 1] with seqs + 1 = 4 from seq_lens, got [4, 1]: indptr.squeeze(1)",
    ),
    ("plain", pair((4,), shape=(3, 7)), ValueError, "indices of page_table must be [all pages], got [3, 7]"),
    (
        "plain",
        pair((4,), dtype=torch.int16),
        TypeError,
        "indices of page_table must be int32 | int64, got int16: indices.to(torch.int32)",
    ),
    (
        "plain",
        lambda c: {"page_table": (c["seq_lens"].new_zeros(4), [1, 2])},
        TypeError,
        "indices of page_table must be a tensor of int32 | int64, "
        "got list: torch.tensor(indices, dtype=torch.int32, device=...)",
    ),
    # seq_lens
    (
        "plain",
        value(seq_lens=[1, 2, 3]),
        TypeError,
        "seq_lens must be a tensor of int32 | int64, got list: torch.tensor(seq_lens, dtype=torch.int32, device=...)",
    ),
    (
        "plain",
        to("seq_lens", torch.uint32),
        TypeError,
        "seq_lens must be int32 | int64, got uint32: seq_lens.to(torch.int32)",
    ),
    (
        "plain",
        shaped("seq_lens", 4),
        ValueError,
        "seq_lens must be [seqs] with seqs = 3 from page_table, got [4]: seq_lens.diff(), if these are sums of lengths",
    ),
    (
        "plain",
        shaped("seq_lens", 3, 1),
        ValueError,
        "seq_lens must be [seqs] with seqs = 3 from page_table, got [3, 1]: seq_lens.squeeze(1)",
    ),
    (
        "plain",
        gapped("seq_lens"),
        ValueError,
        "seq_lens must be contiguous along seqs, got strides [2]: seq_lens.contiguous()",
    ),
    # cu_seqlens_q
    (
        "plain",
        value(cu_seqlens_q=[0, 1]),
        TypeError,
        "cu_seqlens_q must be a tensor of int32 | int64, "
        "got list: torch.tensor(cu_seqlens_q, dtype=torch.int32, device=...)",
    ),
    (
        "plain",
        to("cu_seqlens_q", torch.float32),
        TypeError,
        "cu_seqlens_q must be int32 | int64, got float32: cu_seqlens_q.to(torch.int32)",
    ),
    (
        "plain",
        shaped("cu_seqlens_q", 3),
        ValueError,
        "cu_seqlens_q must be [seqs + 1] with seqs + 1 = 4 from page_table, "
        "got [3]: torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), if these are lengths",
    ),
    (
        "plain",
        gapped("cu_seqlens_q"),
        ValueError,
        "cu_seqlens_q must be contiguous along seqs + 1, got strides [2]: cu_seqlens_q.contiguous()",
    ),
    (
        "plain",
        value(cu_seqlens_q=None),
        ValueError,
        "cu_seqlens_q = None needs tokens = seqs, "
        "got q with tokens = 5 and seqs = 3: pass cu_seqlens_q, where each sequence's queries begin",
    ),
    # max_seqlen_q, max_seqlen_k
    ("plain", value(max_seqlen_q=-1), ValueError, "max_seqlen_q must be None or an int >= 0 and < 2^31, got -1"),
    (
        "plain",
        value(max_seqlen_q=2.0),
        TypeError,
        "max_seqlen_q must be None or an int >= 0, got float: int(max_seqlen_q)",
    ),
    ("plain", value(max_seqlen_q=True), TypeError, "max_seqlen_q must be None or an int >= 0, got bool"),
    (
        "plain",
        tensor("max_seqlen_q", ()),
        TypeError,
        "max_seqlen_q must be None or an int >= 0, got Tensor: int(max_seqlen_q), which waits for its device",
    ),
    ("plain", value(max_seqlen_k=-1), ValueError, "max_seqlen_k must be None or an int >= 0 and < 2^31, got -1"),
    (
        "plain",
        value(max_seqlen_k=2**31),
        ValueError,
        "max_seqlen_k must be None or an int >= 0 and < 2^31, got 2147483648",
    ),
    (
        "plain",
        tensor("max_seqlen_k", ()),
        TypeError,
        "max_seqlen_k must be None or an int >= 0, got Tensor: int(max_seqlen_k), which waits for its device",
    ),
    # k_new, v_new
    (
        "new",
        value(v_new=None),
        ValueError,
        "k_new and v_new must be given together, got k_new without v_new: pass both, or neither",
    ),
    (
        "new",
        value(k_new=None),
        ValueError,
        "k_new and v_new must be given together, got v_new without k_new: pass both, or neither",
    ),
    (
        "latent",
        lambda c: {"v_new": c["k_new"][..., :512]},
        ValueError,
        "v_new must be None with head_dim = 576: values lie in k_new",
    ),
    (
        "latent",
        lambda c: {"v_cache": c["v_cache"].clone(), "v_new": c["k_new"][..., :512]},
        ValueError,
        "head_dim must be between 1 and 512, or 576 where v_cache is k_cache[..., :value_dim], got 576",
    ),
    (
        "latent",
        lambda c: {"v_cache": c["k_cache"][..., 64:], "v_new": None},
        ValueError,
        "head_dim must be between 1 and 512, or 576 where v_cache is k_cache[..., :value_dim], got 576",
    ),
    (
        "new",
        to("k_new", torch.float32),
        TypeError,
        "k_new must be float16, for q is float16, got float32: k_new.to(torch.float16)",
    ),
    (
        "new",
        to("v_new", torch.bfloat16),
        TypeError,
        "v_new must be float16, for k_new is float16, got bfloat16: v_new.to(torch.float16)",
    ),
    (
        "fp8 new",
        to("k_new", torch.float32),
        TypeError,
        "k_new must be float16 | bfloat16, for k_cache is float8_e4m3fn, got float32: k_new.to(torch.float16)",
    ),
    (
        "fp8 new",
        to("v_new", torch.float16),
        TypeError,
        "v_new must be bfloat16, for k_new is bfloat16, got float16: v_new.to(torch.bfloat16)",
    ),
    (
        "fp8 new",
        lambda c: {
            "k_cache": c["k_cache"].half(),
            "v_cache": c["v_cache"].half(),
            "k_scale": None,
            "v_scale": None,
        },
        TypeError,
        "k_new must be float16, for k_cache is float16, got bfloat16: k_new.to(torch.float16)",
    ),
    (
        "new",
        shaped("k_new", 4, 2, 32),
        ValueError,
        "k_new must be [tokens, kv_heads, head_dim] with tokens = 5 from q, got [4, 2, 32]",
    ),
    (
        "new",
        shaped("v_new", 5, 6, 32),
        ValueError,
        "v_new must be [tokens, kv_heads, value_dim] with kv_heads = 2 from k_cache, got [5, 6, 32]",
    ),
    (
        "new",
        shaped("v_new", 5, 2, 64),
        ValueError,
        "v_new must be [tokens, kv_heads, value_dim] with value_dim = 32 from v_cache, got [5, 2, 64]",
    ),
    (
        "new",
        gapped("k_new"),
        ValueError,
        "k_new must be contiguous along head_dim, got strides [128, 64, 2]: k_new.contiguous()",
    ),
    (
        "new",
        gapped("v_new"),
        ValueError,
        "v_new must be contiguous along value_dim, got strides [128, 64, 2]: v_new.contiguous()",
    ),
]


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("call, change, error, text", BATCH, ids=[text for *_, text in BATCH])
def test_attention_refuses(call: str, change: Change, error: type[Exception], text: str, device: str) -> None:
    inputs = call_of(call, device)
    refuses(paged_attn.paged_attention, inputs | change(inputs), error, text)
