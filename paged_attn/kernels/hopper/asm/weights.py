"""Weights of a softmax in 16 bits, two in a word, and their sums; weights are made again if a maximum was too small.

`weigh_pairs` of two scores $2 and $3, with the factor $4 and shift $5, in bfloat16, is

    { .reg .f32 a, b, s; fma.rn.f32 a, $2, $4, $5; fma.rn.f32 b, $3, $4, $5;
      ex2.approx.ftz.f32 a, a; ex2.approx.ftz.f32 b, b; cvt.rn.bf16x2.f32 $0, b, a; add.f32 $1, a, b; }

With a softcap, a polynomial may cap small scores.  For rows that are weighed again, `exactly_capped` takes special
functions instead.  Its PTX for three terms, with the score and the result in m0 and the factor in, for example, $96, is

    setp.eq.f32 any, m0, 0fff800000; mul.rn.f32 m0, m0, $96; tanh.approx.f32 m0, m0; @any mov.f32 m0, 0fff800000;

where 0fff800000 is minus infinity: a masked score stays minus infinity.
"""

import hashlib
import itertools
import math
from typing import NamedTuple

import triton

from ..shim import gl, gluon
from .instructions import WORD_AND_SUM, literal


class Cap(NamedTuple):
    """Approximation of tanh(x) by x times a polynomial in x^2, with the least relative error up to some x.

    Beyond that x the polynomial rises, because its last coefficient is positive.  So larger scores come out too large.
    Their weights then exceed a limit, beyond which `weigh_again` weighs the row again.
    """

    coefficients: tuple[float, ...]
    largest: float  # tanh(x) at the largest x of the approximation


# Keys are numbers of terms.  Relative errors: 2^-11.1 with 3 terms, as tanh.approx; 2^-21.5 with 5 terms.
CAPS = {
    3: Cap((0.999539754, -0.321939022, 0.0885777204), 0.6993),
    5: Cap((0.999999668, -0.333299804, 0.132783159, -0.0507313454, 0.0136531115), 0.6089),
}
# log2 of a weight that is negligible beside the row's largest.  A polynomial makes very negative scores too low.  The
# true weights of such scores must be no larger than this weight; otherwise their row is weighed again.
MAX_NEGLIGIBLE_EXPONENT = -24.0

# Triton keys cached kernels by constants that their functions read, and not by dictionaries; so digests are constants.
DIGEST_OF_CAPS = gl.constexpr(hashlib.sha256(repr(CAPS).encode()).hexdigest())


@triton.constexpr_function
def cap_of(terms, digest):
    """Return the Cap of `terms` terms; digest: DIGEST_OF_CAPS, for the key of cached kernels."""
    return CAPS[terms]


def exactly_capped(to: str, score: str, factor: str, terms: int) -> str:
    """PTX: to = tanh(score * factor), as exact as the polynomial of `terms` terms; minus infinity stays unchanged."""
    nothing, one, less = literal(float("-inf")), literal(1.0), literal(-2.0)
    text = f" setp.eq.f32 any, {score}, {nothing}; mul.rn.f32 {to}, {score}, {factor};"
    if terms == 3:
        text += f" tanh.approx.f32 {to}, {to};"
    else:  # 1 - 2 / (1 + e^2x)
        text += f" mul.rn.f32 {to}, {to}, {literal(2 * math.log2(math.e))}; ex2.approx.ftz.f32 {to}, {to};"
        text += f" add.f32 {to}, {to}, {one}; rcp.approx.ftz.f32 {to}, {to}; fma.rn.f32 {to}, {to}, {less}, {one};"
    return text + f" @any mov.f32 {to}, {nothing};"


# Limit of a thread's sum of weights.  No weight is larger than the sum, so a sum within the limit has weights that fit
# float16.
MAX_SUM_PER_THREAD = 8192.0
# A row's maximum, base 2, beyond which rounding score * unit to float32 may change the product by 2^-10 or more.  The
# maximum is a rounded product.  So in such a row a mul rounds each product, as the maximum was rounded, before the
# maximum is subtracted; an fma would not round the product.
MIN_ROUNDED_MAXIMUM = 2.0**14
_ROUND = {"bf16": "cvt.rn.bf16x2.f32", "fp16": "cvt.rn.f16x2.f32"}


def _weigh_pair(dtype: str, terms: int) -> str:
    """PTX of `weigh_pairs`; exponents are scores (0 terms), score * factor + shift (1), or a polynomial + shift."""
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


def _scaled(to: str, score: str, unit: str, shift: str, rounded: str) -> str:
    """PTX: to = score * unit + shift, rounded once, or twice where the predicate `rounded`, if any, holds."""
    fused = f"fma.rn.f32 {to}, {score}, {unit}, {shift};"
    if not rounded:
        return f" {fused}"
    apart = f" @{rounded} mul.rn.f32 {to}, {score}, {unit}; @{rounded} add.rn.f32 {to}, {to}, {shift};"
    return f"{apart} @!{rounded} {fused}"


