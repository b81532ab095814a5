"""Number formats and the dot: the only place that knows what hardware or interpreter cannot do by itself."""

import triton
import triton.language as tl

from ...launching.backend import INTERPRET as _INTERPRET

INTERPRET = tl.constexpr(_INTERPRET)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# PTX for two int16 pairs of fp8 at once: $0 = the float16 of both lower bytes, $1 = of both upper ones.
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
E5M2_PAIRS = tl.constexpr("prmt.b32 $0, $2, 0, 0x2404; prmt.b32 $1, $2, 0, 0x3414;")  # float16's upper byte


@triton.jit
def load_int(ptr, mask=None):
    """Numbers of the batch, int32 whatever the tensor holds: registers and schedules count in 32 bits."""
    if mask is None:
        return tl.load(ptr).to(tl.int32)
    else:
        return tl.load(ptr, mask=mask, other=0).to(tl.int32)


@triton.jit
def load_clamped(ptr, mask=None):
    """`load_int` of numbers of any size: the ends of 32 bits stand for those beyond."""
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
    """x * factor, rounded before anything is added to it, which a compiler would leave out."""
    return tl.fma(x, factor, 0.0)


@triton.jit
def products(q, k, S: tl.constexpr):
    """Scores [R, N] of queries [R, D] and keys [D, N], both in parts."""
    scores = tl.full([S.ROWS, S.TILE], 0.0, tl.float32)
    for i in tl.static_range(len(q)):
        scores = dot(q[i], k[i], scores, S)
    return scores


@triton.jit
def _upper_byte(bits, FP8: tl.constexpr):
    """The fp8 numbers in the upper bytes of 16 bits, as float16; the lower bytes may hold anything."""
    if FP8 == 2:
        return (bits & 0xFF00).to(tl.float16, bitcast=True)
    else:
        # sign and 7 bits in float16's fields: 2^8 too small, the difference of the exponent biases
        half = ((bits & 0x8000) | ((bits & 0x7F00) >> 1)).to(tl.float16, bitcast=True) * 256.0
        # 480, NaN's place, becomes NaN by its exponent's only zero; no smaller number carries so far
        carry = (((bits & 0x7F00) + 0x0100) >> 2) & 0x2000
        return (half.to(tl.uint16, bitcast=True) | carry).to(tl.float16, bitcast=True)


@triton.jit
def decode(x, FP8: tl.constexpr, dtype: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Stored elements as dtype; exact for fp8 into float16, bfloat16 and float32."""
    if FP8 == 3 and NATIVE_FP8:
        return x.to(tl.float8e4nv, bitcast=True).to(dtype)
    elif FP8 > 0:
        return _upper_byte(x.to(tl.uint16) << 8, FP8).to(dtype)
    elif INTERPRET and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def decode_pairs(x, FP8: tl.constexpr, dtype: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """(lower, upper) fp8 numbers of int16 pairs, as dtype; exact."""
    if NATIVE_FP8:
        ASM: tl.constexpr = E4M3_PAIRS if FP8 == 3 else E5M2_PAIRS
        lower, upper = tl.inline_asm_elementwise(
            ASM, "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
        return lower.to(dtype), upper.to(dtype)
    else:
        bits = x.to(tl.uint16, bitcast=True)
        return _upper_byte(bits << 8, FP8).to(dtype), _upper_byte(bits, FP8).to(dtype)


@triton.jit
def unpack(x, kv, S: tl.constexpr):
    """Stored elements of keys or values as a tuple of parts in the compute type."""
    if kv.PARTS == 2:
        return decode_pairs(x, kv.FP8, S.COMPUTE, S.NATIVE_FP8)
    else:
        return (decode(x, kv.FP8, S.COMPUTE, S.NATIVE_FP8),)


@triton.jit
def opaque(x):
    """float16 numbers as they are, but the compiler cannot see where they come from."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float16, is_pure=False, pack=2)


@triton.jit
def in_parts(x, PARTS: tl.constexpr):
    """[R, D] as a tuple of PARTS [R, D / PARTS]: neighbouring dims in different parts."""
    if PARTS == 2:
        return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    else:
        return (x,)


@triton.jit
def together(parts):
    """A tuple of parts as [R, D] again."""
    if len(parts) == 2:
        return tl.reshape(tl.join(parts[0], parts[1]), [parts[0].shape[0], parts[0].shape[1] * 2])
    else:
        return parts[0]


@triton.jit
def scaled(parts, factor):
    """Every part times one factor for all, or [R, 1] for the rows."""
    done = ()
    for i in tl.static_range(len(parts)):
        done = done + (parts[i] * factor,)
    return done


@triton.jit
def normalize_by(x, largest):
    """`normalize` of some dims of rows [R, D], by the largest magnitudes [R] of all their dims."""
    # biased exponents; 15..254 keep both powers normal numbers
    exponent = tl.minimum(tl.maximum(largest.to(tl.uint32, bitcast=True) >> 23, 15), 254)
    up = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    down = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    return x * up[:, None], down


@triton.jit
def normalize(x):
    """float32 rows [R, D] as (rows of largest magnitude in [2^14, 2^15), powers of two [R]) whose product they are.

    So float16, which has bfloat16's precision but not its range, loses nothing of a row within 2^-28 of its largest.
    """
    return normalize_by(x, tl.max(tl.abs(x), 1))


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
def quotient(x, by):
    """float32 values over one number, as near as float32 has it wherever fp8 can hold it.

    `/` is off by two units on a GPU, and then rounds up what lies below a tie of fp8; a division to nearest for each
    element is a fifth of a kernel's machine code.  Here the number's inverse is rounded to nearest, and what its
    product leaves of x, which one fused operation finds exactly, corrects the product.
    """
    if INTERPRET:  # its fused operation rounds twice
        return tl.div_rn(x, by)
    else:
        inverse = tl.div_rn(1.0, by)
        about = x * inverse
        nearer = tl.fma(tl.fma(-about, by, x), inverse, about)
        return tl.where(tl.abs(about) < 65536.0, nearer, about)  # what is infinite would leave NaN


@triton.jit
def scale_of(number, ptr, stride, kv_head, stride_seq=None, block=None):
    """A scale as the host gave it: a number, or one in memory for each KV head or for all.

    stride_seq: from sequence to sequence, where each has its own; nothing is read for a sequence without keys.
    """
    if ptr is None:
        return number
    elif stride_seq is None:
        return number * tl.load(ptr + kv_head * stride)
    else:
        at = ptr + tl.cast(block.seq, tl.int64) * stride_seq + kv_head * stride
        return number * tl.load(at, mask=block.seq_len > 0, other=1.0)
