"""The table of regimes: conditions on rows, tokens, keys, bytes and heads, and the launches that a call gets.

A call gets the launches of the first row whose condition holds.  Numbers in the conditions are the `Threshold`s of this
folder.  `docs/regimes.md` shows the regimes and the thresholds, and `explain` names a call's row.
"""

from ....records.plan import UNBOUNDED, Launch, Regime, row_of
from ....records.problem import Problem
from . import conditions, invariant, launch_order
from .conditions import MAX_HEADS, all_blocks_are_parts, parts_save_a_launch, shares_have_more_rows
from .operands import (
    MAX_ROWS,
    NONE,
    conversion,
    decodes_have_shares,
    fp8_rows_are_columns,
    packed_rows_are_columns,
)
from .shapes import is_decode, is_even, is_wide, others_are_decodes, rows_of
from .share_launches import shares_launch
from .whole_pages import copies_in_16_bits
from .wide_heads import shares_take


def regime_of(p: Problem) -> Regime:
    """Return the first row whose condition holds."""
    return row_of(REGIMES, p)


def launches(p: Problem) -> tuple[Launch, ...]:
    """Return the launches of a call's regime."""
    return regime_of(p).launches(p)


def launches_over_copies(p: Problem) -> tuple[Launch, ...]:
    """Return launches of short queries, if any, over the cache, then of long queries over keys copied in 16 bits."""
    copies = copies_in_16_bits(p)
    assert copies is not None
    return launch_order.over_copies(p, copies)


# ---- the table ----------------------------------------------------------------------------------

