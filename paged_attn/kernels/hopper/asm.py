"""Inline assembly, and what it is for."""

import hashlib
import itertools
import math
import struct
from typing import NamedTuple

import triton

from .shim import gl, gluon


@gluon.jit
def pin(x):
    """The values x of 16 or 32 bits, in use here as far as LLVM can tell.

    So it may not sink their conversion, nor use the registers of an operand that the tensor cores still read.
    """
    PACK: gl.constexpr = 32 // x.dtype.primitive_bitwidth
    return gl.inline_asm_elementwise("", "=r,0", [x], dtype=x.dtype, is_pure=False, pack=PACK)


def _number(x: float) -> str:
    """A float32 as PTX writes it."""
    return f"0f{struct.pack('>f', x).hex()}"


def _scale_unless_one(registers: int) -> str:
    """acc *= factor for so many registers, skipped by a warp in which every factor is 1."""
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
    """acc * factor, seen `by_thread`: without the vote every tile pays for it, though the maximum rarely moves."""
    if DIM % 128 == 0:
        return gl.inline_asm_elementwise(_ASM_64, _IN_64, [acc, factor], dtype=gl.float32, is_pure=False, pack=64)
    elif DIM % 64 == 0:
        return gl.inline_asm_elementwise(_ASM_32, _IN_32, [acc, factor], dtype=gl.float32, is_pure=False, pack=32)
    else:
        return acc * factor


def _raise(slack: float, nan: bool) -> str:
    """Of two rows the new maximum and the factor of what was there before; a warp leaves early where none moves.

    nan: not a number counts as larger than any; the factor is none then, nor where the maximum is infinite.
    """
    number = _number(slack)
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


SLACK, FP8_SLACK = 8.0, 3.75  # how much too small a maximum may be, base 2
_RAISE = gl.constexpr(_raise(SLACK, False))
_RAISE_FP8 = gl.constexpr(_raise(FP8_SLACK, True))
_TWO_FLOATS = gl.constexpr((gl.float32, gl.float32))


@gluon.jit
def raise_max(top, row_max, FP8: gl.constexpr):
    """(maximum [R, 4] of rows, exp2 of its fall) from the threads' own: row_max unless a row's is larger by the slack.

    The threads of a row ask each other only where one in the warp has such a maximum.
    The branch is there for ptxas: it moves waits for products before all that is free to wait, and not before a branch.
    So the maxima are found while the last product runs.
    """
    ASM: gl.constexpr = _RAISE_FP8 if FP8 else _RAISE
    return gl.inline_asm_elementwise(
        ASM, "=&f,=&f,=&f,=&f,f,f,f,f", [top, row_max], dtype=_TWO_FLOATS, is_pure=False, pack=2
    )


_WORD_AND_SUM = gl.constexpr((gl.int32, gl.float32))
LIMIT = 8192.0  # of a thread's sum of weights: below it none is larger, and float16 has room for all of them
HUGE = 2.0**14  # a maximum, base 2, from which on a product that is not rounded first is more than 2^-10 off it
_ROUND = {"bf16": "cvt.rn.bf16x2.f32", "fp16": "cvt.rn.f16x2.f32"}


class Cap(NamedTuple):
    """tanh(x) as x times a polynomial in x^2, least relative error up to some x.

    The last coefficient is positive and the whole rises, so what lies beyond comes out too large, and is found out.
    """

    coefficients: tuple[float, ...]
    largest: float  # tanh(x) up to which it holds


# by number of terms: 2^-11.1 off at most, as the instruction is; 2^-21.5 off
CAPS = {
    3: Cap((0.999539754, -0.321939022, 0.0885777204), 0.6993),
    5: Cap((0.999999668, -0.333299804, 0.132783159, -0.0507313454, 0.0136531115), 0.6089),
}
# A weight, base 2, that does not count beside the largest: what the polynomials cap too far below may weigh that much.
NOTHING = -24.0


def _weigh_pair(dtype: str, terms: int) -> str:
    """Of no term scores are powers themselves; of one that times it, of more an odd polynomial."""
    pairs = (("a", "$2"), ("b", "$3"))
    coefficients, shift = [f"${4 + i}" for i in range(terms)], f"${4 + terms}"
    text = ""
    for x, score in pairs:
        if terms > 1:
            last, *others = reversed(coefficients)
            text += f" mul.rn.f32 s, {score}, {score}; fma.rn.f32 {x}, s, {last}, {others[0]};"
            text += "".join(f" fma.rn.f32 {x}, s, {x}, {other};" for other in others[1:])
            text += f" fma.rn.f32 {x}, {score}, {x}, {shift};"
        elif terms:
            text += f" fma.rn.f32 {x}, {score}, {coefficients[0]}, {shift};"
    text += "".join(f" ex2.approx.ftz.f32 {x}, {x if terms else score};" for x, score in pairs)
    return f"{{ .reg .f32 a, b, s;{text} {_ROUND[dtype]} $0, b, a; add.f32 $1, a, b; }}"


