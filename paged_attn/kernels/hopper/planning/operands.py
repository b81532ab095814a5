"""Operands of products: conversion of fp8 and int8 tiles, arithmetic of the softcap, and rows as columns."""

from typing import Annotated

import torch

from ....records.formats import next_power_of_2
from ....records.plan import UNBOUNDED, Threshold
from ....records.problem import Problem
from .cost import seqs_tried
from .shapes import VALUES_PER_CORE_ROW, is_decode, is_wide, padded_dim, rows_of, widest_of
from .wide_heads import only_columns, wide_columns

NONE, WIDEN, TRANSPOSE, WIDEN_VALUES = 0, 1, 2, 3


def conversion(p: Problem) -> int:
    """Return what a converter warpgroup does to the fp8 or int8 tiles of blocks.

    NONE: there is no converter.  WIDEN: keys and values become float16.  WIDEN_VALUES: values alone become float16, and
    bfloat16 queries become sums of two fp8 numbers.  TRANSPOSE: values stay fp8 and are transposed.
    """
    if p.cache.itemsize == 2:
        return NONE
    if is_wide(p):
        return WIDEN
    both = p.query == p.cache == torch.float8_e4m3fn
    if both and p.query_box and p.head_dim <= 128:
        return TRANSPOSE
    # the tensor cores keep 14 bits of a sum of fp8 products, and a log-sum-exp would show that
    in_two = p.query == torch.bfloat16 and p.cache == torch.float8_e4m3fn and not p.lse and p.head_dim <= 128
    return WIDEN_VALUES if in_two else WIDEN


# Terms of a softcap's polynomial that is as exact as tanh.approx, and of one that is as exact as exponentials.
TERMS_AS_TANH, TERMS_EXACTLY = 3, 5
_SMALL = "the polynomial holds above a maximum of the row's scores, which rises as the cap falls: 2.7 for these caps"
MIN_CAP_OF_TANH: Annotated[
    float,
    Threshold("score", _SMALL, "softcap 30, prefill b4 x 4096 992 -> 888 us, plain 752"),
] = 20.0
MIN_CAP_OF_EXACT_TERMS: Annotated[
    float,
    Threshold("score", _SMALL, "softcap 30 with log-sum-exps, prefill b4 x 4096 1290 -> 1110 us"),
] = 23.0


def has_tanh(p: Problem) -> bool:
    """Whether there is a softcap that may have a relative error of 2^-11.

    False if log-sum-exps are returned or queries are float16, because both would show the error.  False with a softcap
    that takes a series (`far_cap`).
    """
    return p.softcap > 0 and not p.far_cap and not p.lse and p.query != torch.float16


def terms_of(p: Problem) -> int:
    """Return the number of terms of the polynomial that caps scores of blocks; 0: special functions, or no softcap.

    Special functions serve, for example, heads beyond 128 dims, where they take less time than the products.  With 64
    dims, four warpgroups have no registers for the exact polynomial.
    """
    if (
        p.alibi
        or p.biased
        or p.token_scales
        or not p.positive
        or p.far_cap
        or conversion(p) != NONE
        or widest_of(p) > 128
    ):
        return 0
    if has_tanh(p):
        return TERMS_AS_TANH if p.softcap >= MIN_CAP_OF_TANH else 0
    return TERMS_EXACTLY if p.softcap >= MIN_CAP_OF_EXACT_TERMS and widest_of(p) == 128 else 0


MAX_ROWS = 64  # maximum query rows of a block of few rows, which are rows or columns of products
MAX_COLUMNS: Annotated[
    int,
    Threshold(
        "rows of one token over 16 bits",
        "a product has 64 rows, but any multiple of 8 columns: a thread computes 8 exponentials instead of 64",
        "decode b1 x 512 10.1 -> 9.2 us; 12 heads on a KV head as 16 columns +1 to +7%",
    ),
] = 8
MAX_DRAFT_COLUMNS: Annotated[
    int,
    Threshold(
        "rows of several tokens over 16 bits",
        "tiles of several tokens are masked, and columns mask fewer scores",
        "8/1 1 x 32768 of 2 tokens 19.5 -> 17.8 us, 128 x 1024 of 4 142 -> 138; 32 columns -4 to +11%",
    ),
] = 16
MAX_REGISTER_COLUMNS: Annotated[
    int,
    Threshold(
        "rows over fp8 or x-packed keys",
        "fp8 and x-packed keys pass through registers as left operands, so all rows have to be columns. A sequence of "
        "more rows has two blocks, a group of more heads one block of 64",
        "16 x 8192 of 8 tokens over e4m3 104.5 -> 88.8 us, 1 x 32768 46.8 -> 39.9, x-packed 57.7 -> 44.5",
    ),
] = 32
MAX_BLOCKS_SHARE: Annotated[
    float,
    Threshold(
        "of the multiprocessors, for sequences x KV heads",
        "with 33 to 64 rows, two blocks of columns use idle multiprocessors; without idle ones, one block of rows "
        "converts and reads the keys once",
        "16 tokens over e4m3 (blocks, two of columns): 16 x 8192 117, 177 us; 1 x 32768 92, 57; 4 x 8192 51, 52",
    ),
] = 1 / 2
MAX_BLOCKS_SHARE_OF_FAST_ROWS: Annotated[
    float,
    Threshold(
        "of the multiprocessors, for sequences x KV heads, with fp8 products or beyond 128 dims",
        "fp8 products convert no keys, and columns of heads beyond 128 dims take longer",
        "all e4m3 (blocks, two of columns): 4 x 2048 25.5, 22.8 us; 8 x 1024 18.9, 22.9",
    ),
] = 1 / 4
MIN_KEYS_WORTH_FP8_PRODUCTS: Annotated[
    int,
    Threshold(
        "keys of all sequences and KV heads",
        "over so many keys, blocks of fp8 products are cut, and end sooner however few they are",
        "16 tokens of all e4m3 (blocks, two of columns): 1 x 32768 40.8, 55.6 us; 1 x 8192 27.8, 25.6",
    ),
] = 1 << 17


