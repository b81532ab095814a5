"""Gluon kernels for Hopper (sm_90), with explicit loaders, rings and consumers.

Modules import downwards: dialect, launch_arguments, kernels, consuming, schedule, loading, planning, asm, layouts.
A new kernel is a file here and a plan in planning/.  Without Gluon only the host's part is imported.
"""

import importlib

importlib.import_module("..decorated", __package__)  # kernels that may be interpreted come first
