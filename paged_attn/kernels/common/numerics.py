"""Arithmetic of all kernels: products, sums, powers of two, rows in parts, scales, lengths and ids."""

import triton
import triton.language as tl

from ...launching.platform import INTERPRET as _INTERPRET

INTERPRET = tl.constexpr(_INTERPRET)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


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
