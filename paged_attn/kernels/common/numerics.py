"""Number formats and the dot product, with replacements for what the hardware or the interpreter lacks."""

import triton
import triton.language as tl

from ...launching.platform import INTERPRET as _INTERPRET

INTERPRET = tl.constexpr(_INTERPRET)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

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
def load_int(ptr, mask=None):
    """Load lengths or ids of the batch, int32 or int64, as int32."""
    if mask is None:
        return tl.load(ptr).to(tl.int32)
    else:
        return tl.load(ptr, mask=mask, other=0).to(tl.int32)


@triton.jit
def load_clamped(ptr, mask=None):
    """Load integers of any size as int32, clamped to the range of int32."""
    if mask is None:
        x = tl.load(ptr)
    else:
        x = tl.load(ptr, mask=mask, other=0)
    if x.dtype == tl.int64:
        x = tl.minimum(tl.maximum(x, -(2**31)), 2**31 - 1)
    return x.to(tl.int32)


@triton.jit
def dot(a, b, acc, S: tl.constexpr):
    """a [R, K] @ b [K, N] + acc, accumulated in float32; float32 operands keep their precision."""
    PRECISION: tl.constexpr = S.PRECISION
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def rounded_product(x, factor):
    """x * factor, rounded to float32 even if an addition follows, which the compiler would fuse otherwise."""
    return tl.fma(x, factor, 0.0)


@triton.jit
def products(q, k, S: tl.constexpr):
    """Scores q @ k, float32 [R, N]; q is a tuple of PARTS parts [R, D / PARTS], k of PARTS parts [D / PARTS, N]."""
    scores = tl.full([S.ROWS, S.TILE], 0.0, tl.float32)
    for i in tl.static_range(len(q)):
        scores = dot(q[i], k[i], scores, S)
    return scores


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