_PAIRS = {key: _weigh_pair(*key) for key in itertools.product(_ROUND, (0, 1, *CAPS))}


def _capped(to: str, score: str, factor: str, terms: int) -> str:
    """tanh(score * factor) beside a polynomial of so many terms: as exactly; minus infinity remains what it is."""
    nothing, one, less = _number(float("-inf")), _number(1.0), _number(-2.0)
    text = f" setp.eq.f32 any, {score}, {nothing}; mul.rn.f32 {to}, {score}, {factor};"
    if terms == 3:
        text += f" tanh.approx.f32 {to}, {to};"
    else:  # 1 - 2 / (1 + e^2x)
        text += f" mul.rn.f32 {to}, {to}, {_number(2 * math.log2(math.e))}; ex2.approx.ftz.f32 {to}, {to};"
        text += f" add.f32 {to}, {to}, {one}; rcp.approx.ftz.f32 {to}, {to}; fma.rn.f32 {to}, {to}, {less}, {one};"
    return text + f" @any mov.f32 {to}, {nothing};"


def _scaled(to: str, score: str, unit: str, shift: str, rounded: str) -> str:
    """score * unit + shift, by one rounding or, where a predicate says so, by two; '': there is none."""
    fused = f"fma.rn.f32 {to}, {score}, {unit}, {shift};"
    if not rounded:
        return f" {fused}"
    apart = f" @{rounded} mul.rn.f32 {to}, {score}, {unit}; @{rounded} add.rn.f32 {to}, {to}, {shift};"
    return f"{apart} @!{rounded} {fused}"


