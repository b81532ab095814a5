"""Maxima of rows: raise maxima, and rescale results that were summed with the old maxima.

`rescale` multiplies registers $0..$31, which equal $32..$63 on entry, by $64..$95.  A thread has two rows, and pairs of
their registers alternate.

    { .reg .pred any, all; setp.neu.f32 any, $64, 0f3F800000; setp.neu.or.f32 any, $66, 0f3F800000, any;
      vote.sync.any.pred all, any, 0xffffffff; @!all bra KEEP;
      mul.f32 $0, $0, $64; mul.f32 $1, $1, $65; ... mul.f32 $31, $31, $95;
      KEEP: mov.pred any, all; }
"""

from ..shim import gl, gluon
from .instructions import literal


def _scale_unless_one(registers: int) -> str:
    """PTX: acc *= factor for `registers` registers; a warp in which every factor is 1 skips the products."""
    first = 2 * registers
    vote = (
        f"{{ .reg .pred any, all; setp.neu.f32 any, ${first}, 0f3F800000;"
        f" setp.neu.or.f32 any, ${first + 2}, 0f3F800000, any;"
        " vote.sync.any.pred all, any, 0xffffffff; @!all bra KEEP; "
    )
    products = " ".join(f"mul.f32 ${i}, ${i}, ${first + i};" for i in range(registers))
    return vote + products + " KEEP: mov.pred any, all; }"


def _constraints(registers: int) -> str:
    return ",".join(["=f"] * registers + [str(i) for i in range(registers)] + ["f"] * registers)


_ASM_32, _IN_32 = gl.constexpr(_scale_unless_one(32)), gl.constexpr(_constraints(32))
_ASM_64, _IN_64 = gl.constexpr(_scale_unless_one(64)), gl.constexpr(_constraints(64))


@gluon.jit
def rescale(acc, factor, DIM: gl.constexpr):
    """Return acc [R, N / 8, 4, 2] * factor [R, 1, 4, 1], float32 (`fragments.by_thread`).  DIM: N.

    Maxima rarely rise, so if 64 divides N, warps vote, and skip the products if all their factors are 1.
    """
    if DIM % 128 == 0:
        return gl.inline_asm_elementwise(_ASM_64, _IN_64, [acc, factor], dtype=gl.float32, is_pure=False, pack=64)
    elif DIM % 64 == 0:
        return gl.inline_asm_elementwise(_ASM_32, _IN_32, [acc, factor], dtype=gl.float32, is_pure=False, pack=32)
    else:
        return acc * factor


def _raise(slack: float, nan: bool) -> str:
    """PTX: (new maxima of two rows, factors of their old sums); a warp in which no maximum rises leaves early.

    nan: NaN counts as larger than any number, and the factor is NaN where the new maximum is NaN or infinite.
    """
    number = literal(slack)
    maximum, larger = ("max.NaN.f32", "setp.gtu.f32") if nan else ("max.f32", "setp.gt.f32")
    ask = "".join(
        f" shfl.sync.bfly.b32 z, {a}, {n}, 31, -1; {maximum} {b}, {a}, z;"
        for a, b, n in (("$4", "v", 1), ("v", "v", 2), ("$5", "w", 1), ("w", "w", 2))
    )
    infinite = " sub.f32 v, v, v; sub.f32 w, w, w; add.f32 x, x, v; add.f32 y, y, w;" if nan else ""
    return (
        "{ .reg .pred a, b, any; .reg .f32 v, w, x, y, z;"
        f" add.f32 x, $6, {number}; add.f32 y, $7, {number}; {larger} a, $4, x; {larger} b, $5, y;"
        " mov.f32 $0, $6; mov.f32 $1, $7; mov.f32 $2, 0f3F800000; mov.f32 $3, 0f3F800000;"
        " or.pred any, a, b; vote.sync.any.pred any, any, 0xffffffff; @!any bra KEEP;"
        + ask
        + f" {larger} a, v, x; {larger} b, w, y;"
        " @a mov.f32 $0, v; @b mov.f32 $1, w; @a sub.f32 x, $6, v; @b sub.f32 y, $7, w;"
        + infinite
        + " @a ex2.approx.ftz.f32 $2, x; @b ex2.approx.ftz.f32 $3, y; KEEP: mov.pred any, a; }"
    )


SLACK, FP8_SLACK = 8.0, 3.75  # a maximum is raised only if a score, base 2, exceeds the maximum by more than this
_RAISE = gl.constexpr(_raise(SLACK, False))
_RAISE_FP8 = gl.constexpr(_raise(FP8_SLACK, True))
_TWO_FLOATS = gl.constexpr((gl.float32, gl.float32))


@gluon.jit
def raise_max(top, row_max, FP8: gl.constexpr):
    """(maximum, decay), float32 [R, 4]: row_max and 1, unless a row's largest score is above row_max + slack.

    top [R, 4]: each thread's largest score of each row, base 2.  decay: exp2(row_max - maximum), the factor of old
    sums.  The four threads of a row exchange maxima only if some score of their warp is above its row_max + slack.

    The branch has a second use.  ptxas moves a wait for products ahead of arithmetic, but not ahead of a branch, so
    maxima are found while the last product runs.
    """
    ASM: gl.constexpr = _RAISE_FP8 if FP8 else _RAISE
    return gl.inline_asm_elementwise(
        ASM, "=&f,=&f,=&f,=&f,f,f,f,f", [top, row_max], dtype=_TWO_FLOATS, is_pure=False, pack=2
    )