@triton.jit
def opaque(x):
    """Return x of 16 bits unchanged, hiding its origin from the compiler."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)


@triton.jit
def first_of(parts, COUNT: tl.constexpr):
    """The first COUNT elements of a tuple."""
    found = ()
    for i in tl.static_range(COUNT):
        found = found + (parts[i],)  # type: ignore[assignment]
    return found


@triton.jit
def power_above(x):
    """The least power of two >= x, for float32 x >= 0, clamped to 2^-126 ... 2^126, even for NaN."""
    bits = (x.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    return tl.minimum(tl.maximum(bits, 1 << 23), 253 << 23).to(tl.float32, bitcast=True)


@triton.jit
def inverse_of_power(x):
    """1 / x, exactly, for powers of two x from 2^-126 to 2^126."""
    return ((254 << 23) - x.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def in_parts(x, PARTS: tl.constexpr):
    """x [R, D] as a tuple of PARTS parts [R, D / PARTS]: part i has dims i, i + PARTS, i + 2 PARTS, ..."""
    if PARTS == 4:
        even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
        a, c = tl.split(tl.reshape(even, [x.shape[0], x.shape[1] // 4, 2]))
        b, d = tl.split(tl.reshape(odd, [x.shape[0], x.shape[1] // 4, 2]))
        return (a, b, c, d)
    elif PARTS == 2:
        return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    else:
        return (x,)


@triton.jit
def together(parts):
    """Inverse of `in_parts`: [R, D]."""
    if len(parts) == 4:
        return together((together((parts[0], parts[2])), together((parts[1], parts[3]))))
    elif len(parts) == 2:
        return tl.reshape(tl.join(parts[0], parts[1]), [parts[0].shape[0], parts[0].shape[1] * 2])
    else:
        return parts[0]


@triton.jit
def scaled(parts, factor):
    """Every part times a factor, a scalar or [R, 1]."""
    done = ()
    for i in tl.static_range(len(parts)):
        done = done + (parts[i] * factor,)
    return done


@triton.jit
def less(parts, number):
    """Every part minus a number, a scalar or [R, 1]."""
    done = ()
    for i in tl.static_range(len(parts)):
        done = done + (parts[i] - number,)
    return done


@triton.jit
def sum_of(parts):
    """Sums [R] over the dims of all parts, float32."""
    total = tl.sum(parts[0].to(tl.float32), 1)
    for i in tl.static_range(1, len(parts)):
        total += tl.sum(parts[i].to(tl.float32), 1)
    return total


@triton.jit
def normalize_by(x, largest):
    """`normalize` for some dims of rows [R, D]; largest [R]: largest magnitudes over all dims."""
    # biased exponents; 15..254 keep both powers normal numbers
    exponent = tl.minimum(tl.maximum(largest.to(tl.uint32, bitcast=True) >> 23, 15), 254)
    up = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    down = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    return x * up[:, None], down


@triton.jit
def normalize(x):
    """Factor float32 rows [R, D] into (rows whose largest magnitude is in [2^14, 2^15), powers of two [R]).

    Rows whose largest magnitude is below 2^-112 become smaller numbers.

    float16 has more precision than bfloat16, but less range.  After this, elements of bfloat16 down to 2^-28 of a row's
    largest fit float16 without loss.
    """
    return normalize_by(x, tl.max(tl.abs(x), 1))


@triton.jit
def _to_fp8(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr):
    """Convert float32 to the bits of an 8-bit float, to nearest even, clamped to +-MAX; NaN stays NaN."""
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
    return (sign | tl.where(x == x, code, 0x7F)).to(tl.uint8)


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
def square(x, of: tl.constexpr):
    """x * x of float32 numbers x that come from type `of`, with equal bits whatever is added to them.

    The compiler may fuse a product with a sum, which leaves out a rounding.  Squares of 16 bits or less need none.
    """
    if of == tl.float32:
        return tl.fma(x, x, tl.zeros_like(x))
    else:
        return x * x


@triton.constexpr_function
def halvings(n):
    """Base-2 logarithm of n, a power of two."""
    return n.bit_length() - 1


@triton.jit
def sum_in_pairs(x):
    """Sum [R] of the rows of x [R, N], N a power of two.

    Neighbours are added, then sums of neighbours.  Sums of two numbers have equal bits in any order, so the result does
    not depend on how Triton lays out x, as that of `tl.sum` does.
    """
    for _ in tl.static_range(halvings(x.shape[1])):
        x = tl.sum(x.reshape([x.shape[0], x.shape[1] // 2, 2]), 2)
    return x.reshape([x.shape[0]])


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
def over_scale(x, scale):
    """Divide float32 rows x [H, N] by their scales [H]; a row whose scale is 0 or NaN becomes zeros."""
    scale = scale.to(tl.float32)[:, None]
    return tl.div_rn(tl.where(scale > 0, x, 0.0), tl.broadcast_to(tl.where(scale > 0, scale, 1.0), x.shape))


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
    whole = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1) < 0x7F800000
    least, most = tl.minimum(tl.min(x, 1), 0.0), tl.maximum(tl.max(x, 1), 0.0)
    steps = tl.zeros_like(least) + 15.0
    scale = tl.where(whole, tl.div_rn(most, steps) - tl.div_rn(least, steps), float("nan"))
    scale = (scale.to(tl.int32, bitcast=True) & 0x7FFFFFF0).to(tl.float32, bitcast=True)
    zero = nearest(tl.div_rn(tl.where(scale > 0, -least, 0.0), tl.where(scale > 0, scale, 1.0)))
    return scale, tl.minimum(zero, 15)


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
    if FP8 == 3:
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


@triton.jit
def quotient(x, by):
    """float32 x / by, correctly rounded for results below 2^16 in magnitude; by: one number, or one for each element.

    On a GPU `/` may be off by two units in the last place, so a result just below a tie of fp8 might round up.  A
    correctly rounded division for each element takes a fifth of a kernel's machine code.  So x is multiplied by a
    correctly rounded inverse, and the exact remainder, from a fused multiply-add, corrects the product.
    """
    if INTERPRET:  # the interpreter's fused operation rounds twice
        return tl.div_rn(x, by)
    else:
        inverse = tl.div_rn(1.0, by)
        about = x * inverse
        nearer = tl.fma(tl.fma(-about, by, x), inverse, about)
        return tl.where(tl.abs(about) < 65536.0, nearer, about)  # the correction of infinity would be NaN


@triton.jit
def scale_of(number, ptr, stride, kv_head, stride_seq=None, block=None):
    """Return number * ptr[kv_head * stride], or `number` if ptr is None.  With stride 0, all KV heads share the scale.

    stride_seq: elements from a sequence's scales to the next.  None: all sequences share the scales.
    With a stride_seq, nothing is read for a sequence without keys.
    """
    if ptr is None:
        return number
    elif stride_seq is None:
        return number * tl.load(ptr + kv_head * stride)
    else:
        at = ptr + tl.cast(block.seq, tl.int64) * stride_seq + kv_head * stride
        return number * tl.load(at, mask=block.seq_len > 0, other=1.0)
