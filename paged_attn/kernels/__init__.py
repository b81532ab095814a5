"""Attention kernels: code that all dialects share, the dialects, and the host's arguments for all of them.

The package imports arguments, launching and records; `decorated.py` imports all kernels that may be interpreted.
A new dialect is a folder here and a name in planning/dialects.py; code of two dialects goes to common/.
"""
