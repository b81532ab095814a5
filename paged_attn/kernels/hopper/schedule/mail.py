"""Broadcast of the tile scheduler: one warp writes items into two letters in shared memory, alternately."""

from ...common.records import Block
from ..args import Item, Mail, is_shared
from ..asm.barriers import after_warp, arrive_at, await_at
from ..layouts import line_layout
from ..loading.gates import MAIL, gate
from ..loading.ring import make_barriers
from ..shim import gl, gluon, mbarrier

FIELDS = gl.constexpr(16)  # int32 fields of a letter: 13, rounded up to a power of two


@gluon.jit
def make_mail(gates, P: gl.constexpr):
    """Make two empty letters for the warp partitions of pipe P.  One partition writes letters, and all others read."""
    letters = gl.allocate_shared_memory(gl.int32, [2 * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if is_shared(P) or P.BESIDE:
        full, full_at = gate(gates, MAIL, P)
        empty, empty_at = gate(gates, MAIL + 1, P)
        return Mail(letters, full, empty, full_at, empty_at)
    else:
        full, empty = make_barriers(2, 1, P.CONSUMERS + 2 * P.LOADERS - 1 + (P.CONVERT != 0))
        return Mail(letters, full, empty, 0, 0)


@gluon.jit
def no_item(like):
    """Return the item behind the last one, whose kv_head is -1; like: a scalar whose type kv_head gets."""
    return Item(Block(0, 0, 0, 0, 0, like * 0 - 1), 0, 0, 1, 1, 1, 0, 0, 0)


@gluon.jit
def _put(mail, at, FIELD: gl.constexpr, value):
    layout: gl.constexpr = line_layout(1)
    mail.letters.index(at * FIELDS + FIELD).store(gl.full([1], 0, gl.int32, layout) + value)


@gluon.jit
def _get(mail, at, FIELD: gl.constexpr, WARPS: gl.constexpr):
    layout: gl.constexpr = line_layout(WARPS)
    return gl.max(mail.letters.index(at * FIELDS + FIELD).load(layout), axis=0)


@gluon.jit
def publish(mail, number, item):
    """Write item `number` into a letter, once all reading partitions have read item `number` - 2 in it."""
    at = number & 1
    mbarrier.wait(mail.empty.index(at), ((number >> 1) & 1) ^ 1)
    _put(mail, at, 0, item.block.seq)
    _put(mail, at, 1, item.block.first_token)
    _put(mail, at, 2, item.block.query_len)
    _put(mail, at, 3, item.block.seq_len)
    _put(mail, at, 4, item.block.first)
    _put(mail, at, 5, item.block.kv_head)
    _put(mail, at, 6, item.begin)
    _put(mail, at, 7, item.end)
    _put(mail, at, 8, item.first)
    _put(mail, at, 9, item.pieces)
    _put(mail, at, 10, item.first_row)
    _put(mail, at, 11, item.row)
    _put(mail, at, 12, item.counter)
    mbarrier.arrive(mail.full.index(at), count=1)


@gluon.jit
def read(mail, number, WARPS: gl.constexpr, BY_WARP: gl.constexpr = False):
    """Wait for item `number`, and return the item.

    WARPS: warps of the reading partition.  Each warp reads by itself if BY_WARP, or if there are 8 warps or more.
    """
    at = number & 1
    if WARPS >= 8 or BY_WARP:
        await_at(mail.full_at + at * 8, (number >> 1) & 1)
    else:
        mbarrier.wait(mail.full.index(at), (number >> 1) & 1)
    x = ()
    for field in gl.static_range(13):
        x = x + (_get(mail, at, field, WARPS),)  # type: ignore[assignment]
    item = Item(Block(x[0], x[1], x[2], x[3], x[4], x[5]), x[6], x[7], x[8], x[9], x[9], x[10], x[11], x[12])  # type: ignore[misc]
    if WARPS >= 8 or BY_WARP:
        arrive_at(after_warp(mail.empty_at + at * 8))
    else:
        mbarrier.arrive(mail.empty.index(at), count=1)
    return item
