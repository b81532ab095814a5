"""All Triton kernels that may be interpreted, imported in one scope (`platform.decorating`).

Triton decides whether a function is compiled or interpreted when the function is decorated.  Folders of kernels import
this module first.  `kernels/torch` does not, so that plain torch needs no Triton.
"""

from ..launching.platform import decorating

with decorating():
    from .common import copying, exchange, merge, numerics, output, records, schedule, scores, softmax
    from .portable import attention_kernel, cache_write, loads, page_kernels, rotary_write

__all__ = [
    "attention_kernel",
    "cache_write",
    "copying",
    "exchange",
    "loads",
    "merge",
    "numerics",
    "output",
    "page_kernels",
    "records",
    "rotary_write",
    "schedule",
    "scores",
    "softmax",
]
