"""Gluon kernels for Hopper (sm_90): the nouns of kernels, with loaders, rings and consumers in the open.

Its stages import downwards: dialect, the kernels, consuming, schedule, loading, planning, assembly, args, shim.
A new kernel is a file here and a plan in planning/; without Gluon nothing here is imported but the host's part.
"""
