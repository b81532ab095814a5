"""Gluon kernels for Hopper (sm_90), with explicit loaders, rings and consumers.

Modules import rightwards: dialect, launch_arguments, kernels, consuming, schedule, loading, planning, asm, layouts.
A new kernel is a file here and a plan in planning/.  Only dialect, args and planning can be imported without Gluon.
"""

import importlib

importlib.import_module("..decorated", __package__)  # kernels that may be interpreted come first
