"""Stored elements of caches as numbers: fp8, int8 and int4, one by one, in pairs or in words of four."""

import triton
import triton.language as tl

from .numerics import INTERPRET, less

# PTX that converts two int16 pairs of fp8 at once: $0 gets the float16 numbers of both lower bytes, $1 those of both
# upper bytes.
E4M3_PAIRS = tl.constexpr(
    """{
    .reg .b32 bytes;
    .reg .b16 lower, upper;
    prmt.b32 bytes, $2, 0, 0x3120;
    mov.b32 {lower, upper}, bytes;
    cvt.rn.f16x2.e4m3x2 $0, lower;
    cvt.rn.f16x2.e4m3x2 $1, upper;
    }"""
)
E5M2_PAIRS = tl.constexpr("prmt.b32 $0, $2, 0, 0x2404; prmt.b32 $1, $2, 0, 0x3414;")  # e5m2: float16's upper byte

# int8 to float16: the int8 number n with its sign bit inverted is the byte n + 128.  With 0x64 as the upper byte,
# this byte makes the float16 1024 + n + 128.
_INT8 = """{
    .reg .b32 bytes, first, second, base;
    xor.b32 bytes, $2, 0x80808080;
    mov.b32 base, 0x64806480;
    prmt.b32 first, bytes, 0x64646464, %s;
    prmt.b32 second, bytes, 0x64646464, %s;
    sub.f16x2 $0, first, base;
    sub.f16x2 $1, second, base;
    }"""
INT8_PAIRS = tl.constexpr(_INT8 % ("0x4240", "0x4341"))
INT8_FOURS = tl.constexpr(_INT8 % ("0x4140", "0x4342"))  # four bytes in their order

# int4 to float16: the four bits of a number n, with the byte 0x54 above and four zeros below, are the float16 64 + n.
# Output $0 has the numbers in the lowest four bits of two int16 words, output $3 those in the uppermost.
INT4_WORDS = tl.constexpr(
    """{
    .reg .b32 first, second, third, fourth;
    shl.b32 first, $4, 4;
    mov.b32 second, $4;
    shr.u32 third, second, 4;
    shr.u32 fourth, second, 8;
    lop3.b32 $0, first, 0x00F000F0, 0x54005400, 0xEA;
    lop3.b32 $1, second, 0x00F000F0, 0x54005400, 0xEA;
    lop3.b32 $2, third, 0x00F000F0, 0x54005400, 0xEA;
    lop3.b32 $3, fourth, 0x00F000F0, 0x54005400, 0xEA;
    }"""
)


@triton.jit
def _upper_byte(bits, FP8: tl.constexpr):
    """Convert the fp8 numbers in the upper bytes of 16-bit words to float16; lower bytes are arbitrary."""
    if FP8 == 2:
        return (bits & 0xFF00).to(tl.float16, bitcast=True)
    else:
        # with sign and 7 bits in float16's fields, the number is 2^8 too small, because the exponent biases differ by 8
        half = ((bits & 0x8000) | ((bits & 0x7F00) >> 1)).to(tl.float16, bitcast=True) * 256.0
        # NaN's code would become 480.  Adding 1 to the 7 bits overflows for NaN's code alone.  The carry, moved to the
        # only 0 bit in the exponent of 480, makes the result NaN.
        carry = (((bits & 0x7F00) + 0x0100) >> 2) & 0x2000
        return (half.to(tl.uint16, bitcast=True) | carry).to(tl.float16, bitcast=True)


@triton.jit
def _int8_of(byte):
    """Convert int8 numbers, as uint16 below 256, to float16: the bits 0x6400 | byte are the float16 1024 + byte."""
    return ((byte ^ 0x80) | 0x6400).to(tl.float16, bitcast=True) - 1152.0


