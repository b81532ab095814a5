"""Arguments that launches of all dialects share, and arguments of merge launches."""

from typing import Any

from ..launching.launch import Step
from ..records.call import ROOM, Call
from ..records.plan import Launch
from ..records.rounding import cdiv, next_power_of_2
from .common.merge import merge_blocks_kernel, merge_states_kernel
from .common.records import Heads, Rows


def merge_blocks(launch: Launch, call: Call, cutting: Step) -> Step:
    """Return the merge launch that joins the pieces which another step leaves."""
    shape, merge, need = launch.shape, launch.merge, cutting.need
    assert need is not None
    args = (
        call.out, call.lse, ROOM, call.query_starts, call.seq_lens, call.seq_lens.shape[0], launch.shortest,
        launch.longest, (need.states - launch.cuts) // (shape.VALUE_PADDED + 2), launch.block_tokens * shape.GROUP,
        call.scales, shape._replace(SCORE_MOD=None), merge.skip, merge.stride, merge.rows, merge.dims, merge.lanes,
        merge.dependent,
    )  # fmt: skip
    options = {
        "num_warps": _warps(merge.rows * merge.lanes, merge.dims),
        "enable_fp_fusion": shape.PIECE is None,
    }
    if merge.dependent:
        options["launch_pdl"] = True
    return Step(merge_blocks_kernel, merge_grid(launch), args, options, room=cutting.room)


def merge_grid(launch: Launch) -> tuple[int]:
    """Grid of the merge launch."""
    shape, merge = launch.shape, launch.merge
    groups = cdiv(launch.block_tokens * shape.GROUP, merge.rows) * (shape.VALUE_PADDED // merge.dims)
    return (merge.blocks * groups * shape.KV_HEADS,)


def numbers_of(launch: Launch, call: Call) -> tuple[Any, ...]:
    """Return the fields of `common.records.Batch` for a launch, one by one."""
    return (
        call.query_starts,
        call.seq_lens,
        call.page_table,
        0 if call.page_starts is not None else call.page_table.stride(0),
        call.seq_lens.shape[0],
        call.query.ptr.shape[0],
        launch.shortest,
        launch.longest,
        launch.least,
        launch.slots,
        call.page_starts,
    )


def heads_of(heads: int, dims: int) -> Heads:
    """What kernels know of results of so many heads."""
    return Heads(KV_HEADS=1, GROUP=heads, VALUE_DIM=dims, VALUE_PADDED=max(16, next_power_of_2(dims)))


# Joined states have the same bits whichever kernel joins them: no compiler may choose which products to round.
JOINS_ALIKE = {"enable_fp_fusion": False}


def merge_states(out: Rows, lse: Any, outs: Any, lses: Any, sinks: Any = None) -> list[Step]:
    """Join [n, tokens, heads, head_dim] contiguous results and their [n, tokens, heads] log-sum-exps."""
    parts, tokens, heads, head_dim = outs.shape
    shape = heads_of(heads, head_dim)
    rows = _rows_per_merge(heads, shape.VALUE_PADDED)
    grid = (tokens, cdiv(heads, rows))
    args = (out, lse, outs, lses, sinks, parts, tokens * heads, shape, rows)
    # every program has work here, and more warps were not tried
    options = JOINS_ALIKE | {"num_warps": min(4, _warps(rows, shape.VALUE_PADDED))}
    return [Step(merge_states_kernel, grid, args, options)]


def _rows_per_merge(live: int, dim: int) -> int:
    """Rows of a program of `merge_states`: an eighth of the heads, and no more than registers hold of eight states.

    Few heads get one row for each program, because many programs finish sooner.
    """
    return min(next_power_of_2(cdiv(live, 8)), max(1, 1024 // dim))


def _warps(rows: int, dim: int) -> int:
    """Warps of a merge program: four elements of a state for each thread, at most 8 warps."""
    return max(1, min(8, rows * dim // 128))
