"""Attention kernels: code that all dialects share, the dialects, and the host's arguments for all of them.

The package imports records, launching and, of the dialects, the portable one, which the interpreter needs decorated.
A new dialect is a folder here and a name in planning/dialects.py; code of two dialects goes to common/.
"""

from ..launching.backend import decorating

with decorating():  # all kernels at once, whichever is imported first
    from .common import copying, merge, numerics, output, records, schedule, scores, softmax
    from .portable import attention_kernel, cache_tiles, cache_write

__all__ = [
    "attention_kernel",
    "cache_tiles",
    "cache_write",
    "copying",
    "merge",
    "numerics",
    "output",
    "records",
    "schedule",
    "scores",
    "softmax",
]
