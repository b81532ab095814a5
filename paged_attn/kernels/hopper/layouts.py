"""Register layouts of a consumer's scores, weights and results, and shared-memory layouts.

Arguments are numbers and flags, not records.
"""

import triton

from .shim import gl


@triton.constexpr_function
def line_layout(warps):
    """[N] in order: one element for each thread of `warps` warps, and then again from the first thread on."""
    return gl.BlockedLayout([1], [32], [warps], [0])


@triton.constexpr_function
def lanes_layout(size, rows, alone=False):
    """[size] sequences in the warps of a consumer of `rows` rows.

    If there are up to 32 sequences (with `alone`, up to 128), each warp has all of them, and adds up their work without
    other warps.  More sequences are spread over the warps.
    """
    warps = rows // 16
    of_each = 32 if alone and size <= 128 else 32 * warps
    return gl.BlockedLayout([max(1, size // of_each)], [32], [warps], [0])


@triton.constexpr_function
def heads_layout(heads, seqs, warps):
    """[heads, seqs]: each warp has all elements; lanes go along heads first."""
    lanes = min(heads, 32)
    return gl.BlockedLayout([max(1, heads // 32), max(1, seqs * lanes // 32)], [lanes, 32 // lanes], [1, warps], [0, 1])


@triton.constexpr_function
def rows_layout(together, dim, warps):
    """[rows, elements] of rows of `dim` dims: each thread has `together` neighbouring elements, which hold eight dims.

    together: 8 elements of 16 bits, 4 words of two 16-bit dims, or 2 words of four fp8 dims.
    """
    lanes = min(32, dim // 8)
    return gl.BlockedLayout([1, together], [32 // lanes, lanes], [warps, 1], [1, 0])


@triton.constexpr_function
def product_layout(columns, fp8, rows=64, most=256):
    """[rows, columns] of a wgmma accumulator (scores, results), from 16-bit or fp8 operands; 64 rows for a warpgroup.

    most: maximum number of columns of one wgmma instruction.
    """
    return gl.NVMMADistributedLayout([3, 0], [rows // 16, 1], [16, min(columns, most), 32 if fp8 else 16])


@triton.constexpr_function
def results_layout(dim, fp8, rows, converted):
    """[rows, dim] of blocks' results.

    converted: there is a converter warpgroup, and threads start with too few registers for wgmma of 256 columns.
    """
    return product_layout(dim, fp8, rows, 128 if converted else 256)


@triton.constexpr_function
def threads_layout(rows):
    """[rows, 4]: axis 1 is the thread of the row's quad in a wgmma accumulator; a thread has two rows."""
    warps = [[1 << i, 0] for i in range(4, rows.bit_length() - 1)]
    return gl.DistributedLinearLayout([[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], warps, [], [rows, 4])


@triton.constexpr_function
def key_words_layout(rows, columns):
    """[keys, words] of 32-bit words: each thread of a key's quad has four neighbouring words of every 16.

    If a key has only eight words (int4 of 64 dims), each thread has two.
    """
    own = [[0, 1 << i] for i in range(2 if columns > 8 else 1)]
    across = [[0, 1 << i] for i in range(len(own), columns.bit_length() - 1)]
    more = across[2:] + [[1 << i, 0] for i in range(6, rows.bit_length() - 1)]
    lanes = [*across[:2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([*own, [8, 0], *more], lanes, [[16, 0], [32, 0]], [], [rows, columns])


@triton.constexpr_function
def value_words_layout(rows, columns):
    """[keys, words] of values; a word has four dims (two if values have 64 dims).

    Each thread has the keys of its fragment of the left operand, which is [dims, keys].
    """
    more = [[1 << i, 0] for i in range(4, rows.bit_length() - 1)] + [
        [0, 1 << i] for i in range(5, columns.bit_length() - 1)
    ]
    lanes = [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]]
    return gl.DistributedLinearLayout([[1, 0], [8, 0], *more], lanes, [[0, 8], [0, 16]], [], [rows, columns])


@triton.constexpr_function
def packed_keys_layout(tile, dim, box):
    """[boxes, dim / 8, box, 8] of x-packed 16-bit keys: each thread has its fragment of a left operand [tile, dim]."""

    def key(n):
        return [n // box, 0, n % box, 0]

    eights = [[0, 1 << i, 0, 0] for i in range(dim.bit_length() - 4)]
    more = [key(1 << i) for i in range(6, tile.bit_length() - 1)]
    lanes = [[0, 0, 0, 2], [0, 0, 0, 4], key(1), key(2), key(4)]
    shape = [tile // box, dim // 8, box, 8]
    return gl.DistributedLinearLayout([[0, 0, 0, 1], key(8), *eights, *more], lanes, [key(16), key(32)], [], shape)


@triton.constexpr_function
def packed_values_layout(tile, dim, box):
    """[boxes, dim, box] of values of an x-packed cache: each thread has its fragment of a left operand [dim, tile]."""

    def key(n):
        return [n // box, 0, n % box]

    eights = [key(1 << i) for i in range(3, tile.bit_length() - 1)]
    more = [[0, 1 << i, 0] for i in range(6, dim.bit_length() - 1)]
    lanes = [key(2), key(4), [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    shape = [tile // box, dim, box]
    return gl.DistributedLinearLayout([key(1), [0, 8, 0], *eights, *more], lanes, [[0, 16, 0], [0, 32, 0]], [], shape)


@triton.constexpr_function
def packed_key_words_layout(tile, dim, box):
    """[boxes, dim / 16, box, 4] of 32-bit words of x-packed fp8 keys, in the threads of `key_words_layout`."""

    def key(n):
        return [n // box, 0, n % box, 0]

    more = [[0, 1 << i, 0, 0] for i in range(2, dim.bit_length() - 5)]
    more += [key(1 << i) for i in range(6, tile.bit_length() - 1)]
    registers = [[0, 0, 0, 1], [0, 0, 0, 2], key(8), *more]
    lanes = [[0, 1, 0, 0], [0, 2, 0, 0], key(1), key(2), key(4)]
    return gl.DistributedLinearLayout(registers, lanes, [key(16), key(32)], [], [tile // box, dim // 16, box, 4])


@triton.constexpr_function
def packed_value_pairs_layout(tile, dim, box):
    """[boxes, dim, box / 2]: `packed_values_layout` for 16-bit elements that hold the fp8 values of two keys."""

    def pair(n):
        return [n // box, 0, n % box // 2]

    more = [pair(1 << i) for i in range(3, tile.bit_length() - 1)]
    more += [[0, 1 << i, 0] for i in range(6, dim.bit_length() - 1)]
    lanes = [pair(2), pair(4), [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    shape = [tile // box, dim, box // 2]
    return gl.DistributedLinearLayout([[0, 8, 0], *more], lanes, [[0, 16, 0], [0, 32, 0]], [], shape)


@triton.constexpr_function
def transposing_layout(rows, columns):
    """[rows, columns] of 32-bit words: a thread has 16 rows of a column, and the next threads have the next columns."""
    row = [[1 << i, 0] for i in range(4, rows.bit_length() - 1)]
    column = [[0, 1 << i] for i in range(columns.bit_length() - 1)]
    bits = column + row  # lanes, then warps, then more registers
    first = [[1, 0], [2, 0], [4, 0], [8, 0]]
    return gl.DistributedLinearLayout(first + bits[7:], bits[:5], bits[5:7], [], [rows, columns])


@triton.constexpr_function
def in_order_layout(columns, size=64):
    """[size, columns] of results whose dims `convert.transpose` has permuted: a thread has eight neighbouring dims."""
    quarter = columns // 4
    lanes = [[0, 1 << i] for i in range(1, quarter.bit_length() - 1)]
    rows = [[1 << i, 0] for i in range(size.bit_length() - 1)]
    lanes, rows = lanes + rows[: 5 - len(lanes)], rows[5 - len(lanes) :]
    warps = size.bit_length() - 5
    registers = [[0, quarter], [0, 2 * quarter], [0, 1]] + rows[warps:]
    return gl.DistributedLinearLayout(registers, lanes, rows[:warps], [], [size, columns])


@triton.constexpr_function
def result_layout(columns, rows):
    """[rows, columns] of results: each thread has groups of four neighbouring columns, in two of its warp's rows."""
    registers = [[0, 1], [0, 2], [8, 0]] + [[0, 1 << i] for i in range(4, columns.bit_length() - 1)]
    warps = [[1 << i, 0] for i in range(4, rows.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]], warps, [], [rows, columns])


@triton.constexpr_function
def fours_layout(columns, rows):
    """[columns / 16, rows, 16]: `result_layout` for memory that holds 16 dims of a row before those of the next row."""
    registers = [[0, 0, 1], [0, 0, 2], [0, 8, 0]] + [[1 << i, 0, 0] for i in range((columns // 16).bit_length() - 1)]
    lanes = [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warps = [[0, 1 << i, 0] for i in range(4, rows.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [columns // 16, rows, 16])


@triton.constexpr_function
def words_layout(columns, rows=64):
    """[rows, columns / 4] of 32-bit words of four fp8 weights, in the threads of the scores [rows, columns]."""
    registers = [[8, 0]] + [[0, 1 << i] for i in range(2, columns.bit_length() - 3)]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    warps = [[1 << i, 0] for i in range(4, rows.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [rows, columns // 4])


@triton.constexpr_function
def bank_layout(pieces):
    """Shared-memory layout of float32 sums [rows, dims].

    Half a warp accesses eight neighbouring numbers in each of four rows.  These numbers lie in different banks or, with
    fixed pieces, in a quarter of the banks, because addresses of the better swizzle would take registers of the loop.
    """
    return gl.SwizzledSharedLayout(*(2, 1, 16) if pieces else (8, 1, 4), order=[1, 0])


@triton.constexpr_function
def operand_layout(columns, fp8, rows=64):
    """The left operand of a product whose result has `product_layout`, in registers."""
    return gl.DotOperandLayout(0, product_layout(columns, fp8, rows), 4 if fp8 else 2)


@triton.constexpr_function
def weights_layout(dim, fp8, rows, converted):
    """Weights of blocks: the left operand of a product whose result has `results_layout`, in registers."""
    return gl.DotOperandLayout(0, results_layout(dim, fp8, rows, converted), 4 if fp8 else 2)


@triton.constexpr_function
def rows_at_once(live, warps, one_each):
    """Number of rows of states that are joined at a time: two to eight for each warp or, with `one_each`, one."""
    return warps if one_each else max(2 * warps, min(live, 8 * warps))


@triton.constexpr_function
def dims_at_once(dim, rows, pieces, warps):
    """Number of dims of states that are loaded together, for `rows` rows and `pieces` pieces.

    A thread waits for memory once for all these dims.  States of up to 256 dims gain little by more than 128 at a time.
    Wider states are loaded with as many dims as registers allow, at least 128.
    """
    return min(dim, 128) if dim <= 256 else max(128, min(dim, 128 * 32 * warps // (rows * pieces)))


@triton.constexpr_function
def pieces_at_once(size, warps, most, fp8):
    """Number of pieces whose states of `size` elements are loaded together: at most `most`, and 128 elements a thread.

    fp8: Pipe.FP8; if not 0, 64 elements a thread, because two programs may share a multiprocessor.
    """
    return min(most, (64 if fp8 else 128) * 32 * warps // size)


@triton.constexpr_function
def states_layout(rows, warps):
    """[rows, dims] of float32 states: a warp loads up to four rows, and at least 128 neighbouring bytes of each."""
    high = min(4, rows // warps)
    return gl.BlockedLayout([1, 4], [high, 32 // high], [warps, 1], [1, 0])
