"""Numbers as stored elements: rounding to fp8, int8, int4 and bfloat16, scales by token, quotients."""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from .numerics import INTERPRET

# PTX that rounds four float32 to a word of fp8, to nearest even; infinity saturates, and NaN becomes 0x7F.  Triton
# refuses it for tensors of fewer than four elements.
_FP8_WORD = """{
    .reg .b16 lower, upper;
    cvt.rn.satfinite.%sx2.f32 lower, $2, $1;
    cvt.rn.satfinite.%sx2.f32 upper, $4, $3;
    mov.b32 $0, {lower, upper};
    }"""
E4M3_WORD = tl.constexpr(_FP8_WORD % ("e4m3", "e4m3"))
E5M2_WORD = tl.constexpr(_FP8_WORD % ("e5m2", "e5m2"))


@triton.jit
def _to_fp8(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr):
    """Convert float32 to the bits of an 8-bit float, to nearest even, clamped to +-MAX; NaN becomes 0x7F."""
    DROP: tl.constexpr = 23 - MANTISSA
    SMALLEST_NORMAL: tl.constexpr = 2.0 ** (1 - BIAS)
    # adding ROUNDER rounds, because the float32 sum has no bits below the least subnormal
    ROUNDER: tl.constexpr = 2.0 ** (23 + 1 - BIAS - MANTISSA)
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), MAX)
    subnormal = (magnitude + ROUNDER).to(tl.uint32, bitcast=True) & 0xFF
    bits = magnitude.to(tl.uint32, bitcast=True)
    normal = ((bits + ((1 << (DROP - 1)) - 1) + ((bits >> DROP) & 1)) >> DROP) - ((127 - BIAS) << MANTISSA)
    code = tl.where(magnitude < SMALLEST_NORMAL, subnormal, normal)
    return tl.where(x == x, sign | code, 0x7F).to(tl.uint8)


@triton.jit
def _to_int8(x):
    """Convert float32 to the bits of int8, to nearest even, clamped to +-127; NaN becomes 0."""
    x = tl.where(x == x, tl.minimum(tl.maximum(x, -127.0), 127.0), 0.0)
    # adding 1.5 * 2^23 rounds, and leaves the integer in the lower bits
    return (x + 12582912.0).to(tl.int32, bitcast=True).to(tl.uint8)


@triton.jit
def largest(FP8: tl.constexpr):
    """Return the largest number of a format of one byte (records/formats.LARGEST)."""
    if FP8 == 3:
        return 448.0
    elif FP8 == 2:
        return 57344.0
    else:
        tl.static_assert(FP8 == 7)
        return 127.0


@triton.jit
def scales_by_row(x, FP8: tl.constexpr, of: tl.constexpr):
    """Scales [H], of type `of`, of float32 rows x [H, D]: largest magnitude / largest number of the stored type.

    Scales of float16 saturate.  A scale is NaN if its row has a NaN or an infinity.
    """
    return scale_of_magnitude(magnitude_of_row(x), FP8, of)