def _weigh_again(dtype: str, pairs: int, parts: int, any_size: bool, terms: int) -> tuple[str, str]:
    """(assembly, constraints) of `weigh_again` for so many pairs of a thread, which belong to its two rows in turn.

    parts: of results, as many of each.  terms: of the polynomial that has capped scores; 0: they are not to be.
    """

    def operands(number: int) -> list[str]:
        return [f"${number * pairs + i}" for i in range(pairs)]

    words, sums, tops, decays = (operands(i) for i in range(4))
    results = [operands(4 + i) for i in range(parts)]
    even, odd, old_sums, old_tops, units, shifts = (operands(5 + parts + i) for i in range(6))
    caps, least_tops, largest = (operands(11 + 2 * parts + i) for i in range(3))
    nothing, limit, one, huge = map(_number, (float("-inf"), LIMIT, 1.0, HUGE))
    text = "{ .reg .pred p0, p1, q0, q1, any; .reg .f32 a, b, s0, s1, t0, t1, m0, m1, n0, n1, l0, l1;"
    for i in (0, 1):
        text += f" mov.f32 {sums[i]}, {old_sums[i]}; mov.f32 {tops[i]}, {old_tops[i]}; mov.f32 {decays[i]}, {one};"
        if terms:  # no sum, and so no weight, of more than the polynomial holds for
            text += f" sub.f32 a, {largest[i]}, {old_tops[i]}; min.f32 a, a, {_number(math.log2(LIMIT))};"
            text += f" ex2.approx.ftz.f32 l{i}, a; setp.lt.f32 q{i}, {old_tops[i]}, {least_tops[i]};"
        elif any_size:  # minus infinity is huge, too
            text += f" mov.f32 l{i}, {limit}; abs.f32 a, {old_tops[i]}; setp.gt.f32 q{i}, a, {huge};"
        else:
            text += f" mov.f32 l{i}, {limit}; setp.eq.f32 q{i}, {old_tops[i]}, {nothing};"
        text += f" setp.gt.or.f32 p{i}, {old_sums[i]}, l{i}, q{i};"
    text += " or.pred any, p0, p1; vote.sync.any.pred any, any, 0xffffffff; @!any bra KEEP;"
    for k in range(pairs):
        i = k & 1
        text += f" max.f32 a, {even[k]}, {odd[k]};" + (f" max.f32 m{i}, m{i}, a;" if k > 1 else f" mov.f32 m{i}, a;")
    for i in (0, 1):
        if terms:
            text += _capped(f"m{i}", f"m{i}", caps[i], terms)
        text += _scaled(f"m{i}", f"m{i}", units[i], shifts[i], f"q{i}" * any_size) + f" mov.f32 a, {old_sums[i]};"
        for lanes in (1, 2):  # the threads of a row
            text += f" shfl.sync.bfly.b32 b, m{i}, {lanes}, 31, -1; max.f32 m{i}, m{i}, b;"
            text += f" shfl.sync.bfly.b32 b, a, {lanes}, 31, -1; max.f32 a, a, b;"
        again = f"q{i}" if terms else f"p{i}"  # other rows keep weights that the polynomial made
        text += f" setp.gt.or.f32 {again}, a, l{i}, q{i};"
        text += f" setp.gt.and.f32 p{i}, m{i}, {old_tops[i]}, {again}; @p{i} mov.f32 {tops[i]}, m{i};"
        text += f" sub.f32 a, {old_tops[i]}, m{i}; @p{i} ex2.approx.ftz.f32 {decays[i]}, a;"
        if any_size:
            text += f" abs.f32 a, {tops[i]}; setp.gt.or.f32 q{i}, a, {huge}, q{i};"
        text += f" setp.eq.f32 any, {tops[i]}, {nothing}; sub.f32 n{i}, {shifts[i]}, {tops[i]};"
        text += f" @any mov.f32 n{i}, {shifts[i]};"
        # infinity less itself, beside a sink of infinity, is none
        text += f" setp.eq.f32 any, {shifts[i]}, {tops[i]}; @any mov.f32 n{i}, {_number(0.0)};"
    for k in range(pairs):
        i = k & 1
        for x, score in (("a", even[k]), ("b", odd[k])):
            if terms:
                text += _capped(x, score, caps[i], terms)
            text += _scaled(x, x if terms else score, units[i], f"n{i}", f"q{i}" * any_size)
            text += f" ex2.approx.ftz.f32 {x}, {x};"
        text += f" {f'@q{i} ' * (terms > 0)}{_ROUND[dtype]} {words[k]}, b, a;"
        text += f" add.f32 s{i}, s{i}, a; add.f32 t{i}, t{i}, b;" if k > 1 else f" mov.f32 s{i}, a; mov.f32 t{i}, b;"
    for i in (0, 1):
        if any_size or terms:
            text += f" or.pred p{i}, p{i}, q{i};"
        text += f" add.f32 s{i}, s{i}, t{i}; @p{i} mov.f32 {sums[i]}, s{i};"
    text += " wgmma.wait_group.sync.aligned 0;"
    for part in results:
        text += "".join(f" mul.f32 {part[k]}, {part[k]}, {decays[k & 1]};" for k in range(pairs))
    text += " KEEP: mov.pred any, p0; }"
    # what is written before all is read has registers of its own
    outputs = ["=r"] * pairs + ["=&f"] * (3 * pairs) + ["=f"] * (parts * pairs)
    inputs, more = ["f"] * (6 * pairs), ["f"] * (3 * pairs * (terms > 0))
    in_place = [str(i) for i in range((4 + parts) * pairs)]
    return text, ",".join(outputs + in_place[:pairs] + inputs + in_place[4 * pairs :] + more)


_AGAIN = {
    (*key, any_size, terms): _weigh_again(*key, any_size, terms)
    for key in itertools.product(_ROUND, (16, 32), (1, 2, 4, 8))
    for any_size, terms in ((False, 0), (True, 0), *((False, terms) for terms in CAPS))
}
# Kernels on disk are known by what their functions read, and not by what these look up.
DIGEST = gl.constexpr(hashlib.sha256(repr((_PAIRS, _AGAIN, CAPS)).encode()).hexdigest())


@triton.constexpr_function
def cap_of(terms, digest):
    return CAPS[terms]


@triton.constexpr_function
def _pairs(dtype, terms, digest):
    return _PAIRS[str(dtype), terms], "=&r,=&f" + ",f" * (2 + terms + (terms > 0))


@triton.constexpr_function
def _again(dtype, pairs, parts, any_size, terms, digest):
    return _AGAIN[str(dtype), pairs, parts, any_size, terms]


@triton.constexpr_function
def _word_and_floats(floats):
    return (gl.int32,) + (gl.float32,) * floats


@gluon.jit
def weigh_pairs(even, odd, coefficients, shift, dtype: gl.constexpr):
    """(words of exp2(f(x)) of two scores x in a 16-bit type, even's the lower, and their sums).

    f(x) is x; of one coefficient a x * a + shift; of more than that x * (a + b x^2 + c x^4 ...) + shift.
    """
    ASM: gl.constexpr = _pairs(dtype, len(coefficients), DIGEST)
    operands = (even, odd) + coefficients
    if len(coefficients) > 0:
        operands = operands + (shift,)
    return gl.inline_asm_elementwise(ASM[0], ASM[1], operands, dtype=_WORD_AND_SUM, is_pure=True, pack=1)


