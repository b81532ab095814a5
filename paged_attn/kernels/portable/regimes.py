"""The table of regimes of the portable kernels: conditions on a call, and the launches that it gets."""

from ...records.plan import Launch, Regime, row_of
from ...records.problem import Problem
from .launches import blocks, blocks_and_few, one_block, one_block_of_all_rows, rows_fit_one_block
from .tuning import head_blocks


def regime(p: Problem) -> tuple[str, str]:
    """Return name and reason of a call's regime."""
    row = row_of(REGIMES, _in_blocks_of_heads(p))
    return row.name, row.reason


def launches(p: Problem) -> tuple[Launch, ...]:
    """Return the launches of a call's regime."""
    heads = head_blocks(p)
    p = _in_blocks_of_heads(p)
    found = row_of(REGIMES, p).launches(p)
    return tuple(x._replace(config=x.config._replace(head_blocks=heads)) for x in found)


def _in_blocks_of_heads(p: Problem) -> Problem:
    """Return the problem with one KV head for each of the `head_blocks` parts of a group's heads."""
    return p._replace(kv_heads=p.kv_heads * head_blocks(p))


REGIMES = (
    Regime(
        "decodes",
        "one token a sequence",
        "16 rows x 64 or 32 keys, 4 warps; even shares of all keys, or a program a block where these fill the device",
        "a decode waits for memory alone, so tiles are small, and a multiprocessor has several programs",
        "decode b64 x 4096 247 us, b256 984 (SDPA cuDNN, contiguous, 248, 968)",
        lambda p: p.only == "decode" or not p.ragged,
        lambda p: one_block(p, 1, 1),
    ),
    Regime(
        "one block a sequence",
        "up to 64 rows of every sequence; float32 and `batch_invariant`: no more than a decode's block",
        "rows of the longest query, up to 8 warps",
        "a block has all rows of a sequence, so keys are read once, at the memory's speed",
        "b16 x 8192 of 8 tokens 159 us, of one 133",
        rows_fit_one_block,
        lambda p: one_block_of_all_rows(p, 0 if p.only is None else 2),
    ),
    Regime(
        "blocks",
        "all sequences have equally many tokens, or only prefills are asked for",
        "128 rows x 64 or 128 keys, 8 warps; keys are cut where blocks leave multiprocessors idle",
        "products decide, so tiles are as large as registers allow",
        "prefill b4 x 4096 391 -> 435 TFLOP/s by 128 x 128 and 8 warps, page 128 403 -> 471",
        lambda p: p.only == "prefill" or p.seqs == 1 or p.tokens >= p.seqs * p.max_seqlen_q,
        lambda p: blocks(p, 0 if p.only is None else 2),
    ),
    Regime(
        "blocks and few queries",
        "others",
        "two launches: sequences of up to 16 rows as decodes, the others as blocks",
        "in blocks of 128 rows, sequences of few rows would leave most rows empty",
        "1 x 2048 + 63 decodes at 4096 380 us, by Hopper's kernels 315 then",
        lambda p: True,
        blocks_and_few,
    ),
)
