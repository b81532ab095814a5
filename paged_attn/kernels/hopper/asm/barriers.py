"""Barriers: mbarriers by their shared-memory address, and named barriers of two warpgroups.

`await_at` waits until the mbarrier at $1 has completed the phase of parity $2.  The PTX has a loop, because `try_wait`
gives up after some time:

    { .reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2; @!p bra WAIT; mov.u32 $0, $2; }

Warps find the address of an mbarrier by a tag (`find_tag`).

A kernel's first two warpgroups use the named barriers 11 to 15; Triton uses the lowest numbers.  For turns, each of the
two warpgroups waits at a barrier of its own, where the other warpgroup arrives.  `take_turn` is

    { .reg .b32 t; mov.u32 t, %tid.x; shr.u32 t, t, 7; add.u32 t, t, 14; bar.sync t, 256; mov.u32 $0, $1; }

Threads 0 to 127 wait at barrier 14, and threads 128 to 255 at barrier 15, each barrier for 128 waiting threads and 128
that only arrive.  No warpgroup waits for the final hand-over.
"""

import triton

from ..shim import gl, gluon

# Tag behind an array of barriers, by which warps find its address.  Tags in slots of rings are the next larger numbers.
TAG = gl.constexpr(0x0B5E55EDBA221E25)


@triton.constexpr_function
def _find(unit):
    """PTX: search shared memory for a tag at multiples of `unit` bytes, from the end downwards, 32 places at a time.

    A warp that finds no tag traps.
    """
    return (
        "{ .reg .pred found, inside; .reg .b32 base, at, lane; .reg .b64 word; "
        "bar.warp.sync 0xffffffff; mov.u32 base, global_smem; mov.u32 at, %dynamic_smem_size; "
        f"and.b32 at, at, {2**32 - unit:#x}; add.u32 at, at, base; "
        f"mov.u32 lane, %laneid; shl.b32 lane, lane, {unit.bit_length() - 1}; sub.u32 at, at, lane;"
        f" sub.u32 at, at, {unit}; mov.u32 $0, 0; "
        "NEXT: setp.ge.s32 inside, at, base; setp.ne.u32 found, base, base; "
        "@inside ld.shared.b64 word, [at]; @inside setp.eq.b64 found, word, $1; @found mov.u32 $0, at; "
        "vote.sync.any.pred found, found, 0xffffffff; @found bra FOUND; "
        f"vote.sync.any.pred inside, inside, 0xffffffff; sub.u32 at, at, {32 * unit}; @inside bra NEXT; trap; "
        "FOUND: redux.sync.max.u32 $0, $0, 0xffffffff; }"
    )


_AWAIT = gl.constexpr(
    "{ .reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2; @!p bra WAIT; mov.u32 $0, $2; }"
)
_AWAIT_IF = gl.constexpr(
    "{ .reg .pred p; setp.eq.u32 p, $3, 0; @p bra DONE;"
    " WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2; @!p bra WAIT; DONE: mov.u32 $0, $2; }"
)
_INIT = gl.constexpr(
    "{ .reg .pred p; setp.ne.u32 p, $2, 0; @p mbarrier.init.shared::cta.b64 [$1], $2; mov.u32 $0, $2; }"
)
_ARRIVE = gl.constexpr(
    "{ .reg .pred p; elect.sync _|p, 0xffffffff; @p mbarrier.arrive.shared::cta.b64 _, [$1]; mov.u32 $0, $1; }"
)

_ARRIVE_IF = gl.constexpr(
    "{ .reg .pred p, there; setp.ne.u32 there, $2, 0; elect.sync _|p, 0xffffffff; and.pred p, p, there;"
    " @p mbarrier.arrive.shared::cta.b64 _, [$1]; mov.u32 $0, $1; }"
)


@gluon.jit
def find_tag(tag, UNIT: gl.constexpr = 8):
    """Return the shared-memory address of the last copy of a tag, int64, at a multiple of UNIT bytes.

    The warp must have written a copy.
    """
    FIND: gl.constexpr = _find(UNIT)
    return gl.inline_asm_elementwise(FIND, "=&r,l,~{memory}", [tag], dtype=gl.int32, is_pure=False, pack=1)


@triton.constexpr_function
def _find_all(count, unit):
    """PTX: search for the tags t, t + 1, ..., t + count - 1 together, in all of shared memory; 0 for an absent tag."""
    found = [f"${i}" for i in range(count)]
    text = (
        "{ .reg .pred here, inside; .reg .b32 base, at, lane; .reg .b64 word, tag; "
        "bar.warp.sync 0xffffffff; mov.u32 base, global_smem; mov.u32 at, %dynamic_smem_size; "
        f"and.b32 at, at, {2**32 - unit:#x}; add.u32 at, at, base; "
        f"mov.u32 lane, %laneid; shl.b32 lane, lane, {unit.bit_length() - 1}; sub.u32 at, at, lane;"
        f" sub.u32 at, at, {unit}; {' '.join(f'mov.u32 {x}, 0;' for x in found)} "
        "NEXT: setp.ge.s32 inside, at, base; @inside ld.shared.b64 word, [at]; "
    )
    for i, x in enumerate(found):
        text += f"add.s64 tag, ${count}, {i}; setp.ne.u32 here, base, base; "
        text += f"@inside setp.eq.b64 here, word, tag; @here mov.u32 {x}, at; "
    text += f"vote.sync.any.pred inside, inside, 0xffffffff; sub.u32 at, at, {32 * unit}; @inside bra NEXT; "
    return text + " ".join(f"redux.sync.max.u32 {x}, {x}, 0xffffffff;" for x in found) + " }"


