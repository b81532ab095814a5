"""Attention on the device: what all dialects share, the dialects, and what the host does for all of these alike.

It imports records and launching; of the dialects the portable one alone, for the interpreter must see it decorated.
A new dialect is a folder here and a name in planning/dialects.py; what two dialects do goes to common/.
"""

from ..launching.backend import decorating

with decorating():  # all of them, whichever is asked for first
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
