"""Calls as people get them wrong, of every public function: each message names four things.

These are the argument, what came, what was wanted and what to do.  What is said word for word is for other tests.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import click
import numpy as np
import pytest
import torch
from torch import Tensor

import paged_attn
from paged_attn.cli import main
from paged_attn.integrations import flash_attn
from tests.checks.test_check_write import write_inputs
from tests.support.bad_input import Change, Inputs, call_of, gapped, like, shaped, strided, to, value
from tests.support.cases import E4M3

I32 = torch.int32
TWO, FOUR = torch.tensor([1, 2], dtype=I32), torch.tensor([0, 1, 4, 5], dtype=I32)
TABLE = torch.zeros(2, 3, dtype=I32)
LATENT = torch.zeros(3, 8, 1, 48)
Q = torch.zeros(2, 4, 16)
CACHE = torch.zeros(3, 8, 2, 16)


class Wrong(NamedTuple):
    """A call, and what its message must name."""

    call: Callable[[], object]
    argument: str
    came: str
    wanted: str
    cure: str


def attend(change: Change, call: str = "plain") -> Callable[[], object]:
    def run() -> object:
        inputs = call_of(call, "cpu")
        return paged_attn.paged_attention(**inputs | change(inputs))

    return run


def write(change: Change, dtype: torch.dtype = torch.float16) -> Callable[[], object]:
    def run() -> object:
        inputs = write_inputs("cpu", dtype)
        return paged_attn.write_kv(**inputs | change(inputs))

    return run


def latent_write() -> None:
    """Values that lie in their keys, given once more."""
    paged_attn.write_kv(LATENT[0], LATENT[0, ..., :32], LATENT, LATENT[..., :32], torch.arange(8))


def both_in_one(*shape: int) -> Change:
    """Keys and values as one tensor, given as both caches."""
    return lambda c: dict.fromkeys(("k_cache", "v_cache"), like(c["q"], *shape))


def one_kv_head(c: Inputs) -> Inputs:
    return {name: c[name][:, :, :1] for name in ("k_cache", "v_cache")}


def command(words: str) -> Callable[[], object]:
    return lambda: main(words.split(), standalone_mode=False)


def varlen(**given: Any) -> Callable[[], object]:
    """FlashAttention's function, of two sequences."""
    call = dict(q=Q, k=Q, v=Q, cu_seqlens_q=TWO, cu_seqlens_k=TWO, max_seqlen_q=1, max_seqlen_k=1)
    return lambda: flash_attn.flash_attn_varlen_func(**call | given)


