"""What is measured, as data: suites of cases, each with the traffic and the arithmetic it must do."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.cases import Case

SIZES = dict(heads=32, kv_heads=8, head_dim=128, page_size=16, dtype=torch.bfloat16, bounds=True)


def uniform(name: str, seqs: int, query_len: int, seq_len: int, **changes: object) -> Case:
    """Sequences of one shape; query_len 1 is decode."""
    fields = SIZES | dict(decode_form=query_len == 1) | changes
    return Case(name, (query_len,) * seqs, (seq_len,) * seqs, **fields)  # type: ignore[arg-type]


def log_uniform(low: int, high: int, n: int) -> tuple[int, ...]:
    """n lengths evenly spread on a logarithmic scale, shuffled the same way every time."""
    lengths = [round(low * (high / low) ** (i / (n - 1))) for i in range(n)]
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0)).tolist()
    return tuple(lengths[i] for i in order)


DECODE = (
    uniform("decode b1 x 512", 1, 1, 512),
    uniform("decode b1 x 8192", 1, 1, 8192),
    uniform("decode b1 x 131072", 1, 1, 131072),
    uniform("decode b4 x 2048", 4, 1, 2048),
    uniform("decode b8 x 4096", 8, 1, 4096),
    uniform("decode b32 x 1024", 32, 1, 1024),
    uniform("decode b64 x 4096", 64, 1, 4096),
    uniform("decode b256 x 4096", 256, 1, 4096),
    uniform("decode b64 x 8192, heads 64/8", 64, 1, 8192, heads=64),
    uniform("decode b256 x 1024, heads 32/32", 256, 1, 1024, kv_heads=32),
    Case("decode b64, 256..32768", (1,) * 64, log_uniform(256, 32768, 64), **SIZES, decode_form=True),  # type: ignore
    Case("decode 1 x 131072 + 63 x 512", (1,) * 64, (131072,) + (512,) * 63, **SIZES, decode_form=True),  # type: ignore
)
FEATURES = (
    uniform(
        "decode b64 x 4096, window 4095, sinks, softcap", 64, 1, 4096, window_size=(4095, -1), sinks=True, softcap=30.0
    ),
    uniform("decode b64 x 4096, window 1023", 64, 1, 4096, window_size=(1023, -1)),
    uniform("decode b64 x 4096, alibi", 64, 1, 4096, alibi=True),
    uniform("decode b64 x 4096, e4m3 cache", 64, 1, 4096, cache_dtype=torch.float8_e4m3fn),
    uniform("decode b64 x 4096, page 128", 64, 1, 4096, page_size=128),
    uniform("decode b64 x 4096, page 544", 64, 1, 4096, page_size=544),
    uniform("decode b64 x 4096, x-packed", 64, 1, 4096, layout="x"),
    uniform("decode b64 x 4096, hnd", 64, 1, 4096, layout="HND"),
    uniform("prefill b4 x 4096, window 1023, sinks", 4, 4096, 4096, window_size=(1023, -1), sinks=True),
    uniform("prefill b4 x 4096, softcap", 4, 4096, 4096, softcap=30.0),
    uniform("prefill b4 x 4096, x-packed, new", 4, 4096, 4096, layout="x", new=True),
)
PREFILL = (
    uniform("prefill b1 x 1024", 1, 1024, 1024),
    uniform("prefill b1 x 4096", 1, 4096, 4096),
    uniform("prefill b4 x 4096", 4, 4096, 4096),
    uniform("prefill b4 x 4096, page 128", 4, 4096, 4096, page_size=128),
    uniform("prefill b8 x 8192", 8, 8192, 8192),
    uniform("prefill b1 x 16384", 1, 16384, 16384),
    uniform("chunk of 2048 at 16384", 1, 2048, 16384),
    Case("16 prefills, 16..4096", log_uniform(16, 4096, 16), log_uniform(16, 4096, 16), **SIZES),  # type: ignore
)
MIXED = (
    Case("1 x 2048 + 63 decodes at 4096", (2048,) + (1,) * 63, (2048,) + (4096,) * 63, **SIZES),  # type: ignore
    Case("4 x 512 at 8k + 124 decodes at 2048", (512,) * 4 + (1,) * 124, (8192,) * 4 + (2048,) * 124, **SIZES),  # type: ignore
    uniform("speculate b16 x 8192, q_len 1", 16, 1, 8192),
    uniform("speculate b16 x 8192, q_len 8", 16, 8, 8192),
)
SUITES: dict[str, tuple[Case, ...]] = {"decode": DECODE, "features": FEATURES, "prefill": PREFILL, "mixed": MIXED}


def traffic(case: Case) -> int:
    """Bytes that must move: every visible key and value once, queries in, results out."""
    left = case.window_size[0]
    keys = 0
    for query_len, seq_len in zip(case.query_lens, case.seq_lens, strict=True):
        keys += seq_len if left < 0 else min(seq_len, query_len + left)
    row = case.heads * case.head_dim * (case.dtype.itemsize + case.dtype_of_out.itemsize)
    return keys * 2 * case.kv_heads * case.head_dim * case.dtype_of_cache.itemsize + case.tokens * row


def operations(case: Case) -> int:
    """Multiplications and additions of both products over the visible (query, key) pairs of a causal case."""
    left = case.window_size[0]
    pairs = 0
    for query_len, seq_len in zip(case.query_lens, case.seq_lens, strict=True):
        visible = torch.arange(seq_len - query_len + 1, seq_len + 1)
        pairs += int((visible if left < 0 else visible.clamp(max=left + 1)).sum())
    return 4 * case.head_dim * case.heads * pairs


def is_uniform(case: Case) -> bool:
    """Whether a dense [batch, ...] call can do the same work."""
    return len(set(case.query_lens)) == 1 and len(set(case.seq_lens)) == 1


def plain(case: Case) -> bool:
    """Whether the case is attention without modifiers, as every peer has it."""
    return replace(case, window_size=(-1, -1), softcap=0.0, alibi=False, sinks=False) == case
