"""Portable Triton: every GPU, and the interpreter; what covers every call comes last in the list of dialects.

It imports kernels.common, the files of kernels/ and records; Hopper's kernels may use its plans, never it theirs.
A new way to find keys goes to cache_tiles.py, a tile shape that was measured to tuning.py.
"""
