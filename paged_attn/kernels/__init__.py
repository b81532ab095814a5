"""Attention on the device: what all dialects share, and the dialects."""

from ..launching.backend import decorating

with decorating():  # all of them, whichever is asked for first
    from .common import merge, numerics, output, records, schedule, scores, softmax
    from .portable import attention, cache, write

__all__ = ["attention", "cache", "merge", "numerics", "output", "records", "schedule", "scores", "softmax", "write"]