@gluon.jit
def weigh_again(
    words, even, odd, sums, row_max, unit, shift, results, cap, ANY_SIZE: gl.constexpr, TERMS: gl.constexpr,
    dtype: gl.constexpr,
):  # fmt: skip
    """(words, sums, maxima, decays, *results) after a look at sums: where one is too large its row gets a new maximum.

    What weighs is exp2(x * unit + shift - maximum).  Operands are as many as words, but of sums, maxima and decays the
    first of a thread's rows count.  A row that has no maximum yet gets one, too; a warp of neither leaves early.
    results: parts of a product that may still run.  The branch waits for it and multiplies it by the decays: one of its
    own, behind a wait, would have every tile vote once more and jump over it.
    cap: nothing, or (a, least maximum, largest score) where words come from a polynomial of so many TERMS for
    tanh(x * a), which is what weighs then.  A row is weighed again by special functions where a score may be larger, or
    where its maximum is so low that what is too far below it would count.
    """
    PAIRS: gl.constexpr = 2 * words.shape[1]
    ASM: gl.constexpr = _again(dtype, PAIRS, len(results), ANY_SIZE, TERMS, DIGEST)
    DTYPES: gl.constexpr = _word_and_floats(3 + len(results))
    operands = (words, even, odd, sums, row_max, unit, shift) + results + cap
    return gl.inline_asm_elementwise(ASM[0], ASM[1], operands, dtype=DTYPES, is_pure=False, pack=PAIRS)


_BEYOND = gl.constexpr(
    f"{{ .reg .pred p; setp.gtu.f32 p, $1, {_number(LIMIT)};"
    " vote.sync.any.pred p, p, 0xffffffff; selp.u32 $0, 1, 0, p; }"
)


@gluon.jit
def any_beyond(sums):
    """1 where one of a warp's numbers, one a thread, is beyond the limit of a thread's sum or no number, else 0."""
    return gl.inline_asm_elementwise(_BEYOND, "=r,f", [sums], dtype=gl.int32, is_pure=False, pack=1)


_LOGISTIC = gl.constexpr(
    "{ .reg .f32 a; ex2.approx.ftz.f32 a, $1; add.f32 a, a, 0f3F800000; rcp.approx.ftz.f32 $0, a; }"
)


