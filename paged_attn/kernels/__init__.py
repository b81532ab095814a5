"""Attention kernels: the dialects, device code that dialects share (common/), and steps that dialects share.

The package imports arguments, launching, records, strides; `decorated.py` imports all kernels that may be interpreted.
A new dialect is a folder here and a name in planning/dialects.py; code of two dialects goes to common/.
"""
