"""`common/head_programs.py` by the warps of a consumer or by one that loads: which of them has which numbers."""

from ...common.head_programs import heads_at_once, programs_by_work, seqs_at_once, share_by_work, units_of_heads
from ..layouts import heads_layout
from ..shim import gl, gluon

# Heads times sequences at a time: 16 of each thread of a consumer, and loaders have few registers.
MAX_ELEMENTS, MAX_ELEMENTS_OF_LOADERS = gl.constexpr(512), gl.constexpr(256)


@gluon.jit
def lanes_of_heads(WARPS: gl.constexpr, S: gl.constexpr):
    """(all KV heads, sequences at a time), counted from 0, in each warp alike."""
    HEADS: gl.constexpr = heads_at_once(S.KV_HEADS)
    MOST: gl.constexpr = MAX_ELEMENTS if WARPS > 1 else MAX_ELEMENTS_OF_LOADERS
    SEQS: gl.constexpr = seqs_at_once(S.KV_HEADS, S.SCAN, MOST)
    LAYOUT: gl.constexpr = heads_layout(HEADS, SEQS, WARPS)
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, LAYOUT))
    return head, gl.arange(0, SEQS, layout=gl.SliceLayout(0, LAYOUT))


@gluon.jit
def first_units(batch, mods, WARPS: gl.constexpr, S: gl.constexpr):
    """What `share_of_heads` needs of the first sequences, for memory to answer meanwhile."""
    head, seq = lanes_of_heads(WARPS, S)
    return units_of_heads(batch, 0, head, seq, mods, S)


@gluon.jit
def share_of_heads(batch, units, mods, WARPS: gl.constexpr, S: gl.constexpr):
    """`share_by_work` in each warp alike."""
    head, seq = lanes_of_heads(WARPS, S)
    return share_by_work(programs_by_work(batch, units, head, seq, mods, S), head, S)
