"""The launches of regimes: their order, the sequences that each serves, and the token limits of few rows."""

from ....records.copies import Copies, over
from ....records.plan import UNBOUNDED, Launch
from ....records.problem import Problem
from ...portable.launches import drafts_apart, few_apart
from .block_launches import blocks_beside_launch, blocks_launch
from .block_tiles import MAX_DIMS_OF_RESULTS
from .conditions import parts_of
from .operands import MAX_COLUMNS, columns_beside
from .shapes import is_even
from .share_launches import shares_beside_launch, shares_launch
from .wide_heads import shares_take


def shortest_of(p: Problem) -> int:
    """Return the fewest query tokens of a sequence that is served: 0, or 2 if the call asks for prefills alone.

    Callers do not ask about decodes alone, because these have one query token.
    """
    return 0 if p.only is None else 2


def drafts_of_parts(p: Problem) -> int:
    """Return the query tokens, inclusive, up to which the portable kernel reads keys sooner than blocks of parts.

    A sequence takes a portable block for each token, or one block for each part.  A portable block is assumed to take
    twice as long as a part's block.
    """
    return parts_of(p, True) // 2


def tokens_of_columns(p: Problem) -> int:
    """Return the query tokens, inclusive, up to which sequences get a launch of even shares when others are blocks.

    Rows of these tokens fit MAX_COLUMNS columns.  With more heads than columns on a KV head, the result is 1.
    """
    return max(1, MAX_COLUMNS * p.kv_heads // p.heads)


def tokens_of_portable(p: Problem) -> int:
    """Return the query tokens, inclusive, up to which the portable kernel serves few rows beside blocks."""
    return few_apart(p, shortest_of(p)).longest


def shares(p: Problem) -> tuple[Launch, ...]:
    """Return one launch of even shares for all sequences."""
    return (shares_launch(p, shortest_of(p), UNBOUNDED),)


def blocks(p: Problem, two_lists: bool = False) -> tuple[Launch, ...]:
    """Return one launch of blocks of all sequences, with items from a counter."""
    return (blocks_launch(p, shortest_of(p), two_lists),)


def wide_blocks(p: Problem) -> tuple[Launch, ...]:
    """Return launches of blocks with two widths or wide heads: one for each 256 dims of values.

    Few rows beside longer queries have an earlier launch in two cases.  Over fp8 and int8, a converter is slower than
    memory.  Beyond 256 dims, two launches of blocks would read their keys if values are wide, too.
    """
    launches = blocks(p)
    if not is_even(p) and (p.cache.itemsize == 1 or p.widest > 256):
        by_shares = shares_take(p._replace(only="decode"))
        longest = tokens_of_columns(p) if by_shares else tokens_of_portable(p)
        if longest >= shortest_of(p):
            launches = (shares_then_blocks if by_shares else portable_then_blocks)(p, longest)
    if p.value_width <= MAX_DIMS_OF_RESULTS:
        return launches
    pipe = launches[-1].pipe._replace(FROM_DIM=MAX_DIMS_OF_RESULTS, FOLLOWS=False)
    return (*launches, launches[-1]._replace(pipe=pipe))


def shares_then_blocks(p: Problem, longest: int) -> tuple[Launch, ...]:
    """Return even shares of sequences of up to `longest` tokens, then blocks of the others, which begin meanwhile."""
    return _overlapped(shares_launch(p, shortest_of(p), longest, leads=True), blocks_launch(p, longest + 1, False))


def portable_then_blocks(p: Problem, longest: int) -> tuple[Launch, ...]:
    """Return a portable launch of few rows (up to `tokens_of_portable`), then overlapping blocks of long queries.

    longest: blocks serve sequences of more query tokens.  Sequences between both limits need a third launch.
    """
    return _overlapped(few_apart(p, shortest_of(p)), blocks_launch(p, longest + 1, False))


def portable_then_blocks_then_drafts(p: Problem) -> tuple[Launch, ...]:
    """Return three launches: decodes by the portable kernel, blocks, and then drafts by the portable kernel."""
    longest = drafts_of_parts(p)
    return (*portable_then_blocks(p, longest), drafts_apart(p, longest))


def blocks_beside_shares(p: Problem) -> tuple[Launch, ...]:
    """Return one launch of the mixed kernel: a warpgroup serves few rows beside the blocks."""
    longest = columns_beside(p) * p.kv_heads // p.heads
    blocks = blocks_beside_launch(p, longest + 1)
    return (blocks._replace(beside=shares_beside_launch(p, shortest_of(p), longest)),)


def _overlapped(first: Launch, second: Launch) -> tuple[Launch, Launch]:
    """Return two launches, of different sequences, so that programs of the second begin as those of the first end.

    Few rows come first.  Memory serves some programs of few rows later than others, and blocks fill the multiprocessors
    that are idle meanwhile.
    """
    first = first._replace(shape=first.shape._replace(LEADS=True))
    return first, second._replace(pipe=second.pipe._replace(FOLLOWS=True))


def over_copies(p: Problem, copies: Copies) -> tuple[Launch, ...]:
    """Return launches of short queries over the cache itself, then blocks of long queries over their copied keys.

    Even shares of short queries begin once all programs of the copy ahead of them have begun.
    """
    whole, first, longest = over(p, copies), shortest_of(p), tokens_of_columns(p)
    last = blocks_launch(whole, first if is_even(p) else copies.shortest, False)._replace(copied=True)
    if is_even(p):
        return (last,)
    between = copies.shortest > longest + 1
    few: tuple[Launch, ...] = ()
    if longest >= first:
        shares = shares_launch(p, first, longest, leads=not between)
        few = (shares._replace(pipe=shares.pipe._replace(FOLLOWS=True)),)
    if between:
        return (*few, drafts_apart(p, copies.shortest - 1, max(first, longest + 1)), last)
    return _overlapped(few[0], last) if few else (last,)
