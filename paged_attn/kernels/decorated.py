"""Kernels of Triton that may be interpreted, all imported at once, whichever is asked for first.

Triton decides as it decorates a function whether it is compiled or interpreted.  Packages of kernels import this module
first; `kernels/torch` does not, so that plain torch needs no Triton.
"""

from ..launching.platform import decorating

with decorating():
    from .common import copying, exchange, merge, numerics, output, records, schedule, scores, softmax
    from .portable import attention_kernel, cache_write, loads

__all__ = [
    "attention_kernel",
    "cache_write",
    "copying",
    "exchange",
    "loads",
    "merge",
    "numerics",
    "output",
    "records",
    "schedule",
    "scores",
    "softmax",
]
