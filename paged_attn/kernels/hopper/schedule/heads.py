"""`common/head_programs.py` by the warps of a consumer or by one that loads: which of them has which numbers."""

from ...common.head_programs import heads_at_once, programs_by_work, seqs_at_once, share_by_work
from ..asm.prefetch import bring_line
from ..layouts import heads_layout
from ..shim import gl, gluon
from .items import bring_lengths

MAX_UNITS_OF_A_WARP = gl.constexpr(128)  # heads times sequences at a time: few of each thread, and little machine code


@gluon.jit
def bring_heads(batch, mods, S: gl.constexpr, P: gl.constexpr):
    """Have the L2 fetch what `share_of_heads` asks for, while barriers are made."""
    bring_lengths(batch, P)
    head = gl.arange(0, 2 * P.ROWS, layout=gl.BlockedLayout([1], [32], [P.ROWS // 16], [0]))
    stride = 2 if mods.head_windows_stride is None else mods.head_windows_stride
    bring_line((mods.head_windows + head.to(gl.int64) * stride).to(gl.int64), head < S.KV_HEADS * S.GROUP)


@gluon.jit
def share_of_heads(batch, mods, WARPS: gl.constexpr, S: gl.constexpr):
    """`share_by_work` in each warp alike."""
    HEADS: gl.constexpr = heads_at_once(S.KV_HEADS)
    SEQS: gl.constexpr = seqs_at_once(HEADS, S.SCAN, MAX_UNITS_OF_A_WARP)
    LAYOUT: gl.constexpr = heads_layout(HEADS, SEQS, WARPS)
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, LAYOUT))
    seq = gl.arange(0, SEQS, layout=gl.SliceLayout(0, LAYOUT))
    return share_by_work(programs_by_work(batch, head, seq, mods, S), head, S)