REGIMES = (
    Regime(
        "invariant decodes",
        "`batch_invariant`; every sequence has one token, or rows for one block of 64",
        "shares or blocks kernel, 64 rows x 128 keys, 4 warps; keys cut at multiples of 1024",
        "few rows of a decode go through the product of 64 rows that a prefill has; memory leaves time for it",
        "invariant: decode b64 x 32768, batch-invariant 1.01x of the default mode, b1 1.15x",
        lambda p: p.batch_invariant and (is_decode(p) or invariant.queries_fit_one_block(p)),
        lambda p: (
            (invariant.launch_of_one_block(p, 1, 1),)
            if is_decode(p)
            else (invariant.launch_of_one_block(p, launch_order.shortest_of(p), UNBOUNDED),)
        ),
    ),
    Regime(
        "invariant blocks",
        "`batch_invariant`; all sequences have equally many tokens",
        "blocks or shares kernel, 128 rows x 128 keys, 8 warps; cut as above where blocks are few",
        "with one tile for all calls, no result depends on the batch",
        "invariant: prefill b4 x 4096, batch-invariant 1.39x of the default mode",
        lambda p: p.batch_invariant and is_even(p),
        lambda p: (invariant.launch_of_blocks(p, launch_order.shortest_of(p)),),
    ),
    Regime(
        "invariant blocks and few rows",
        "`batch_invariant`; others",
        "the two above in two launches",
        "in blocks of 128 rows, sequences of few rows would leave most rows empty",
        "invariant: 1 x 2048 + 63 decodes at 4096, batch-invariant 1.14x of the default mode",
        lambda p: p.batch_invariant,
        lambda p: invariant.launches_of_both(p, launch_order.shortest_of(p)),
    ),
    Regime(
        "few rows of two widths or wide heads",
        "16 bits, or fp8 latents; up to 64 rows, 32 beyond 256 dims; latents: rows of up to four parts of the heads",
        "shares kernel; rows as columns, or 64 rows up to 256 dims; more than 32 rows of latents: rows, two consumers",
        "memory decides; rings get as many slots as fit, or keys and values take turns in one ring",
        "wide: decode b64 x 4096, 512 557 -> 487 us; mla: decode b64 x 4096, 32 heads 137 -> 85, 128 335 -> 149",
        shares_take,
        lambda p: (shares_launch(p, 1, 1),) if is_decode(p) else launch_order.shares(p),
    ),
    Regime(
        "decodes",
        "one token a sequence",
        "shares kernel, rows as columns or 64 rows, x 64 or 128 keys, 4 warps; an even share of all keys a program",
        "a decode waits for memory alone, so every program reads equally much, whatever the lengths",
        "decode: decode b64 x 4096 248 us, 99% of a stream of bytes; 1 x 131072 + 63 x 512 165 us",
        is_decode,
        lambda p: (shares_launch(p, 1, 1),),
    ),
    Regime(
        "long queries over a copy in 16 bits",
        "int8, int4 or fp8; queries of more rows than drafts have, with scores enough for a copy of up to 1 GiB",
        "a copy of their keys as numbers of 16 bits; meanwhile decodes by the shares kernel, then blocks over the copy",
        "a copy takes 1 to 2% of a prefill's time, and products of 16 bits need no converter",
        "formats: prefill b4 x 4096, int8, one scale 1076 -> 723 us; by token 3049 by the portable kernels, 745 here",
        lambda p: copies_in_16_bits(p) is not None,
        launches_over_copies,
    ),
    Regime(
        "large groups",
        "more than 64 heads on a KV head; all sequences are long, or equally long",
        "blocks kernel, 128 rows of a part of a group, 8 warps; cut where the call ends sooner by it",
        "a consumer has too few rows for a whole group; parts of a power of two fill blocks",
        "models: Falcon 7B: 2 x 4096 2041 -> 705 us",
        lambda p: p.heads > MAX_HEADS * p.kv_heads and all_blocks_are_parts(p),
        launch_order.blocks,
    ),
    Regime(
        "large groups beside decodes",
        "more than 64 heads on a KV head; all sequences but one have one token, or parts are few",
        "portable kernel, 128 rows, 8 warps, then the blocks above",
        "in parts, each key of a decode would be read once for every part",
        "models: Falcon 7B: 1024 at 4096 + 31 at 2048 438 -> 172 us",
        lambda p: p.heads > MAX_HEADS * p.kv_heads and (launch_order.drafts_of_parts(p) < 2 or others_are_decodes(p)),
        lambda p: launch_order.portable_then_blocks(p, 1),
    ),
    Regime(
        "large groups beside drafts",
        "more than 64 heads on a KV head; others",
        "as above, then a third launch, by the portable kernel, for drafts of up to (parts / 2) tokens",
        "a draft's token takes twice as long in the portable kernel's blocks of one token as in blocks of a part",
        "71/1, 300 tokens at 2000 + 31 drafts of 4 377 -> 86 us",
        lambda p: p.heads > MAX_HEADS * p.kv_heads,
        launch_order.portable_then_blocks_then_drafts,
    ),
    Regime(
        "many rows of two widths or wide heads",
        "some sequence has more than 64 rows",
        "blocks kernel, 128 rows, 8 warps, a launch for each 256 dims of values; decodes as blocks, too. Over fp8 or "
        "beyond 256 dims: decodes before, by the portable kernel or by shares",
        "registers hold results of 256 dims; decodes as blocks only wait for memory, so a launch of their own gains "
        "little",
        "wide: prefill b4 x 4096, 192/128 4421 -> 1805 us; 512 5989 -> 2598 us",
        is_wide,
        launch_order.wide_blocks,
    ),
    Regime(
        "parts beside decodes",
        "groups that leave 16 rows of a block empty, and enough scores to make up for a launch",
        "shares kernel for decodes, then blocks of parts of a group",
        "parts of long queries fill their blocks; decodes get their own launch, for each part would read their keys",
        "models: StarCoder: 1024 at 4096 + 31 at 2048 175 -> 151 us",
        lambda p: parts_save_a_launch(p) and decodes_have_shares(p),
        lambda p: launch_order.shares_then_blocks(p, 1),
    ),
    Regime(
        "x-packed drafts",
        "x-packed cache without new keys; up to 32 rows, up to 64 where blocks are few, up to 8 beyond 128 dims",
        "shares kernel, rows as columns",
        "x-packed keys pass through registers as left operands, so rows have to be columns",
        "features: speculate b16 x 8192, q_len 8, x-packed 135 -> 130 us",
        lambda p: p.packed and packed_rows_are_columns(p) and not p.new,
        launch_order.shares,
    ),
    Regime(
        "fp8 drafts",
        "fp8 cache; up to 32 rows, up to 64 where blocks are few",
        "shares kernel, rows as columns, two programs a multiprocessor",
        "keys are widened on their way into registers; a converter would be slower than memory",
        "fp8: speculate b16 x 8192, q_len 8, e4m3 cache 104.5 -> 88.8 us",
        lambda p: not p.packed and p.cache.itemsize == 1 and fp8_rows_are_columns(p),
        launch_order.shares,
    ),
    Regime(
        "drafts",
        "16 bits; up to 64 rows",
        "shares kernel, up to 16 rows as columns, else 64 rows, 4 warps",
        "a block has all rows of a sequence, so keys are read once; memory decides, as for decodes",
        "spec: speculate b16 x 8192, q_len 8 127.5 us, q_len 1 128.9",
        lambda p: not p.packed and p.cache.itemsize == 2 and rows_of(p, UNBOUNDED) <= MAX_ROWS,
        launch_order.shares,
    ),
    Regime(
        "soon done",
        "16 bits; up to 32 sequences of equally many tokens, up to 512 rows each, up to 32 tiles of 64 keys a program",
        "shares kernel, 64 rows, 4 warps; shares of 4 tiles or more",
        "fetching code and joining pieces take most of the time, so less code and fewer rows a piece win",
        "single: 64 of 1 x 8192 31.5 us (31.8 tiles a program); 3 x 64 x 2048 34.9 -> 30.0",
        lambda p: not p.packed and p.cache.itemsize == 2 and shares_have_more_rows(p),
        launch_order.shares,
    ),
    Regime(
        "blocks",
        "all sequences have equally many tokens, or up to 64 rows",
        "blocks kernel, the kind of block by `block_kinds`; cut where the call ends sooner by it",
        "products decide; a counter hands out a sequence's blocks one after the other, so its keys stay in L2",
        "prefill: prefill b4 x 4096 755 us (cuDNN paged 1316)",
        lambda p: is_even(p) or rows_of(p, UNBOUNDED) <= MAX_ROWS,
        launch_order.blocks,
    ),
    Regime(
        "blocks beside few keys",
        "decodes of up to 256 keys, or in a window of 176; at least two for each multiprocessor",
        "portable kernel, 16 rows, then blocks",
        "portable programs of one multiprocessor hide each other's waits; an item of few rows waits for queries, keys "
        "and stores in turn",
        "window: 1 x 2048 + 63 decodes at 4096, window 128 63.2 -> 50.6 us",
        lambda p: (
            conditions.portable_hides_waits_beside_blocks(p)
            and launch_order.tokens_of_portable(p) >= launch_order.shortest_of(p)
        ),
        lambda p: launch_order.portable_then_blocks(p, launch_order.tokens_of_portable(p)),
    ),
    Regime(
        "long queries",
        "on average 128 tokens a sequence or more; more where the context may be longer than the queries",
        "blocks kernel, decodes as blocks, too",
        "products take longer than reading, so decodes as blocks cost nothing",
        "prefill: 16 prefills, 16..4096 443 -> 421 us, of 64 dims 362 -> 267",
        conditions.products_outlast_reading,
        launch_order.blocks,
    ),
    Regime(
        "little to read",
        "less than 128 MB of keys and values; one KV head, or too few long queries to hide even that",
        "as above",
        "reading takes so little time that a kernel for few rows saves nothing",
        "models: Llama 3.1 70B / 8: 1024 at 4096 + 31 at 2048 50.7 us; 8/1 512 + 63 of 1000 28, beside 36",
        conditions.reading_takes_no_time,
        launch_order.blocks,
    ),
    Regime(
        "few rows beside blocks",
        "16 bits, up to 128 dims, up to 16 rows a token; 36 scores or more of long queries for each key of a decode",
        "mixed kernel, 128 rows, 8 warps, and 4 warps for few rows as columns; blocks are cut by items, few rows by "
        "shares",
        "prefills wait for the tensor cores, decodes for memory, so every program does both at once",
        "mixed: 1 x 2048 + 63 decodes at 4096 293 -> 270 us, 4 x 512 at 8k + 124 551 -> 473",
        conditions.products_hide_reading,
        launch_order.blocks_beside_shares,
    ),
    Regime(
        "few rows as blocks",
        "new keys beside an x-packed cache; 16 bits beyond 128 dims, or more than 8 heads on a KV head",
        "blocks kernel, decodes as blocks, too",
        "the shares kernel has no columns for such rows",
        "256 dims, two launches: 512 at 8192 + 31 of 1000 0.87x, 512 at 4000 + 127 of 1000 1.27x",
        conditions.few_rows_have_no_columns,
        launch_order.blocks,
    ),
    Regime(
        "few rows before blocks",
        "fp8 or x-packed caches; or sequences x KV heads up to the multiprocessors",
        "shares kernel, up to 8 rows, then blocks as its programs end",
        "few rows need no converter; a list would cut each decode until all programs have a piece",
        "fp8: 1 x 2048 + 63 decodes at 4096, e4m3 cache 302 -> 204 us; 8/1 17 tokens + 63 of 4096 72.5 -> 59.8",
        lambda p: (
            conditions.decodes_read_faster_alone(p)
            and launch_order.tokens_of_columns(p) >= launch_order.shortest_of(p)
            and decodes_have_shares(p)
        ),
        lambda p: launch_order.shares_then_blocks(p, launch_order.tokens_of_columns(p)),
    ),
    Regime(
        "two lists",
        "others of 16 bits",
        "blocks kernel, items of long and of few queries from two counters",
        "memory alone decides; long items run under short ones, and few rows get enough shared memory",
        "mixed: 1 x 64 at 4096 + 63 decodes at 4096 250 us, beside blocks 260",
        lambda p: conversion(p) == NONE and not p.packed,
        lambda p: launch_order.blocks(p, two_lists=True),
    ),
    Regime(
        "one list",
        "others: fp8 or x-packed, of more rows a token than columns have",
        "blocks kernel, decodes as blocks, too",
        "no launch serves few rows of these caches, so they pass the converter as blocks",
        "not measured",
        lambda p: True,
        launch_order.blocks,
    ),
)