ATTENTION = (
    # dtypes: who decides them
    Wrong(
        attend(to("q", torch.float32)),
        "k_cache", "bfloat16", "float32 | float8_e4m3fn | float8_e5m2 | int8 | uint8, for q is float32",
        "q.to(torch.bfloat16)",
    ),
    Wrong(
        attend(to("v_cache", torch.float32)),
        "v_cache", "float32", "bfloat16, for k_cache is bfloat16", "v_cache.to(torch.bfloat16)",
    ),
    Wrong(
        attend(to("k_new", torch.float32), "new"),
        "k_new", "float32", "float16, for q is float16", "k_new.to(torch.float16)",
    ),
    Wrong(
        attend(to("v_new", torch.bfloat16), "new"),
        "v_new", "bfloat16", "float16, for k_new is float16", "v_new.to(torch.float16)",
    ),
    Wrong(
        attend(to("sinks", torch.float16)),
        "sinks", "float16", "float32 | bfloat16, for q is bfloat16", "sinks.to(torch.float32)",
    ),
    Wrong(
        attend(to("k_cache", torch.float32), "fp8"),
        "k_cache", "float32",
        "float16 | bfloat16 | float8_e4m3fn | float8_e5m2 | int8 | uint8, for q is float8_e4m3fn",
        "k_cache.to(torch.float16)",
    ),
    Wrong(attend(to("k_cache", torch.uint8)), "k_cache", "uint8", "head_dim / 2", "k_cache.view(torch.float8_e4m3fn)"),
    Wrong(write(value(k_scale=None), torch.int8), "k_scale", "k_cache is int8", "is required", "1.0 if"),
    Wrong(
        attend(lambda c: {"k_scale": torch.ones(12, 2, 8)}, "fp8 cache"),
        "k_scale", "[12, 2, 8]", "[pages, page_size, kv_heads] with page_size = 8, kv_heads = 2 from k_cache",
        "k_scale.transpose(1, 2)",
    ),
    Wrong(
        attend(lambda c: {"v_scale": torch.ones(12, 8, 2, 1)}, "fp8 cache"),
        "v_scale", "[12, 8, 2, 1]", "[pages, page_size, kv_heads]", "v_scale.squeeze(3)",
    ),
    Wrong(
        attend(lambda c: {"k_scale": torch.ones(12, 8, 2).bfloat16()}, "fp8 cache"),
        "k_scale", "bfloat16", "float32 | float16", "k_scale.to(torch.float32)",
    ),
    Wrong(
        attend(to("v_cache", torch.int8), "fp8 cache"),
        "v_cache", "int8", "float8_e4m3fn, for k_cache", "v_cache.view(torch.float8_e4m3fn)",
    ),
    Wrong(
        attend(to("v_cache", torch.uint8), "fp8 cache"),
        "v_cache", "uint8", "float8_e4m3fn, for k_cache", "v_cache.view(torch.float8_e4m3fn)",
    ),
    Wrong(attend(to("q", torch.float64)), "q", "float64", "float16 | bfloat16 | float32", "q.to(torch.float16)"),
    Wrong(attend(to("seq_lens", torch.float32)), "seq_lens", "float32", "int32 | int64", "seq_lens.to(torch.int32)"),
    Wrong(attend(lambda c: {"causal": torch.ones(3, dtype=I32)}), "causal", "int32", "bool", "causal.to(torch.bool)"),
    # shapes: where a size is from, and a view that fits
    Wrong(attend(shaped("q", 5, 32, 6)), "k_cache", "[12, 8, 2, 32]", "head_dim = 6 from q", "q.transpose(1, 2)"),
    Wrong(
        attend(shaped("q", 5, 192)),
        "q", "[5, 192]", "[tokens, heads, head_dim]", "q.unflatten(-1, (heads, head_dim))",
    ),
    Wrong(attend(shaped("q", 1, 5, 6, 32)), "q", "[1, 5, 6, 32]", "[tokens, heads, head_dim]", "q.squeeze(0)"),
    Wrong(
        attend(shaped("q", 2, 5, 6, 32)),
        "q", "[2, 5, 6, 32]", "[tokens, heads, head_dim]", "q.flatten(0, 1), with cu_seqlens_q",
    ),
    Wrong(
        attend(both_in_one(2, 12, 8, 2, 32)),
        "k_cache", "[2, 12, 8, 2, 32]", "head_dim = 32 from q", "k_cache, v_cache = cache[0], cache[1]",
    ),
    Wrong(
        attend(both_in_one(12, 2, 8, 2, 32)),
        "k_cache", "[12, 2, 8, 2, 32]", "head_dim = 32 from q", "k_cache, v_cache = cache.unbind(1)",
    ),
    Wrong(
        attend(both_in_one(2, 12, 1, 2, 32)),
        "v_cache", "[2, 12, 1, 2, 32]",
        "[pages, kv_heads, value_dim, page_size]", "k_cache, v_cache = cache[0], cache[1]",
    ),
    Wrong(
        attend(shaped("k_cache", 12, 8, 64)),
        "k_cache", "[12, 8, 64]", "head_dim = 32 from q", "k_cache.unflatten(-1, (kv_heads, 32))",
    ),
    Wrong(
        attend(shaped("v_cache", 12, 8, 64)),
        "v_cache", "[12, 8, 64]", "kv_heads = 2 from k_cache", "v_cache.unflatten(-1, (2, value_dim))",
    ),
    Wrong(
        attend(shaped("k_new", 2, 5, 32), "new"),
        "k_new", "[2, 5, 32]", "tokens = 5 from q, kv_heads = 2 from k_cache", "k_new.transpose(0, 1)",
    ),
    Wrong(attend(shaped("page_table", 21)), "page_table", "[21]", "[seqs, max_pages]", "page_table.unsqueeze(0)"),
    Wrong(attend(shaped("seq_lens", 3, 1)), "seq_lens", "[3, 1]", "seqs = 3 from page_table", "seq_lens.squeeze(1)"),
    Wrong(attend(shaped("seq_lens", 4)), "seq_lens", "[4]", "seqs = 3 from page_table", "seq_lens.diff()"),
    Wrong(
        attend(shaped("cu_seqlens_q", 3)),
        "cu_seqlens_q", "[3]", "seqs + 1 = 4 from page_table", "lengths.cumsum(0)",
    ),
    Wrong(attend(value(cu_seqlens_q=None)), "cu_seqlens_q", "tokens = 5", "tokens = seqs", "pass cu_seqlens_q"),
    Wrong(
        attend(lambda c: {"q": like(c["q"], 6, 3, 32), "cu_seqlens_q": None} | one_kv_head(c)),
        "q", "tokens = 6 and seqs = 3", "tokens = seqs", "q.transpose(0, 1)",
    ),
    Wrong(attend(shaped("sinks", 2)), "sinks", "[2]", "heads = 6 from q", "sinks.repeat_interleave(3)"),
    Wrong(
        attend(lambda c: {"spans": torch.zeros(3, 2, dtype=I32)}),
        "spans", "[3, 2]", "seqs = 3 from page_table", "spans.unsqueeze(1)",
    ),
    Wrong(
        attend(shaped("out", 5, 192)),
        "out", "[5, 192]", "heads = 6 from q, value_dim = 32 from v_cache", "out.unflatten(-1, (6, 32))",
    ),
    # strides: the axis by its name
    Wrong(attend(gapped("q")), "q", "[384, 64, 2]", "contiguous along head_dim", "q.contiguous()"),
    Wrong(attend(gapped("out")), "out", "[384, 64, 2]", "contiguous along value_dim", "torch.empty makes it"),
    Wrong(
        attend(lambda c: {"window_size": strided(torch.zeros(6, 2, dtype=I32))}),
        "window_size", "[4, 2]", "contiguous along its last axis of 2", "window_size.contiguous()",
    ),
    # what is no tensor
    Wrong(
        attend(value(page_table=[[5, 9], [1], [2]])),
        "page_table", "list of (list, list, list)", "a tensor or (indptr, indices)", "pad_batch",
    ),
    Wrong(
        attend(value(page_table=[[5, 9], [1, 2]])),
        "page_table", "list of (list, list)", "a tensor or (indptr, indices), two tensors", "pad_batch",
    ),
    Wrong(
        attend(value(seq_lens=[1, 2, 3])),
        "seq_lens", "list", "a tensor of int32 | int64", "torch.tensor(seq_lens, dtype=torch.int32",
    ),
    Wrong(
        attend(value(seq_lens=np.array([1, 2, 3]))),
        "seq_lens", "ndarray", "a tensor of int32 | int64", "torch.as_tensor(seq_lens",
    ),
    Wrong(
        attend(value(v_cache=None)),
        "v_cache", "None", "bfloat16, for k_cache is bfloat16", "k_cache[..., :value_dim]",
    ),
    # options
    Wrong(
        attend(value(window_size=8)),
        "window_size", "got 8", "(left, right)", "(7, -1) is a sliding window of 8 keys",
    ),
    Wrong(attend(value(window_size=(4, None))), "window_size[1]", "None", "an int >= -1", "-1 = all"),
    Wrong(attend(value(only="decodes")), "only", "'decodes'", "None, 'decode' or 'prefill'", ": 'decode'?"),
    Wrong(attend(value(kv_layout="nhd")), "kv_layout", "'nhd'", "'NHD' or 'HND'", ": 'NHD'?"),
    Wrong(attend(value(max_seqlen_k=64.0)), "max_seqlen_k", "float", "None or an int >= 0", "int(max_seqlen_k)"),
    Wrong(
        attend(value(max_seqlen_q=torch.tensor(3))),
        "max_seqlen_q", "Tensor", "None or an int >= 0", "int(max_seqlen_q), which waits",
    ),
    Wrong(
        attend(value(softmax_scale="0.1")),
        "softmax_scale", "str", "a finite number or None", "float(softmax_scale)",
    ),
    Wrong(attend(value(causal=1)), "causal", "int", "True, False or a bool tensor", "bool(causal)"),
    Wrong(
        attend(value(out=None, out_scale=None), "fp8"),
        "out_scale", "out is float8_e4m3fn", "is required", "or a bfloat16 out",
    ),
    Wrong(attend(value(k_scale=None), "fp8 cache"), "k_scale", "k_cache is float8_e4m3fn", "is required", "1.0 if"),
    Wrong(attend(value(v_new=None), "new"), "v_new", "k_new without v_new", "given together", "pass both, or neither"),
    # keywords
    Wrong(attend(value(custom_mask=1)), "custom_mask", "no argument", "qq_mask", "causal, window_size"),
    Wrong(attend(value(attn_mask=1)), "attn_mask", "no argument", "qq_bias", "causal, window_size"),
    Wrong(attend(value(head_dim_v=512)), "head_dim_v", "no argument", "nothing", "the shapes of the tensors say it"),
    Wrong(attend(value(block_tables=1)), "block_tables", "no argument", "page_table", "a row for each sequence"),
    Wrong(attend(value(sofcap=1.0)), "sofcap", "no argument", "did you mean", "softcap?"),
)  # fmt: skip
OTHERS = (
    # write_kv
    Wrong(
        write(value(v=None)),
        "v_cache", "[3, 8, 2, 32]", "None, or k_cache[..., :value_dim], with v = None", "pass v, too",
    ),
    Wrong(write(shaped("k", 2, 4, 32)), "v", "[4, 2, 32]", "tokens = 2, kv_heads = 4 from k", "v.transpose(0, 1)"),
    Wrong(
        write(lambda c: {name: like(c["k"], 2, 4, 32) for name in "kv"}),
        "k_cache", "[3, 8, 2, 32]", "kv_heads = 4 from k", "k.transpose(0, 1), and v",
    ),
    Wrong(
        write(lambda c: {name: like(c["k"], 4, 64) for name in "kv"}),
        "k", "[4, 64]", "[tokens, kv_heads, head_dim]", "k.unflatten(-1, (kv_heads, head_dim))",
    ),
    Wrong(
        write(to("k_cache", torch.float32)),
        "k_cache", "float32",
        "float16 | float8_e4m3fn | float8_e5m2 | int8 | uint8, for k is float16",
        "k.to(torch.float32), or a cache of float16",
    ),
    Wrong(write(to("v", torch.float32)), "v", "got float32", "float16, for k is float16", "v.to(torch.float16)"),
    Wrong(
        latent_write,
        "v_cache", "k_cache", "share no memory", "pass v = None",
    ),
    Wrong(
        write(value(slot_mapping=[1, 2, 3, 4])),
        "slot_mapping", "list", "a tensor of int32 | int64", "torch.tensor(slot_mapping",
    ),
    Wrong(write(value(k_scale=None), E4M3), "k_scale", "k_cache is float8_e4m3fn", "is required", "1.0 if"),
    Wrong(
        write(lambda c: {"k_scale": torch.ones(3, 2, 8)}, E4M3),
        "k_scale", "[3, 2, 8]", "[pages, page_size, kv_heads] with page_size = 8 from k_cache, kv_heads = 2 from k",
        "k_scale.transpose(1, 2)",
    ),
    # write_qkv
    Wrong(
        lambda: paged_attn.write_qkv((Q, Q[:, :2], Q[:, :2]), CACHE, CACHE.clone(), [1, 2]),  # type: ignore[arg-type]
        "slot_mapping", "list", "a tensor of int32 | int64", "torch.tensor(slot_mapping",
    ),
    # merge_states
    Wrong(
        lambda: paged_attn.merge_states([Q, Q], [Q[..., 0]] * 2),
        "outs", "list", "a tensor of float16 | bfloat16 | float32", "torch.stack(outs)",
    ),
    Wrong(
        lambda: paged_attn.merge_states(Q.expand(3, 2, 4, 16), torch.zeros(3, 4, 2)),
        "lses", "[3, 4, 2]", "tokens = 2, heads = 4 from outs", "lses.transpose(1, 2)",
    ),
    Wrong(
        lambda: paged_attn.merge_states(Q.expand(3, 2, 4, 16), torch.zeros(3, 2, 4).half()),
        "lses", "float16", "float32", "lses.to(torch.float32)",
    ),
    Wrong(
        lambda: paged_attn.merge_states(Q, Q[..., 0]),
        "outs", "[2, 4, 16]", "[n, tokens, heads, head_dim]", "outs.unsqueeze(0), if this is one set of keys",
    ),
    # tree
    Wrong(
        lambda: paged_attn.tree([-1, 0, -1, 0, 1], TWO[:1].expand(3).contiguous(), FOUR),  # type: ignore[arg-type]
        "parents", "list", "a tensor of int32 | int64", "torch.tensor(parents",
    ),
    Wrong(
        lambda: paged_attn.tree(TWO, TWO, TWO),
        "cu_seqlens_q", "[2]", "seqs + 1 = 3 from seq_lens", "lengths.cumsum(0)",
    ),
    Wrong(lambda: paged_attn.tree(TWO, TWO, FOUR[:3], nodes=2000), "nodes", "2000", "at most 1024", "prefills"),
    # pad_batch
    Wrong(
        lambda: paged_attn.pad_batch([1, 2], TWO),  # type: ignore[list-item]
        "page_table", "list of (int, int)", "a list of lists of ints", "one list for each sequence",
    ),
    Wrong(
        lambda: paged_attn.pad_batch([[2**40]], [3]),
        "page_table", str(2**40), "ints of 32 bits", "a tensor may be int64",
    ),
    Wrong(
        lambda: paged_attn.pad_batch([[1]], [-(2**31) - 1]),
        "seq_lens", str(-(2**31) - 1), "ints of 32 bits", "a tensor may be int64",
    ),
    Wrong(
        lambda: paged_attn.pad_batch([[1.5]], [3]),  # type: ignore[list-item]
        "page_table", "float32", "ints of 32 bits", "int(x)",
    ),
    Wrong(
        lambda: paged_attn.pad_batch([["a"]], [3]),  # type: ignore[list-item]
        "page_table", "str", "ints of 32 bits", "torch says",
    ),
    Wrong(
        lambda: paged_attn.pad_batch(TABLE, TWO, out=TABLE),  # type: ignore[arg-type]
        "out", "Tensor", "(page_table, seq_lens, cu_seqlens_q)", "an earlier pad_batch",
    ),
    Wrong(
        lambda: paged_attn.pad_batch(TABLE, TWO, TWO),
        "cu_seqlens_q", "[2]", "seqs + 1 = 3 from page_table", "lengths.cumsum(0)",
    ),
    Wrong(
        lambda: paged_attn.pad_batch(TABLE, TWO, out=(TABLE, [0, 0], None)),  # type: ignore[arg-type]
        "out[1]", "list", "a tensor of int32 | int64", "an earlier pad_batch",
    ),
    Wrong(
        lambda: paged_attn.pad_batch(TABLE, TWO, out=(TABLE.float(), TWO, None)),
        "out[0]", "float32", "int32 | int64", "an earlier pad_batch",
    ),
    # positions, slots, pages_needed
    Wrong(
        lambda: paged_attn.positions(TWO, FOUR[:3]),
        "tokens", "cu_seqlens_q without tokens", "given together", "pass both",
    ),
    Wrong(
        lambda: paged_attn.positions(FOUR.float()),
        "seq_lens", "float32", "int32 | int64", "seq_lens.to(torch.int32)",
    ),
    Wrong(
        lambda: paged_attn.positions(TWO, FOUR[:3], tokens=5.0),  # type: ignore[arg-type]
        "tokens", "float", "an int >= 0", "int(tokens)",
    ),
    Wrong(
        lambda: paged_attn.slots([[1], [2]], TWO, 16),  # type: ignore[arg-type]
        "page_table", "list", "a tensor of int32 | int64", "pad_batch",
    ),
    Wrong(
        lambda: paged_attn.slots(TABLE[0], TWO, 16),
        "page_table", "[3]", "[seqs, max_pages]", "page_table.unsqueeze(0)",
    ),
    Wrong(
        lambda: paged_attn.pages_needed(12.5, 16),  # type: ignore[type-var]
        "lengths", "float", "an int or a tensor of integers", "int(lengths)",
    ),
    Wrong(
        lambda: paged_attn.pages_needed([3, 4], 16),  # type: ignore[type-var]
        "lengths", "list", "an int or a tensor of integers", "torch.as_tensor(lengths)",
    ),
    Wrong(
        lambda: paged_attn.pages_needed(TWO.float(), 16),
        "lengths", "float32", "an int or a tensor of integers", "lengths.long()",
    ),
    # copy_pages, move_pages, gather_pages
    Wrong(
        lambda: paged_attn.copy_pages((x for x in CACHE), TWO, TWO),  # type: ignore[arg-type]
        "caches", "generator", "a tensor or a list of tensors", "list(caches)",
    ),
    Wrong(
        lambda: paged_attn.copy_pages(CACHE, TWO, TWO.float()),
        "dst", "float32", "int32 | int64", "dst.to(torch.int32)",
    ),
    Wrong(
        lambda: paged_attn.copy_pages([CACHE, Q], TWO, TWO),
        "caches[1]", "[2, 4, 16]", "pages = 3 along axis 0, like caches[0]", "page_axis says",
    ),
    Wrong(
        lambda: paged_attn.move_pages(CACHE, CACHE.half(), TWO, TWO),
        "targets", "float16", "float32 like sources", "targets.view(torch.float32)",
    ),
    Wrong(
        lambda: paged_attn.move_pages(CACHE, CACHE[1:], TWO, TWO),
        "targets", "memory", "share no", "copy_pages",
    ),
    Wrong(
        lambda: paged_attn.gather_pages(CACHE[0], TABLE, TWO),
        "cache", "[8, 2, 16]", "[pages, page_size, kv_heads, head_dim]", "cache.unsqueeze(2)",
    ),
    Wrong(
        lambda: paged_attn.gather_pages(CACHE, TABLE, TWO.to("meta")),
        "tokens", "None", "an int >= 0", "because lengths are on the device",
    ),
    # prepare
    Wrong(
        lambda: paged_attn.prepare(heads=8, kv_heads=2, head_dim=64, head_dim_v=64),  # type: ignore[arg-type]
        "head_dim_v", "no argument", "here:", "value_dim",
    ),
    Wrong(
        lambda: paged_attn.prepare(heads=8, kv_heads=2, head_dim=64, block_size=16),  # type: ignore[arg-type]
        "block_size", "no argument", "here:", "page_size",
    ),
    Wrong(
        lambda: paged_attn.prepare(heads=8, kv_heads=2, head_dim=64, dtype="bfloat16"),  # type: ignore[arg-type]
        "dtype", "str", "a torch.dtype", "torch.bfloat16",
    ),
    Wrong(
        lambda: paged_attn.prepare(heads=9, kv_heads=2, head_dim=64),
        "heads", "got 9", "a multiple of kv_heads = 2", "both of one device",
    ),
    Wrong(
        lambda: paged_attn.prepare(heads=8, kv_heads=2, head_dim=64, kv_layout="nhd"),
        "kv_layout", "got 'nhd'", "'NHD', 'HND' or 'x'", ": 'NHD'?",
    ),
    Wrong(
        lambda: paged_attn.prepare(heads=8, kv_heads=2, head_dim=64, window_size=8),  # type: ignore[arg-type]
        "window_size", "got 8", "(left, right)", "(7, -1) is a sliding window of 8 keys",
    ),
    Wrong(
        lambda: paged_attn.prepare(heads=8, kv_heads=2, head_dim=64.0),  # type: ignore[arg-type]
        "head_dim", "float", "an int >= 1", "int(head_dim)",
    ),
    # FlashAttention's functions
    Wrong(
        lambda: flash_attn.flash_attn_func(Q, Q, Q),
        "q", "[2, 4, 16]", "[batch, len_q, heads, head_dim]", "q.unsqueeze(0)",
    ),
    Wrong(
        lambda: flash_attn.flash_attn_func(Q[None], Q[None], Q[None], window_size=8),
        "window_size", "got 8", "(left, right)", "(7, -1) is a sliding window of 8 keys",
    ),
    Wrong(varlen(attn_mask=1), "attn_mask", "unknown keyword", "here:", "causal and window_size"),
    Wrong(varlen(custom_mask=1), "custom_mask", "unknown keyword", "here:", "causal and window_size"),
    Wrong(varlen(head_dim_v=1), "head_dim_v", "unknown keyword", "here:", "the last axis of v says it"),
    Wrong(varlen(dropout_p=0.1), "dropout_p", "0.1", "must be 0", "left out"),
    Wrong(varlen(q=Q.half()), "k", "float32", "for q is float16", "q.to(torch.float32)"),
    # the command
    Wrong(command("explain --window 4096"), "--window", "got 4096", "LEFT RIGHT, two numbers", "--window 4095 -1"),
    Wrong(
        command("explain --window 4096 --heads 8"),
        "--window", "got 4096", "LEFT RIGHT, two numbers", "--window 4095 -1",
    ),
    Wrong(command("explain --keys many"), "keys", "'many'", "lengths", "like 4096 or 1x2048,63x1"),
    Wrong(
        command("explain --queries 5 --keys 4"),
        "keys", "4 keys of 5 queries", "at least queries", "keys in the cache plus queries",
    ),
    Wrong(
        command("explain --kv-dtype float32"),
        "kv_dtype", "got float32", "bfloat16 | float8_e4m3fn", "for dtype is bfloat16",
    ),
)  # fmt: skip
TABLE_OF_WRONG = (*ATTENTION, *OTHERS)


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("wrong", TABLE_OF_WRONG, ids=[f"{x.argument}: {x.came}" for x in TABLE_OF_WRONG])
def test_a_message_names_the_argument_what_came_what_was_wanted_and_a_cure(wrong: Wrong) -> None:
    with pytest.raises((TypeError, ValueError, click.UsageError)) as raised:
        wrong.call()
    left = str(raised.value)
    for words in sorted(wrong[1:], key=len, reverse=True):  # each in a place of its own
        assert words, "says nothing"
        assert words in left, f"{words!r} is not in {raised.value}"
        left = left.replace(words, "\n", 1)