@triton.jit
def magnitude_of_row(x):
    """Largest magnitudes [H] of float32 rows x [H, D], as int32 bits, in whose order NaN is above infinity."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def scale_of_magnitude(most, FP8: tl.constexpr, of: tl.constexpr):
    """Scales [H] as from `scales_by_row`, of rows with the magnitudes `most` [H] (`magnitude_of_row`)."""
    scale = tl.div_rn(most.to(tl.float32, bitcast=True), tl.zeros_like(most).to(tl.float32) + largest(FP8))
    if of == tl.float16:
        scale = tl.minimum(scale, 65504.0)
    return tl.where(most < 0x7F800000, scale, float("nan")).to(of)


@triton.jit
def quotient(x, by, BOUNDED: tl.constexpr = False):
    """float32 x / by, correctly rounded for results from 2^-17 to 2^16 in magnitude; by: numbers > 0, one or one a row.

    BOUNDED: no result is infinite; infinity would become NaN.

    On a GPU `/` may be off by two units in the last place, so a result just below a tie of fp8 might round up.  A
    correctly rounded division for each element takes a fifth of a kernel's machine code.  So x is multiplied by a
    correctly rounded inverse, and the exact remainder, from a fused multiply-add, corrects the product.
    """
    if INTERPRET:  # the interpreter's fused operation rounds twice
        return tl.div_rn(x, by)
    else:
        unit = tl.where(tl.abs(by) < 1.0, 2.0**64, 1.0)  # no infinite inverse, and no subnormal remainder
        x, by = x * unit, by * unit
        inverse = tl.div_rn(1.0, by)
        about = x * inverse
        beyond = tl.fma(about, by, x * -1.0)  # Triton's -x is 0 - x, which would lose the sign of -0
        nearer = tl.fma(beyond * -1.0, inverse, about)
        return nearer if BOUNDED else tl.where(tl.abs(about) < 65536.0, nearer, about)  # infinity's would be NaN


@triton.jit
def over_scale(x, scale):
    """Divide float32 rows x [H, N] by their scales [H]; a row whose scale is 0 or NaN becomes zeros."""
    scale = scale.to(tl.float32)[:, None]
    return quotient(tl.where(scale > 0, x, 0.0), tl.where(scale > 0, scale, 1.0), True)


@triton.jit
def nearest(x):
    """Round float32 x, |x| < 2^22, to int32, to nearest even."""
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000  # from 2^23 on float32 has no fraction


@triton.jit
def steps_by_row(x):
    """(scales [H] float32, zero points [H] int32) by which float32 rows x [H, D] become int4.

    The 16 int4 numbers stand for equally spaced values from min(row, 0) to max(row, 0); the zero point stands for 0.
    The scale is the step, with zeros in its lowest four bits, and is NaN if a row has a NaN or an infinity.
    """
    return steps_of_range(tl.min(x, 1), tl.max(x, 1), magnitude_of_row(x))


@triton.jit
def steps_of_range(least, most, magnitude):
    """(scales, zero points) as from `steps_by_row`, of rows with these extremes [H] and `magnitude_of_row` [H]."""
    least, most = tl.minimum(least, 0.0), tl.maximum(most, 0.0)
    steps = tl.zeros_like(least) + 15.0
    scale = tl.where(magnitude < 0x7F800000, tl.div_rn(most, steps) - tl.div_rn(least, steps), float("nan"))
    scale = (scale.to(tl.int32, bitcast=True) & 0x7FFFFFF0).to(tl.float32, bitcast=True)
    zero = nearest(tl.div_rn(tl.where(scale > 0, -least, 0.0), tl.where(scale > 0, scale, 1.0)))
    return scale, tl.minimum(zero, 15)


@triton.jit
def with_zero(scale, zero):
    """Scales [H] as int4 caches store them: the lowest four bits are the zero points [H]."""
    return (scale.to(tl.int32, bitcast=True) | zero).to(tl.float32, bitcast=True)


@triton.jit
def encode_steps(x, scale, zero):
    """Bytes [H, D / 2] of two int4 numbers, of float32 rows x [H, D]; a row whose scale is 0 or NaN counts as zeros."""
    number = nearest(over_scale(x, scale)) + zero[:, None]
    number = tl.minimum(tl.maximum(number, 0), 15)
    lower, upper = tl.split(tl.reshape(number, [x.shape[0], x.shape[1] // 2, 2]))
    return (lower | (upper << 4)).to(tl.uint8)


@triton.jit
def encode(x, FP8: tl.constexpr, dtype: tl.constexpr):
    """Convert float32 values to stored elements, to nearest even; fp8 and int8 saturate, and int8 has 0 for NaN."""
    if (FP8 == 3 or FP8 == 2) and x.numel >= 4 and not INTERPRET and cuda_capability_geq(8, 9):
        WORD: tl.constexpr = E4M3_WORD if FP8 == 3 else E5M2_WORD
        return tl.inline_asm_elementwise(WORD, "=r,f,f,f,f", [x], dtype=tl.uint8, is_pure=True, pack=4)
    elif FP8 == 3:
        return _to_fp8(x, 3, 7, 448.0)
    elif FP8 == 2:
        return _to_fp8(x, 2, 15, 57344.0)
    elif FP8 == 7:
        return _to_int8(x)
    elif INTERPRET and dtype == tl.bfloat16:
        # round here, because the interpreter truncates
        bits = x.to(tl.uint32, bitcast=True)
        bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)