def columns_of_shares(p: Problem, rows: int, several: bool) -> int:
    """Return the columns of a block of `rows` query rows; 0: query rows are rows of products.

    several: the rows are heads of several tokens.
    """
    if only_columns(p):
        return wide_columns(p, rows)
    if p.cache.itemsize == 1:
        most = MAX_ROWS
    elif p.packed:
        most = MAX_REGISTER_COLUMNS
    else:
        most = MAX_DRAFT_COLUMNS if several else MAX_COLUMNS
    return max(8, next_power_of_2(rows)) if rows <= most else 0


def columns_beside(p: Problem) -> int:
    """Return the columns of few rows beside blocks; 0: few rows cannot be beside blocks.

    Groups of more than MAX_COLUMNS heads have MAX_DRAFT_COLUMNS columns, the maximum that registers allow.
    """
    if padded_dim(p) > 128:
        return 0
    return MAX_COLUMNS if p.heads // p.kv_heads <= MAX_COLUMNS else MAX_DRAFT_COLUMNS


def columns_of_list(p: Problem) -> int:
    """Return the columns of blocks of few rows that have a list of their own; 0: query rows are rows of products."""
    return MAX_COLUMNS if p.heads // p.kv_heads <= MAX_COLUMNS else 0


def fp8_rows_are_columns(p: Problem) -> bool:
    """Whether even shares serve all rows over an fp8, int8 or int4 cache, as columns."""
    rows = rows_of(p, UNBOUNDED)
    return rows <= MAX_REGISTER_COLUMNS or (rows <= MAX_ROWS and two_blocks_of_columns(p))


def scaled_rows_are_columns(p: Problem) -> bool:
    """Whether all rows over int8, or over scales by token, are columns of even shares.

    The shares kernel applies scales by token to tiles.
    """
    if p.packed or p.new or p.latent or p.batch_invariant or is_wide(p) or p.heads // p.kv_heads > MAX_ROWS:
        return False
    return is_decode(p) or fp8_rows_are_columns(p)


def packed_rows_are_columns(p: Problem) -> bool:
    """Whether all rows over an x-packed cache are columns."""
    rows = rows_of(p, 1 if p.only == "decode" else UNBOUNDED)
    if padded_dim(p) > 128:
        return rows <= MAX_COLUMNS
    return rows <= MAX_REGISTER_COLUMNS or (rows <= MAX_ROWS and two_blocks_of_columns(p))


def two_blocks_of_columns(p: Problem) -> bool:
    """Whether two blocks of columns serve a sequence of 33 to 64 rows; True if no block of rows can serve it."""
    if p.packed:
        if p.cache.itemsize == 1:
            return True
        if p.heads // p.kv_heads > MAX_REGISTER_COLUMNS:
            return False
        if not packed_tiles_are_operands(p):
            return True
    blocks, by_fp8 = seqs_tried(p) * p.kv_heads, conversion(p) == TRANSPOSE
    if by_fp8 and blocks * p.max_seqlen_k >= MIN_KEYS_WORTH_FP8_PRODUCTS:
        return False
    share = MAX_BLOCKS_SHARE_OF_FAST_ROWS if by_fp8 or padded_dim(p) > 128 else MAX_BLOCKS_SHARE
    return blocks <= share * p.device.multiprocessors


def packed_tiles_are_operands(p: Problem) -> bool:
    """Whether blocks can multiply tiles of an x-packed cache from shared memory, not through registers."""
    return p.cache.itemsize == 2 and p.page_size % VALUES_PER_CORE_ROW == 0 and p.ragged and not is_decode(p)


def packed_has_a_kernel(p: Problem) -> bool:
    """Whether a Hopper kernel reads a call's x-packed cache."""
    return not p.batch_invariant and ((packed_rows_are_columns(p) and not p.new) or packed_tiles_are_operands(p))


def decodes_have_shares(p: Problem) -> bool:
    """Whether the shares kernel can serve decodes by a launch of their own; over x-packed caches only as columns."""
    return not p.packed or (packed_rows_are_columns(p._replace(only="decode")) and not p.new)