def test_the_table_has_sixty_calls_and_every_public_function() -> None:
    source = inspect.getsource(sys.modules[__name__])
    assert len(TABLE_OF_WRONG) >= 60
    assert [name for name in paged_attn.__all__ if f"paged_attn.{name}(" not in source] == ["distributed", "reference"]


@pytest.mark.parametrize(
    "options",
    [
        dict(max_seqlen_k=np.int64(40), window_size=(np.int32(5), np.int64(-1)), chunk=np.int16(100)),
        dict(softcap=np.float32(30), softmax_scale=np.float64(0.25), causal=np.bool_(True)),
        dict(return_lse=np.bool_(False), batch_invariant=np.True_, check=np.bool_(True)),
    ],
)
def test_scalars_of_numpy_are_numbers(options: dict[str, Any]) -> None:
    inputs = call_of("plain", "cpu") | dict(out=None, return_lse=False)
    plain = {name: v.item() for name, v in options.items() if isinstance(v, np.generic)}
    plain |= {"window_size": (5, -1)} if "window_size" in options else {}
    wanted = paged_attn.paged_attention(**inputs | plain)
    for _ in range(2):  # the second time it may be a kept call
        got = paged_attn.paged_attention(**inputs | options)
        assert isinstance(got, Tensor)
        assert torch.equal(got, wanted)


def test_scalars_of_numpy_are_numbers_of_the_other_functions_too() -> None:
    inputs = call_of("fp8 cache", "cpu")
    scales = {name: np.float32(0.5) for name in ("k_scale", "v_scale")}
    assert paged_attn.paged_attention(**inputs | scales) is not None
    written = write_inputs("cpu", E4M3)
    paged_attn.write_kv(**written | scales)
    assert paged_attn.pages_needed(np.int64(17), np.int64(16)) == 2
    assert type(paged_attn.pages_needed(np.int64(17), 16)) is int
    places = paged_attn.positions(TWO + 2, FOUR[:3], tokens=np.int64(4))
    assert paged_attn.slots(TABLE, places, np.int32(16), FOUR[:3]).dtype == torch.int64
    assert paged_attn.tree(TWO - 2, TWO, FOUR[:3] * 0, nodes=np.int64(8)).qq_mask.shape == (2, 1)
    padded = paged_attn.pad_batch([[1], [2]], [1, 2], seqs=np.int64(4), max_pages=np.int64(3))
    assert isinstance(padded[0], Tensor)
    assert padded[0].shape == (4, 3)
