"""Latents (values within keys): a tile is read once, and its first dims are multiplied twice.

A key of 576 dims would be rounded up to 1024.  So a key is read in two parts, rounded to powers of two: the VALUE_DIM
dims that are also the value, and the dims behind them (the rest).
"""

import triton
import triton.language as tl

from ..common.numerics import decode, in_parts, normalize, opaque, unpack
from ..common.output import addresses, load_query
from ..common.records import Query
from .cache_tiles import load_kv


@triton.jit
def turned(parts):
    """Each part [N, D] as [D, N]."""
    done = ()
    for i in tl.static_range(len(parts)):
        done = done + (parts[i].T,)
    return done


@triton.jit
def load_latent(kv, page, slot, kv_head, live, S: tl.constexpr):
    """(keys in parts [D, N], values in parts [N, D]); values of keys that are not live [N], if given, are zeros."""
    v = unpack(load_kv(kv, page, slot, kv_head, live, S.VALUE_DIM, S.VALUE_PADDED, S), kv, S)
    k = turned(v)
    if S.REST > 0:
        rest = load_kv(kv, page, slot, kv_head, None, S.HEAD_DIM - S.VALUE_DIM, S.REST, S, S.VALUE_DIM)
        k = turned(unpack(rest, kv, S)) + k
    return k, v


@triton.jit
def _rows(query, rows, BEGIN: tl.constexpr, END: tl.constexpr, PADDED: tl.constexpr, S: tl.constexpr):
    """Load dims [BEGIN, END) of the queries: [R, PADDED], zeros beyond END."""
    ptr, inside = addresses(rows, BEGIN + tl.arange(0, PADDED), query, END, S)
    return tl.load(ptr, mask=inside, other=0)


@triton.jit
def load_queries(query, rows, PARTS: tl.constexpr, S: tl.constexpr):
    """Load queries in as many parts as the keys; latents: the parts of the rest, then those of the values' dims."""
    if S.REST is None or S.REST == 0:
        return load_query(query, rows, tl.arange(0, S.DIM), PARTS, S)
    else:
        x = _rows(query, rows, 0, S.VALUE_DIM, S.VALUE_PADDED, S)
        rest = _rows(query, rows, S.VALUE_DIM, S.HEAD_DIM, S.REST, S)
        unit = tl.where(rows.valid, 1.0, 1.0)
        if x.dtype == tl.bfloat16 and tl.bfloat16 != S.COMPUTE:
            x, of_first = normalize(decode(x, query.FP8, tl.float32, S.NATIVE_FP8))
            rest, of_rest = normalize(decode(rest, query.FP8, tl.float32, S.NATIVE_FP8))
            # powers of two; the larger one is that of the whole row
            unit = tl.maximum(of_first, of_rest)
            x = (x * (of_first / unit)[:, None]).to(S.COMPUTE)
            rest = (rest * (of_rest / unit)[:, None]).to(S.COMPUTE)
        else:
            x = decode(x, query.FP8, S.COMPUTE, S.NATIVE_FP8)
            rest = decode(rest, query.FP8, S.COMPUTE, S.NATIVE_FP8)
            if query.FP8 > 0 and PARTS == 2 and S.NATIVE_FP8:
                x, rest = opaque(x), opaque(rest)  # as in load_query
        return Query(in_parts(rest, PARTS) + in_parts(x, PARTS), unit)
