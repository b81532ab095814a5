"""Attention kernels: code that all dialects share, the dialects, and the host's arguments for all of them.

The package imports records, launching and the portable kernels, which `decorated.py` defines with all others.
A new dialect is a folder here and a name in planning/dialects.py; code of two dialects goes to common/.
"""
