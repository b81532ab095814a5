"""Portable Triton: every GPU, and the interpreter."""

from .. import backend as backend  # first, for it decides which of the two jit functions are for
