"""Steps that all dialects share: the copy of keys and values before a plan's launches, and the merges after launches.

Every dialect also passes a batch to its kernels by `numbers_of`.
"""

from typing import Any, NamedTuple

from triton.language import constexpr

from ..arguments import LEFT
from ..launching.launch import Step, own
from ..records import layout
from ..records.copies import PAGE, Copies
from ..records.formats import cdiv, next_power_of_2
from ..records.layout import ROOM, Call
from ..records.plan import Launch
from .common.copying import copy_pages_kernel
from .common.merge import merge_blocks_kernel, merge_states_kernel
from .common.records import KV, Heads, KeyValues, Modifiers, Rows


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


def _padded(dims: int) -> int:
    """Dims of a Triton block: rounded up to a power of two, at least 16."""
    return max(16, next_power_of_2(dims))


# ---- copies --------------------------------------------------------------------------------------

COPY_WARPS = 4
# Maximum bytes of a tile's keys, and of a tile's values.  Each thread holds 8 x 16 bytes of each in registers.
BYTES_AT_ONCE = 16 << 10
# Above about this number of programs, a program copies several tiles of its group.  If max_seqlen_k is far above the
# lengths, most programs find nothing to copy.  With 8 programs on a multiprocessor at a time, these programs take a
# microsecond or two.
MAX_PROGRAMS = 8192


class CopyTiles(NamedTuple):
    """Tiles of the copy kernel, and how its programs divide them."""

    keys: int  # keys of a tile
    heads: int  # KV heads of a tile
    groups: int  # groups of `heads` KV heads, over all sequences that are copied
    parts: int  # programs that divide the tiles of a group

    @property
    def programs(self) -> int:
        return self.groups * self.parts


def tiles_of_copies(copies: Copies) -> CopyTiles:
    """Return tiles of up to PAGE keys, with as many keys and heads as registers hold, and how programs divide them."""
    rows = BYTES_AT_ONCE // (max(_padded(copies.head_dim), _padded(copies.value_dim)) * copies.dtype.itemsize)
    heads = min(next_power_of_2(copies.kv_heads), rows)
    keys = min(rows // heads, PAGE)
    groups = copies.most * cdiv(copies.kv_heads, heads)
    return CopyTiles(keys, heads, groups, min(copies.pages * (PAGE // keys), cdiv(MAX_PROGRAMS, groups)))


def copied(copies: Copies, call: Call) -> tuple[Step, Call]:
    """Return the copying launch, and the call over the copied pages."""
    assert copies.bytes < 1 << 31  # offsets in a sequence's pages have 32 bits
    tensors, tiles = copies.tensors(), tiles_of_copies(copies)
    keys, values, table = own(tensors)
    cache = layout.cache(keys, values, "NHD")
    args = (
        call.cache, KeyValues(*map(_known, cache)), table, call.query_starts, call.seq_lens, call.page_table,
        0 if call.page_starts is not None else call.page_table.stride(0), call.page_starts, _bound(call.mods),
        copies.shortest, copies.pages, tiles.parts, copies.from_page, PAGE, tiles.keys, tiles.heads, copies.kv_heads,
        copies.head_dim, _padded(copies.head_dim), copies.value_dim, _padded(copies.value_dim), call.new is not None,
        copies.dependent, copies.stripes, copies.most < copies.seqs, copies.seqs, copies.native,
    )  # fmt: skip
    options = {"num_warps": COPY_WARPS} | ({"launch_pdl": True} if copies.dependent else {})
    step = Step(copy_pages_kernel, (tiles.programs,), args, options, own=tensors)
    return step, call._replace(cache=cache, page_table=table, page_starts=None)


def _known(kv: KV) -> KV:
    """Return a KV with compile-time strides, because 64-bit products with strides are most of a copy's arithmetic."""
    page, slot, head = (constexpr(x) for x in (kv.stride_page, kv.stride_slot, kv.stride_head))
    return kv._replace(stride_page=page, stride_slot=slot, stride_head=head)


def _bound(mods: Modifiers) -> Modifiers:
    """Return the modifiers that bound keys to the left.  Pages before the bound may be freed, so they are not read."""
    if mods.left is None:
        return Modifiers(shard_rank=mods.shard_rank)
    assert mods.prefix_lens is None  # pages in the gap between a prefix and a window may have been freed, too
    return Modifiers(**{name: getattr(mods, name) for name in LEFT})


# ---- merges --------------------------------------------------------------------------------------


def merge_blocks(launch: Launch, call: Call, cutting: Step) -> Step:
    """Return the merge launch that joins the pieces whose states the step `cutting` stores."""
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


def heads_of(heads: int, dims: int) -> Heads:
    """Return what kernels know of results [tokens, heads, dims]."""
    return Heads(KV_HEADS=1, GROUP=heads, VALUE_DIM=dims, VALUE_PADDED=_padded(dims))


# Joined states have equal bits whichever kernel joins them, because the compiler may not fuse products with sums, which
# would leave out a rounding.
JOINS_ALIKE = {"enable_fp_fusion": False}


def merge_states(out: Rows, lse: Any, outs: Any, lses: Any, sinks: Any = None) -> list[Step]:
    """Return one step, in a list.  It joins contiguous outs [n, tokens, heads, head_dim] by lses [n, tokens, heads]."""
    parts, tokens, heads, head_dim = outs.shape
    shape = heads_of(heads, head_dim)
    rows = _rows_per_merge(heads, shape.VALUE_PADDED)
    grid = (tokens, cdiv(heads, rows))
    args = (out, lse, outs, lses, sinks, parts, tokens * heads, shape, rows)
    # unlike in the merge launch, every program has work; more than 4 warps were not tried
    options = JOINS_ALIKE | {"num_warps": min(4, _warps(rows, shape.VALUE_PADDED))}
    return [Step(merge_states_kernel, grid, args, options)]


def _rows_per_merge(live: int, dim: int) -> int:
    """Rows of a program of `merge_states`: an eighth of the heads, rounded up to a power of two.

    If registers cannot hold eight states of these rows, a program has fewer rows.  With up to eight heads, a program
    has one row, because more programs with fewer rows finish sooner.
    """
    return min(next_power_of_2(cdiv(live, 8)), max(1, 1024 // dim))


def _warps(rows: int, dim: int) -> int:
    """Warps of a merge program: four elements of a state for each thread, at most 8 warps."""
    return max(1, min(8, rows * dim // 128))