@triton.jit
def decode(x, FP8: tl.constexpr, dtype: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Convert stored elements to dtype; exact for fp8 and int8 into float16, bfloat16 and float32."""
    if FP8 == 3 and NATIVE_FP8:
        return x.to(tl.float8e4nv, bitcast=True).to(dtype)
    elif FP8 == 7 and dtype == tl.float16 and NATIVE_FP8:
        return tl.inline_asm_elementwise(INT8_FOURS, "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4)
    elif FP8 == 7:
        return x.to(tl.int8, bitcast=True).to(dtype)
    elif FP8 > 0:
        return _upper_byte(x.to(tl.uint16) << 8, FP8).to(dtype)
    elif INTERPRET and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def decode_pairs(x, FP8: tl.constexpr, dtype: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Convert int16 pairs of bytes to (numbers of the lower bytes, numbers of the upper bytes) in dtype, exactly."""
    if NATIVE_FP8:
        ASM: tl.constexpr = INT8_PAIRS if FP8 == 7 else E4M3_PAIRS if FP8 == 3 else E5M2_PAIRS
        lower, upper = tl.inline_asm_elementwise(
            ASM, "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
        return lower.to(dtype), upper.to(dtype)
    else:
        bits = x.to(tl.uint16, bitcast=True)
        if FP8 == 7:
            return _int8_of(bits & 0xFF).to(dtype), _int8_of(bits >> 8).to(dtype)
        return _upper_byte(bits << 8, FP8).to(dtype), _upper_byte(bits, FP8).to(dtype)


@triton.jit
def decode_words(x, dtype: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Convert int16 words of four int4 numbers n to four tensors of 64 + n, from the lowest bits up, exactly.

    Tensors of float32 have n - 8 instead, because the offset 64 would cost sums of products six bits of precision.
    With 16-bit operands these bits are lost anyway.
    """
    if NATIVE_FP8:
        a, b, c, d = tl.inline_asm_elementwise(
            INT4_WORDS, "=r,=r,=r,=r,r", [x], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True,
            pack=2,
        )  # fmt: skip
    else:
        bits = x.to(tl.uint16, bitcast=True)
        a, b, c, d = _int4_of(bits << 4), _int4_of(bits), _int4_of(bits >> 4), _int4_of(bits >> 8)
    if dtype == tl.float32:
        return less((a.to(dtype), b.to(dtype), c.to(dtype), d.to(dtype)), 72.0)
    else:
        return a.to(dtype), b.to(dtype), c.to(dtype), d.to(dtype)


@triton.jit
def _int4_of(bits):
    """Convert the number n in bits 4 to 7 of uint16 words to 64 + n, float16."""
    return ((bits & 0xF0) | 0x5400).to(tl.float16, bitcast=True)


@triton.jit
def split_scale(scale, MORE: tl.constexpr = 0):
    """(scales, zero points + MORE, int32) of float32 scales of int4, which hold both."""
    bits = scale.to(tl.int32, bitcast=True)
    zero = (bits & 15) + MORE
    return (bits & -16).to(tl.float32, bitcast=True), zero


@triton.jit
def scale_and_zero(scale, S: tl.constexpr):
    """(scales, zero points), float32 [N], of stored int4 scales, whose lowest four bits are the zero points.

    Zero points get the same offset as numbers in `decode_words`.
    """
    scale, zero = split_scale(scale, -8 if tl.float32 == S.COMPUTE else 64)
    return scale, zero.to(tl.float32)


@triton.jit
def unpack(x, kv, S: tl.constexpr):
    """Decode stored elements of keys or values to a tuple of parts in the compute type; int4 by `decode_words`."""
    if kv.PARTS == 4:
        return decode_words(x, S.COMPUTE, S.NATIVE_FP8)
    elif kv.PARTS == 2:
        return decode_pairs(x, kv.FP8, S.COMPUTE, S.NATIVE_FP8)
    else:
        return (decode(x, kv.FP8, S.COMPUTE, S.NATIVE_FP8),)
