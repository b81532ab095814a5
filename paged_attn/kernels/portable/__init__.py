"""Portable Triton kernels for every GPU and the interpreter; this dialect covers every call, and is tried last.

The folder imports kernels.common, files of kernels/, launching and records.  Hopper's dialect imports this folder,
never the reverse.  A new way to find keys goes to loads.py, and a measured tile shape to tuning.py.
"""

import importlib

importlib.import_module("..decorated", __package__)  # imports the kernels of common/ and of this folder in one scope
