"""Portable Triton kernels for every GPU and the interpreter; this dialect covers every call, and is the last one.

The folder imports kernels.common, the files of kernels/ and records.  Hopper's kernels may use plans of this folder,
never the reverse.  A new way to find keys goes to loads.py, and a measured tile shape to tuning.py.
"""

import importlib

importlib.import_module("..decorated", __package__)  # imports the kernels of all folders at once
