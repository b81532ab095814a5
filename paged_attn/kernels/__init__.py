"""Attention kernels: code that all dialects share, the dialects, and the host's arguments for all of them.

The package imports records, launching and, of the dialects, the portable one, which the interpreter needs decorated.
A new dialect is a folder here and a name in planning/dialects.py; code of two dialects goes to common/.
"""