@gluon.jit
def logistic(power):
    """1 / (1 + 2^power)."""
    return gl.inline_asm_elementwise(_LOGISTIC, "=f,f", [power], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def tanh(x):
    """By one instruction, off by 2^-11 of itself at most."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def exp2(x):
    """2^x by one instruction; what is too small for a normal number is 0."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


_E4M3 = gl.constexpr(
    "{ .reg .b16 lower, upper; mov.b32 {lower, upper}, $2;"
    " cvt.rn.f16x2.e4m3x2 $0, lower; cvt.rn.f16x2.e4m3x2 $1, upper; }"
)
_E5M2 = gl.constexpr("prmt.b32 $0, $2, 0, 0x1404; prmt.b32 $1, $2, 0, 0x3424;")  # float16's upper bytes
_EXP2_WORDS = gl.constexpr(
    "{ .reg .b16 lower, upper; .reg .f32 a, b, c, d;"
    " fma.rn.f32 a, $2, $6, $7; fma.rn.f32 b, $3, $6, $7; fma.rn.f32 c, $4, $6, $7; fma.rn.f32 d, $5, $6, $7;"
    " ex2.approx.ftz.f32 a, a; ex2.approx.ftz.f32 b, b; cvt.rn.satfinite.e4m3x2.f32 lower, b, a; add.f32 a, a, b;"
    " ex2.approx.ftz.f32 c, c; ex2.approx.ftz.f32 d, d; cvt.rn.satfinite.e4m3x2.f32 upper, d, c; add.f32 c, c, d;"
    " mov.b32 $0, {lower, upper}; add.f32 $1, a, c; }"
)
_TRANSPOSE = gl.constexpr(
    "{ .reg .b32 a, b, c, d;"
    " prmt.b32 a, $4, $5, 0x5140; prmt.b32 b, $6, $7, 0x5140; prmt.b32 c, $4, $5, 0x7362; prmt.b32 d, $6, $7, 0x7362;"
    " prmt.b32 $0, a, b, 0x5410; prmt.b32 $1, a, b, 0x7632; prmt.b32 $2, c, d, 0x5410; prmt.b32 $3, c, d, 0x7632; }"
)
_TWO = gl.constexpr((gl.int32, gl.int32))
_FOUR = gl.constexpr((gl.int32, gl.int32, gl.int32, gl.int32))


@gluon.jit
def widen_bytes(x, FP8: gl.constexpr):
    """Words of four fp8 numbers as (words of the lower two, of the upper two) in float16.

    Element by element the compiler would convert to float32 first.
    """
    ASM: gl.constexpr = _E4M3 if FP8 == 3 else _E5M2
    return gl.inline_asm_elementwise(ASM, "=r,=r,r", [x], dtype=_TWO, is_pure=True, pack=1)


def _in_two() -> str:
    """Infinity, which would become the largest number, leaves a rest that is none: its product with 0 is added.

    In one piece, for ptxas 12.8 makes one instruction of two conversions whose results are stored side by side, and
    what else uses the lower one then reads a register that nobody writes.
    """
    text = "{ .reg .b16 p, q, x, y; .reg .b32 h; .reg .f32 a, b, c, d;"
    text += " cvt.rn.satfinite.e4m3x2.f32 p, $3, $2; cvt.rn.satfinite.e4m3x2.f32 q, $5, $4; mov.b32 $0, {p, q};"
    for pair, first, second, lower, upper in (("p", "a", "b", "$2", "$3"), ("q", "c", "d", "$4", "$5")):
        text += f" cvt.rn.f16x2.e4m3x2 h, {pair}; mov.b32 {{x, y}}, h; cvt.f32.f16 {first}, x; cvt.f32.f16 {second}, y;"
        for number, whole in ((first, lower), (second, upper)):
            text += f" sub.f32 {number}, {whole}, {number}; fma.rn.f32 {number}, {whole}, {_number(0.0)}, {number};"
    text += " cvt.rn.satfinite.e4m3x2.f32 p, b, a; cvt.rn.satfinite.e4m3x2.f32 q, d, c; mov.b32 $1, {p, q}; }"
    return text


_IN_TWO = gl.constexpr(_in_two())


@gluon.jit
def e4m3_in_two(a, b, c, d):
    """(words of four numbers in e4m3, a's the lowest, words of what these lack)."""
    return gl.inline_asm_elementwise(_IN_TWO, "=&r,=&r,f,f,f,f", [a, b, c, d], dtype=_TWO, is_pure=True, pack=1)


_E4M3_APART = gl.constexpr(
    "{ .reg .b16 lower, upper; .reg .b32 a, b; mov.b32 {lower, upper}, $4;"
    " cvt.rn.f16x2.e4m3x2 a, lower; cvt.rn.f16x2.e4m3x2 b, upper; mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b; }"
)
_E5M2_APART = gl.constexpr(
    "{ .reg .b32 a, b; prmt.b32 a, $4, 0, 0x1404; prmt.b32 b, $4, 0, 0x3424;"
    " mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b; }"
)
_HALVES_4 = gl.constexpr((gl.float16,) * 4)
_HALVES_8 = gl.constexpr((gl.float16,) * 8)


def _pairs_apart(words: str) -> str:
    """Four words of two float16 each from words $8 and $9 of two keys, and their halves."""
    halves = " ".join(f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, {word};" for i, word in enumerate("abcd"))
    return f"{{ .reg .b32 a, b, c, d, x, y; .reg .b16 l, u; {words} {halves} }}"


_E4M3_PAIRS_APART = gl.constexpr(
    _pairs_apart(
        "prmt.b32 x, $8, $9, 0x5140; prmt.b32 y, $8, $9, 0x7362;"
        " mov.b32 {l, u}, x; cvt.rn.f16x2.e4m3x2 a, l; cvt.rn.f16x2.e4m3x2 b, u;"
        " mov.b32 {l, u}, y; cvt.rn.f16x2.e4m3x2 c, l; cvt.rn.f16x2.e4m3x2 d, u;"
    )
)
_E5M2_PAIRS_APART = gl.constexpr(
    _pairs_apart(
        "prmt.b32 x, $8, $9, 0x5140; prmt.b32 y, $8, $9, 0x7362;"
        " prmt.b32 a, x, 0, 0x1404; prmt.b32 b, x, 0, 0x3424; prmt.b32 c, y, 0, 0x1404; prmt.b32 d, y, 0, 0x3424;"
    )
)


@gluon.jit
def widen_bytes_apart(x, FP8: gl.constexpr):
    """The four fp8 numbers of words, in float16."""
    ASM: gl.constexpr = _E4M3_APART if FP8 == 3 else _E5M2_APART
    return gl.inline_asm_elementwise(ASM, "=h,=h,=h,=h,r", [x], dtype=_HALVES_4, is_pure=True, pack=1)


_E4M3_PAIR = gl.constexpr("{ .reg .b32 w; cvt.rn.f16x2.e4m3x2 w, $2; mov.b32 {$0, $1}, w; }")
_E5M2_PAIR = gl.constexpr("and.b16 $1, $2, 0xFF00; shl.b16 $0, $2, 8;")
_HALVES_2 = gl.constexpr((gl.float16, gl.float16))


@gluon.jit
def widen_pair_apart(x, FP8: gl.constexpr):
    """The two fp8 numbers of 16 bits, in float16."""
    ASM: gl.constexpr = _E4M3_PAIR if FP8 == 3 else _E5M2_PAIR
    return gl.inline_asm_elementwise(ASM, "=&h,=&h,h", [x], dtype=_HALVES_2, is_pure=True, pack=1)


@gluon.jit
def widen_pairs_apart(even, odd, FP8: gl.constexpr):
    """Of words of two keys the first, second, ... fp8 numbers, each of both keys, in float16."""
    ASM: gl.constexpr = _E4M3_PAIRS_APART if FP8 == 3 else _E5M2_PAIRS_APART
    return gl.inline_asm_elementwise(
        ASM, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [even, odd], dtype=_HALVES_8, is_pure=True, pack=1
    )


_E4M3_HALVES_APART = gl.constexpr(
    "{ .reg .b32 e, o, x; .reg .b16 l, u; cvt.u32.u16 e, $4; cvt.u32.u16 o, $5; prmt.b32 x, e, o, 0x5140;"
    " mov.b32 {l, u}, x; cvt.rn.f16x2.e4m3x2 e, l; cvt.rn.f16x2.e4m3x2 o, u;"
    " mov.b32 {$0, $1}, e; mov.b32 {$2, $3}, o; }"
)
_E5M2_HALVES_APART = gl.constexpr(
    "{ .reg .b32 e, o; cvt.u32.u16 e, $4; cvt.u32.u16 o, $5; prmt.b32 e, e, o, 0x5140;"
    " prmt.b32 o, e, 0, 0x3424; prmt.b32 e, e, 0, 0x1404; mov.b32 {$0, $1}, e; mov.b32 {$2, $3}, o; }"
)


@gluon.jit
def widen_halves_apart(even, odd, FP8: gl.constexpr):
    """`widen_pairs_apart` of 16 bits of two keys: the first number of both keys, and the second, in float16."""
    ASM: gl.constexpr = _E4M3_HALVES_APART if FP8 == 3 else _E5M2_HALVES_APART
    return gl.inline_asm_elementwise(ASM, "=h,=h,=h,=h,h,h", [even, odd], dtype=_HALVES_4, is_pure=True, pack=1)


@gluon.jit
def exp2_words(a, b, c, d, unit, shift):
    """(words of exp2(x * unit + shift) of four x in e4m3, a's the lowest, and their sums, not rounded)."""
    return gl.inline_asm_elementwise(
        _EXP2_WORDS, "=r,=f,f,f,f,f,f,f", [a, b, c, d, unit, shift], dtype=_WORD_AND_SUM, is_pure=True, pack=1
    )


# A line through each octave: the bits of a float16 are 2^10 times its power of two plus 15, but for where it lies
# between two of them.  There 2^x is below the line by up to 6%, 4% on average: the line is lowered by that.
OCTAVES, BIAS, LOWERED = 32.0, 15.0, 0.0573


def _line_words() -> str:
    """Four floats in [1/2, 1], times 2^24: 2^24 less 2^8 times the bits of a weight in float16.

    Numbers in that range are 2^-24 apart.  The larger a weight, the smaller they are, for saturation has to make
    zeros of what is far below.
    """
    every = "".join(f" fma.rn.sat.f32 {x}, ${i}, $5, $6;" for i, x in enumerate("abcd", 1))
    return (
        "{ .reg .b16 lower, upper; .reg .b32 p, q; .reg .f32 a, b, c, d;" + every + " prmt.b32 p, a, b, 0x6521;"
        " prmt.b32 q, c, d, 0x6521; sub.u32 p, 0x80008000, p; sub.u32 q, 0x80008000, q;"
        " cvt.rn.satfinite.e4m3x2.f16x2 lower, p; cvt.rn.satfinite.e4m3x2.f16x2 upper, q;"
        " mov.b32 $0, {lower, upper}; }"
    )


_LINE_WORDS = gl.constexpr(_line_words())
# what is added to an exponent, and what the sum is multiplied by, before 1 is added
LINE_SHIFT, LINE_UNIT = BIAS - LOWERED, -0.5 / OCTAVES
_LINE_SHIFT, _LINE_UNIT = gl.constexpr(LINE_SHIFT), gl.constexpr(LINE_UNIT)


@gluon.jit
def line_words(a, b, c, d, unit, shift):
    """`exp2_words` without exponentials (Schraudolph 1999), up to 4% off: 2.5 instructions a weight.

    Exponents below -15 and NaN become 0.  None may be above 16, and none is, that far below what a maximum may lag.
    """
    unit, shift = unit * _LINE_UNIT, (shift + _LINE_SHIFT) * _LINE_UNIT + 1.0
    return gl.inline_asm_elementwise(
        _LINE_WORDS, "=r,f,f,f,f,f,f", [a, b, c, d, unit, shift], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def transpose_bytes(a, b, c, d):
    """Four words of four bytes as the words of their first bytes, second bytes, ...: 8 instructions for 16 bytes."""
    return gl.inline_asm_elementwise(_TRANSPOSE, "=r,=r,=r,=r,r,r,r,r", [a, b, c, d], dtype=_FOUR, is_pure=True, pack=1)


def _beside(pair: str) -> str:
    """Two words of 16-bit pairs: an even lane's first one and its neighbour's, or that one's second and its own."""
    return (
        "{ .reg .pred p; .reg .b32 l, a, b, x, y; "
        f"cvt.rn.{pair}.f32 a, $3, $2; cvt.rn.{pair}.f32 b, $5, $4; "
        "mov.u32 l, %laneid; and.b32 l, l, 1; setp.ne.u32 p, l, 0; selp.b32 x, a, b, p; "
        "shfl.sync.bfly.b32 y, x, 1, 31, 0xffffffff; selp.b32 $0, y, a, p; selp.b32 $1, b, y, p; }"
    )


_BESIDE_BF16 = gl.constexpr(_beside("bf16x2"))
_BESIDE_F16 = gl.constexpr(_beside("f16x2"))


@gluon.jit
def words_beside(a, b, c, d, DTYPE: gl.constexpr):
    """Two words that are neighbours in a row, of pairs (a, b) and (c, d) that are four words apart there.

    Four lanes have a word each of both fours; after it even lanes have two words of the first, odd lanes of the second.
    """
    ASM: gl.constexpr = _BESIDE_BF16 if gl.bfloat16 == DTYPE else _BESIDE_F16
    return gl.inline_asm_elementwise(ASM, "=r,=r,f,f,f,f", [a, b, c, d], dtype=_TWO, is_pure=False, pack=1)


# What lies behind an array of barriers, or in the first slot of a ring, so that its address can be found.
TAG = gl.constexpr(0x0B5E55EDBA221E25)


@triton.constexpr_function
def _find(unit):
    """From the end of shared memory downwards, 32 units of so many bytes at a time.

    A tag that no unit begins with stops the program.
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


@gluon.jit
def find_tag(tag, UNIT: gl.constexpr = 8):
    """Address in shared memory of the last tag, of which the warp has written one, at a multiple of UNIT bytes."""
    FIND: gl.constexpr = _find(UNIT)
    return gl.inline_asm_elementwise(FIND, "=&r,l,~{memory}", [tag], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def init_at(address, arrivals):
    """mbarrier.init of one barrier with each thread, unless it is complete after no arrivals."""
    gl.inline_asm_elementwise(_INIT, "=r,r,r,~{memory}", [address, arrivals], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_at(address, phase, there=None):
    """mbarrier.wait, of each thread for itself: between two of Triton's all threads of a partition meet.

    there: whether to wait, if that is not certain.
    """
    if there is None:
        gl.inline_asm_elementwise(_AWAIT, "=r,r,r,~{memory}", [address, phase], dtype=gl.int32, is_pure=False, pack=1)
    else:
        operands = [address, phase, there.to(gl.int32)]
        gl.inline_asm_elementwise(_AWAIT_IF, "=r,r,r,r,~{memory}", operands, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def arrive_at(address):
    """mbarrier.arrive of one lane for its warp, after products that are done; what lanes read comes before `meet`."""
    gl.inline_asm_elementwise(_ARRIVE, "=r,r,~{memory}", [address], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def meet(x):
    """x, after a barrier of the warp: its lanes have read what it depends on."""
    return gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff;", "=r,0,~{memory}", [x], dtype=gl.int32, is_pure=False, pack=1
    )


# A kernel's first two warpgroups take turns by the last two of a program's barriers, for Triton takes the first ones.
# Each waits at its own, where the other arrives.  That the last turn is given nobody waits for.
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
    """Once by each thread of two warpgroups."""
    nothing = gl.full([32], 0, gl.int32, gl.BlockedLayout([1], [32], [8], [0]))
    gl.inline_asm_elementwise(ASM, "=r,r,~{memory}", [nothing], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def begin_turns():
    """The second warpgroup gives the first one a turn."""
    _execute(_BEGIN_TURNS)


@gluon.jit
def take_turn():
    """Wait until the other warpgroup has given its turn."""
    _execute(_TAKE_TURN)


@gluon.jit
def give_turn():
    """To the other warpgroup."""
    _execute(_GIVE_TURN)


@triton.constexpr_function
def _cores(rows, columns, dims, dtype):
    """A product of each warpgroup, of 64 of `rows` rows, from the address of its queries and that of the keys.

    The first are swizzled rows of 128 bytes, 64 dims beside the next 64; the others matrices of 8 keys x 16 bytes, the
    dims of 8 keys before those of the next 8.
    """
    n = columns // 2
    numbers = ",".join(f"${i}" for i in range(n))
    text = (
        "{ .reg .b32 q, k, q_form, k_form; .reg .b64 a, b; wgmma.fence.sync.aligned;"
        f" shr.u32 q, ${n}, 4; shr.u32 k, ${2 * n}, 4; add.u32 k, k, {8 << 16};"
        f" mov.u32 q_form, {1 << 30 | 64}; mov.u32 k_form, {dims};"
    )
    if rows > 64:
        text += " .reg .b32 group; mov.u32 group, %tid.x; shr.u32 group, group, 7; mad.lo.u32 q, group, 512, q;"
    for i in range(dims // 16):
        text += (
            f" .reg .b32 q{i}, k{i}; add.u32 q{i}, q, {i // 4 * rows * 8 + i % 4 * 2}; add.u32 k{i}, k, {i * 16};"
            f" mov.b64 a, {{q{i}, q_form}}; mov.b64 b, {{k{i}, k_form}};"
            f" wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{dtype}.{dtype}"
            f" {{{numbers}}}, a, b, {min(i, 1)}, 1, 1, 0, 0;"
        )
    return text + " wgmma.commit_group.sync.aligned; }"


@triton.constexpr_function
def _in_cores(columns):
    return ",".join(["=f"] * (columns // 2) + ["r"] * columns)


@gluon.jit
def multiply_cores(q_at, k_at, scores, DTYPE: gl.constexpr, DIM: gl.constexpr):
    """Start the product of queries [R, DIM] and keys [N, DIM] at these addresses, scores [R, N] once it is waited for.

    Of the same descriptors Triton 3.6 counts a base offset from product to product where nothing is swizzled, and for
    words that differ in both halves ptxas 12.8 adds to uniform registers that nobody has written.
    """
    ROWS: gl.constexpr = scores.shape[0]
    COLUMNS: gl.constexpr = scores.shape[1]
    ASM: gl.constexpr = _cores(ROWS, COLUMNS, DIM, "bf16" if gl.bfloat16 == DTYPE else "f16")
    IN: gl.constexpr = _in_cores(COLUMNS)
    nothing = gl.full([ROWS, COLUMNS], 0, gl.int32, scores.type.layout)
    return gl.inline_asm_elementwise(
        ASM, IN, [nothing + q_at, nothing + k_at], dtype=gl.float32, is_pure=False, pack=COLUMNS // 2
    )


_BRING = gl.constexpr(
    "{ .reg .pred p; setp.ne.u32 p, $3, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, $3; }"
)


@gluon.jit
def bring_near(address, size, wanted):
    """Have the L2 fetch so many bytes, steps of 16, from an address in memory on, for each thread that wants some."""
    operands = [address, size, wanted.to(gl.int32)]
    gl.inline_asm_elementwise(_BRING, "=r,l,r,r", operands, dtype=gl.int32, is_pure=False, pack=1)


_BRING_LINE = gl.constexpr("{ .reg .pred p; setp.ne.u32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, $2; }")


@gluon.jit
def bring_line(address, wanted):
    """`bring_near` of the line of memory that holds an address, which need not be a step of 16 bytes."""
    operands = [address, wanted.to(gl.int32)]
    gl.inline_asm_elementwise(_BRING_LINE, "=r,l,r", operands, dtype=gl.int32, is_pure=False, pack=1)


_SAME = gl.constexpr("redux.sync.or.b32 $0, $1, 0xffffffff;")


@gluon.jit
def same(x):
    """x, which all lanes of a warp have: ptxas knows it of this result, and not of what shuffles have made."""
    return gl.inline_asm_elementwise(_SAME, "=r,r", [gl.to_tensor(x)], dtype=gl.int32, is_pure=True, pack=1)
