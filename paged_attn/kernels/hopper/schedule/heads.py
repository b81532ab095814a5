"""`common/head_programs.py` by the warps of a consumer or by one that loads: which of them has which numbers."""

from ...common.head_programs import heads_at_once, programs_by_work, seqs_at_once, share_by_work
from ..layouts import heads_layout
from ..shim import gl, gluon

MAX_ELEMENTS = gl.constexpr(1024)  # heads times sequences: 32 of each thread of a consumer
MAX_ELEMENTS_OF_LOADERS = gl.constexpr(256)  # which have few registers


@gluon.jit
def share_of_heads(batch, mods, WARPS: gl.constexpr, S: gl.constexpr):
    """`share_by_work` in every warp alike."""
    HEADS: gl.constexpr = heads_at_once(S.KV_HEADS)
    MOST: gl.constexpr = MAX_ELEMENTS if WARPS > 1 else MAX_ELEMENTS_OF_LOADERS
    SEQS: gl.constexpr = seqs_at_once(S.KV_HEADS, S.SCAN, MOST)
    LAYOUT: gl.constexpr = heads_layout(HEADS, SEQS, WARPS)
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, LAYOUT))
    seq = gl.arange(0, SEQS, layout=gl.SliceLayout(0, LAYOUT))
    count = programs_by_work(batch, head, seq, mods, S)
    # as scans want them, with the same threads
    ALONE: gl.constexpr = gl.BlockedLayout([max(1, HEADS // 32)], [32], [WARPS], [0])
    count = gl.convert_layout(count, ALONE, assert_trivial=True)
    return share_by_work(count, gl.arange(0, HEADS, layout=ALONE), S)
