"""Where the threads of a warpgroup hold scores, weights and results; triton hands a record on as a plain tuple here."""

import triton

from .shim import gl


@triton.constexpr_function
def product_layout(columns, fp8):
    """[64, columns] of a warpgroup's product, of 16-bit or fp8 operands: scores, results."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 32 if fp8 else 16])


@triton.constexpr_function
def operand_layout(columns, fp8):
    """The left operand of such a product: weights."""
    return gl.DotOperandLayout(0, product_layout(columns, fp8), 4 if fp8 else 2)