def _weigh_again(dtype: str, pairs: int, parts: int, any_size: bool, terms: int) -> tuple[str, str]:
    """(PTX, constraints) of `weigh_again` for `pairs` pairs of a thread, which belong to its two rows alternately.

    `results` of `weigh_again` are `parts` operands of `pairs` registers each.  A polynomial of `terms` terms has capped
    the scores, or none if `terms` is 0.  With `any_size`, scores may be so large that score * unit has to be rounded
    first.
    """

    def operands(number: int) -> list[str]:
        return [f"${number * pairs + i}" for i in range(pairs)]

    words, sums, tops, decays = (operands(i) for i in range(4))
    results = [operands(4 + i) for i in range(parts)]
    even, odd, old_sums, old_tops, units, shifts = (operands(5 + parts + i) for i in range(6))
    caps, least_tops, largest = (operands(11 + 2 * parts + i) for i in range(3))
    nothing, limit, one, huge = map(literal, (float("-inf"), MAX_SUM_PER_THREAD, 1.0, MIN_ROUNDED_MAXIMUM))
    text = "{ .reg .pred p0, p1, q0, q1, any; .reg .f32 a, b, s0, s1, t0, t1, m0, m1, n0, n1, l0, l1;"
    for i in (0, 1):
        text += f" mov.f32 {sums[i]}, {old_sums[i]}; mov.f32 {tops[i]}, {old_tops[i]}; mov.f32 {decays[i]}, {one};"
        # With terms, the limit is the weight of the largest score that the polynomial approximates, but at most
        # MAX_SUM_PER_THREAD.  A sum within the limit contains no weight of a larger score.
        if terms:
            text += f" sub.f32 a, {largest[i]}, {old_tops[i]}; min.f32 a, a, {literal(math.log2(MAX_SUM_PER_THREAD))};"
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
            text += exactly_capped(f"m{i}", f"m{i}", caps[i], terms)
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
        # a sink of infinity can make shift and maximum infinite, and then their difference is NaN
        text += f" setp.eq.f32 any, {shifts[i]}, {tops[i]}; @any mov.f32 n{i}, {literal(0.0)};"
    for k in range(pairs):
        i = k & 1
        for x, score in (("a", even[k]), ("b", odd[k])):
            if terms:
                text += exactly_capped(x, score, caps[i], terms)
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
    # outputs that are written before all inputs are read have registers of their own
    outputs = ["=r"] * pairs + ["=&f"] * (3 * pairs) + ["=f"] * (parts * pairs)
    inputs, more = ["f"] * (6 * pairs), ["f"] * (3 * pairs * (terms > 0))
    in_place = [str(i) for i in range((4 + parts) * pairs)]
    return text, ",".join(outputs + in_place[:pairs] + inputs + in_place[4 * pairs :] + more)


_AGAIN = {
    (*key, any_size, terms): _weigh_again(*key, any_size, terms)
    for key in itertools.product(_ROUND, (16, 32), (1, 2, 4, 8))
    for any_size, terms in ((False, 0), (True, 0), *((False, terms) for terms in CAPS))
}
DIGEST_OF_WEIGHTS = gl.constexpr(hashlib.sha256(repr((_PAIRS, _AGAIN)).encode()).hexdigest())


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
    """(words, float32 sums) of the weights exp2(f(x)) of two scores x.

    A word has two 16-bit weights, that of `even` in the lower half.

    Without a coefficient, f(x) = x.  With one, a, f(x) = x * a + shift.  With more, f(x) = x * (a + b x^2 + c x^4 ...)
    + shift.
    """
    ASM: gl.constexpr = _pairs(dtype, len(coefficients), DIGEST_OF_WEIGHTS)
    operands = (even, odd) + coefficients
    if len(coefficients) > 0:
        operands = operands + (shift,)
    return gl.inline_asm_elementwise(ASM[0], ASM[1], operands, dtype=WORD_AND_SUM, is_pure=True, pack=1)


@gluon.jit
def weigh_again(
    words, even, odd, sums, row_max, unit, shift, results, cap, ANY_SIZE: gl.constexpr, TERMS: gl.constexpr,
    dtype: gl.constexpr,
):  # fmt: skip
    """(words, sums, maxima, decays, *results) after some rows are weighed again.

    A row is weighed again if it has no maximum yet, or if a thread's sum is too large.  With ANY_SIZE, a row is weighed
    again, too, if the magnitude of its maximum exceeds MIN_ROUNDED_MAXIMUM.

    A row that is weighed again gets a new maximum if a score exceeds the old one, and weights exp2(x * unit + shift -
    maximum).  A warp without such rows leaves early.  All operands have the shape of words [R, N / 8, 4].  A thread
    reads and writes only the first sum, maximum and decay that it holds for each row.

    results: parts of a product that may still run.  The rare branch waits for the product and multiplies it by the
    decays.  A second branch, behind a later wait, would cost every tile one more vote and jump.

    cap: (a, least maximum, largest score) if a polynomial of TERMS terms for tanh(x * a) made the words; otherwise ().
    The polynomial holds up to the largest score.  If one of a row's scores may be larger, special functions weigh the
    row again.  A row whose maximum is below the least maximum is weighed again, too.  There the polynomial makes very
    negative scores too low, and their true weights may not be negligible.
    """
    PAIRS: gl.constexpr = 2 * words.shape[1]
    ASM: gl.constexpr = _again(dtype, PAIRS, len(results), ANY_SIZE, TERMS, DIGEST_OF_WEIGHTS)
    DTYPES: gl.constexpr = _word_and_floats(3 + len(results))
    operands = (words, even, odd, sums, row_max, unit, shift) + results + cap
    return gl.inline_asm_elementwise(ASM[0], ASM[1], operands, dtype=DTYPES, is_pure=False, pack=PAIRS)


_BEYOND = gl.constexpr(
    f"{{ .reg .pred p; setp.gtu.f32 p, $1, {literal(MAX_SUM_PER_THREAD)};"
    " vote.sync.any.pred p, p, 0xffffffff; selp.u32 $0, 1, 0, p; }"
)


@gluon.jit
def any_beyond(sums):
    """Return 1, int32, in all lanes of a warp if one lane's sum exceeds MAX_SUM_PER_THREAD or is NaN, else 0."""
    return gl.inline_asm_elementwise(_BEYOND, "=r,f", [sums], dtype=gl.int32, is_pure=False, pack=1)
