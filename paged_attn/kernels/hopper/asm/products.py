"""Products by wgmma with descriptors made here: for x-packed keys, and for latents whose dims lie in two matrices.

For 64 queries and 16 keys of 64 dims in bfloat16, `multiply_cores` returns scores $0..$7.  $8 is the address of the
queries, and $16 the address of the keys.  Dims 0 to 15 are multiplied by

    { .reg .b32 q, k, q_form, k_form; .reg .b64 a, b; wgmma.fence.sync.aligned;
      shr.u32 q, $8, 4; shr.u32 k, $16, 4; add.u32 k, k, 524288; mov.u32 q_form, 1073741888; mov.u32 k_form, 64;
      .reg .b32 q0, k0; add.u32 q0, q, 0; add.u32 k0, k, 0; mov.b64 a, {q0, q_form}; mov.b64 b, {k0, k_form};
      wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {$0,$1,$2,$3,$4,$5,$6,$7}, a, b, 0, 1, 1, 0, 0;

Three more products add 16 dims each, and `wgmma.commit_group.sync.aligned; }` ends the text.
"""

import triton

from ..shim import gl, gluon


@triton.constexpr_function
def _cores(rows, columns, dims, dtype):
    """PTX: q @ k^T; each warpgroup multiplies 64 of `rows` query rows by `columns` keys.

    Operands are two shared-memory addresses: queries, keys.  Queries are swizzled rows of 128 bytes: 64 dims of all
    rows lie before the next 64 dims.  Keys are core matrices of 8 keys x 16 bytes: all dims of 8 keys lie before those
    of the next 8 keys.
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
    """Start queries [R, DIM] @ keys [N, DIM]^T at these shared-memory addresses; return float32 scores [R, N].

    scores: float32 [R, N] of any content, for shape and layout.  The result is valid after a wait.

    Triton 3.6 would advance a base offset from product to product although keys are not swizzled.  Descriptors here
    differ from product to product in the lower half alone: if both halves differed, ptxas 12.8 would add to unwritten
    uniform registers.
    """
    ROWS: gl.constexpr = scores.shape[0]
    COLUMNS: gl.constexpr = scores.shape[1]
    ASM: gl.constexpr = _cores(ROWS, COLUMNS, DIM, "bf16" if gl.bfloat16 == DTYPE else "f16")
    IN: gl.constexpr = _in_cores(COLUMNS)
    nothing = gl.full([ROWS, COLUMNS], 0, gl.int32, scores.type.layout)
    return gl.inline_asm_elementwise(
        ASM, IN, [nothing + q_at, nothing + k_at], dtype=gl.float32, is_pure=False, pack=COLUMNS // 2
    )


@triton.constexpr_function
def _of_two_parts(columns, key_rows, dims, more, dtype):
    """PTX: q @ k^T of 64 query rows and `columns` of a tile's `key_rows` keys, whose dims lie in two matrices each.

    The first matrices have `dims` dims, the second ones `more` dims, all in swizzled rows of 128 bytes.  Operands are
    addresses in units of 16 bytes: queries, keys, further dims of queries, further dims of keys.
    """
    n = columns // 2
    numbers = ",".join(f"${i}" for i in range(n))
    text = "{ .reg .b32 form; .reg .b64 a, b; wgmma.fence.sync.aligned; " + f"mov.u32 form, {1 << 30 | 64};"
    for part, size in enumerate((dims, more)):
        if size:
            text += f" .reg .b32 q{part}, k{part};"
            for name, place in (("q", 2 * part), ("k", 2 * part + 1)):
                text += f" redux.sync.or.b32 {name}{part}, ${n + place * n}, 0xffffffff;"
        for i in range(size // 16):
            beside = i // 4 * 8
            text += (
                f" .reg .b32 q{part}_{i}, k{part}_{i};"
                f" add.u32 q{part}_{i}, q{part}, {beside * 64 + i % 4 * 2};"
                f" add.u32 k{part}_{i}, k{part}, {beside * key_rows + i % 4 * 2};"
                f" mov.b64 a, {{q{part}_{i}, form}}; mov.b64 b, {{k{part}_{i}, form}};"
                f" wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{dtype}.{dtype}"
                f" {{{numbers}}}, a, b, {int(part + i > 0)}, 1, 1, 0, 0;"
            )
    return text + " wgmma.commit_group.sync.aligned; }"


@triton.constexpr_function
def _in_two_parts(columns):
    return ",".join(["=f"] * (columns // 2) + ["r"] * (2 * columns))


@gluon.jit
def multiply_two_parts(
    q_at, k_at, more_q_at, more_k_at, scores, KEYS: gl.constexpr, DIM: gl.constexpr, MORE: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """Start queries [64, DIM + MORE] @ keys [N, DIM + MORE]^T; return float32 scores [64, N], valid after a wait.

    The last MORE dims lie in matrices of their own.  KEYS: number of keys of each of the two matrices of keys, at least
    N.  Addresses are in bytes of shared memory.  scores: as for `multiply_cores`.

    A reduction over the lanes (redux) tells ptxas that all lanes have the same descriptor.  Otherwise ptxas makes six
    instructions or more for each descriptor.
    """
    COLUMNS: gl.constexpr = scores.shape[1]
    ASM: gl.constexpr = _of_two_parts(COLUMNS, KEYS, DIM, MORE, "bf16" if gl.bfloat16 == DTYPE else "f16")
    IN: gl.constexpr = _in_two_parts(COLUMNS)
    nothing = gl.full([64, COLUMNS], 0, gl.int32, scores.type.layout)
    places = [
        nothing + q_at // 16,
        nothing + k_at // 16,
        nothing + more_q_at // 16,
        nothing + more_k_at // 16,
    ]
    return gl.inline_asm_elementwise(ASM, IN, places, dtype=gl.float32, is_pure=False, pack=COLUMNS // 2)