@triton.constexpr_function
def _found(count):
    return ",".join(["=&r"] * count) + ",l,~{memory}", (gl.int32,) * count


@gluon.jit
def find_tags(tag, COUNT: gl.constexpr, UNIT: gl.constexpr):
    """Return shared-memory addresses of the tags `tag` ... `tag + COUNT - 1`, at multiples of UNIT bytes.

    The warp must have written all of these tags.
    """
    FIND: gl.constexpr = _find_all(COUNT, UNIT)
    FOUND: gl.constexpr = _found(COUNT)
    return gl.inline_asm_elementwise(FIND, FOUND[0], [tag], dtype=FOUND[1], is_pure=False, pack=1)


@gluon.jit
def init_at(address, arrivals):
    """Initialise the mbarrier at `address` for `arrivals` arrivals, in each thread whose `arrivals` is not 0."""
    gl.inline_asm_elementwise(_INIT, "=r,r,r,~{memory}", [address, arrivals], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_at(address, phase, there=None):
    """Wait in each thread by itself until the mbarrier at `address` has completed the phase of parity `phase`.

    Triton's own waits are not used, because Triton synchronises all threads of a partition between two of them.  there:
    whether to wait, by default always.
    """
    if there is None:
        gl.inline_asm_elementwise(_AWAIT, "=r,r,r,~{memory}", [address, phase], dtype=gl.int32, is_pure=False, pack=1)
    else:
        operands = [address, phase, there.to(gl.int32)]
        gl.inline_asm_elementwise(_AWAIT_IF, "=r,r,r,r,~{memory}", operands, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def arrive_at(address, there=None):
    """Arrive at the mbarrier at `address`: one lane arrives for its warp.

    Products that read the guarded memory must be done.  If lanes have read that memory, pass the address through
    `after_warp`.  there: whether to arrive, by default always.
    """
    if there is None:
        gl.inline_asm_elementwise(_ARRIVE, "=r,r,~{memory}", [address], dtype=gl.int32, is_pure=False, pack=1)
    else:
        operands = [address, there.to(gl.int32)]
        gl.inline_asm_elementwise(_ARRIVE_IF, "=r,r,r,~{memory}", operands, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def after_warp(x):
    """Return x behind a barrier of the warp, where all lanes have finished their earlier reads."""
    return gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff;", "=r,0,~{memory}", [x], dtype=gl.int32, is_pure=False, pack=1
    )


# ---- named barriers ------------------------------------------------------------------------------


_BEGIN_TURNS = gl.constexpr(
    "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.ge.u32 p, t, 128; @p bar.arrive 14, 256; mov.u32 $0, $1; }"
)
_TAKE_TURN = gl.constexpr(
    "{ .reg .b32 t; mov.u32 t, %tid.x; shr.u32 t, t, 7; add.u32 t, t, 14; bar.sync t, 256; mov.u32 $0, $1; }"
)
_GIVE_TURN = gl.constexpr(
    "{ .reg .b32 t; mov.u32 t, %tid.x; shr.u32 t, t, 7; sub.u32 t, 15, t; bar.arrive t, 256; mov.u32 $0, $1; }"
)


@gluon.jit
def _execute(ASM: gl.constexpr):
    """Execute ASM once in each thread of a partition of two warpgroups."""
    nothing = gl.full([32], 0, gl.int32, gl.BlockedLayout([1], [32], [8], [0]))
    gl.inline_asm_elementwise(ASM, "=r,r,~{memory}", [nothing], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def begin_turns():
    """Give the first warpgroup its first turn: the second warpgroup arrives at the first warpgroup's barrier."""
    _execute(_BEGIN_TURNS)


@gluon.jit
def take_turn():
    """Wait until the other warpgroup has given this one the turn."""
    _execute(_TAKE_TURN)


@gluon.jit
def give_turn():
    """Give the turn to the other warpgroup."""
    _execute(_GIVE_TURN)


@triton.constexpr_function
def _at(what, barrier):
    return f"bar.{what} {barrier}, 256; mov.u32 $0, $1;"


@gluon.jit
def _alike(WHAT: gl.constexpr, BARRIER: gl.constexpr):
    """Execute bar.WHAT at named barrier BARRIER in each thread of a consumer; both consumers are single warpgroups."""
    ASM: gl.constexpr = _at(WHAT, BARRIER)
    gl.inline_asm_elementwise(ASM, "=r,r,~{memory}", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def meet_other():
    """Wait until all threads of both consumers are here."""
    _alike("sync", 13)


@gluon.jit
def tell_written(NUMBER: gl.constexpr):
    """Tell the other consumer, which calls `wait_written(NUMBER)`, that this consumer, NUMBER, has written."""
    _alike("arrive", 11 + NUMBER)


@gluon.jit
def wait_written(NUMBER: gl.constexpr):
    """Wait until the other consumer, NUMBER, has written; consumer NUMBER calls `wait_read` before it writes again."""
    _alike("sync", 11 + NUMBER)


@gluon.jit
def tell_read(NUMBER: gl.constexpr):
    """Tell the other consumer, NUMBER, that its data has been read and may be overwritten."""
    _alike("arrive", 14 + NUMBER)


@gluon.jit
def wait_read(NUMBER: gl.constexpr):
    """Wait, as consumer NUMBER, until the other consumer has read what NUMBER has written."""
    _alike("sync", 14 + NUMBER)
