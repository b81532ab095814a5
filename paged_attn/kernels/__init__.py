"""Portable Triton: every GPU, and the interpreter."""

from ..backend import decorating

with decorating():  # all of them, whichever is asked for first
    from . import args, attention, cache, merge, numerics, output, schedule, scores, softmax, write

__all__ = ["args", "attention", "cache", "merge", "numerics", "output", "schedule", "scores", "softmax", "write"]
