"""Number formats and the dot: the only place that knows what hardware or interpreter cannot do by itself."""

import triton
import triton.language as tl

from ..backend import INTERPRET as _INTERPRET

INTERPRET = tl.constexpr(_INTERPRET)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def dot(a, b, acc, S: tl.constexpr):
    """a [R, K] @ b [K, N] + acc, accumulated in float32; float32 operands keep their precision."""
    PRECISION: tl.constexpr = S.PRECISION
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def decode(x, FP8: tl.constexpr, dtype: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Stored elements as dtype; exact for fp8 into float16, bfloat16 and float32."""
    if FP8 == 3:
        if NATIVE_FP8:
            return x.to(tl.float8e4nv, bitcast=True).to(dtype)
        else:
            # sign and 7 bits in float16's fields: 2^8 too small, the difference of the exponent biases
            bits = x.to(tl.uint16)
            half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
            return tl.where((bits & 0x7F) == 0x7F, float("nan"), half.to(tl.float32)).to(dtype)
    elif FP8 == 2:
        return (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(dtype)  # float16's upper byte
    elif INTERPRET and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def _to_fp8(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr):
    """float32 to the bits of an 8-bit float, to nearest even, clamped to +-MAX; NaN stays NaN."""
    DROP: tl.constexpr = 23 - MANTISSA
    SMALLEST_NORMAL: tl.constexpr = 2.0 ** (1 - BIAS)
    # adding this leaves float32 no bits below one unit of the subnormals: the addition does the rounding
    ROUNDER: tl.constexpr = 2.0 ** (23 + 1 - BIAS - MANTISSA)
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), MAX)
    subnormal = (magnitude + ROUNDER).to(tl.uint32, bitcast=True) & 0xFF
    bits = magnitude.to(tl.uint32, bitcast=True)
    normal = ((bits + ((1 << (DROP - 1)) - 1) + ((bits >> DROP) & 1)) >> DROP) - ((127 - BIAS) << MANTISSA)
    code = tl.where(magnitude < SMALLEST_NORMAL, subnormal, normal)
    return (sign | tl.where(x == x, code, 0x7F)).to(tl.uint8)


@triton.jit
def encode(x, FP8: tl.constexpr, dtype: tl.constexpr):
    """float32 values as stored elements, to nearest even; fp8 formats saturate."""
    if FP8 == 3:
        return _to_fp8(x, 3, 7, 448.0)
    elif FP8 == 2:
        return _to_fp8(x, 2, 15, 57344.0)
    elif INTERPRET and dtype == tl.bfloat16:
        # the interpreter truncates
        bits = x.to(tl.uint32, bitcast=True)
        bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def scale_of(number, ptr, stride, kv_head):
    """A scale as the host gave it: a number, or one in memory for each KV head or for all."""
    if ptr is None:
        return number
    else:
        return number * tl.load(ptr + kv_head * stride)
