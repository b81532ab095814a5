"""Loading of pages, queries and new keys into shared memory: rings of slots, loader warps, converters.

The folder imports kernels.common, planning's numbers, args, layouts, asm and shim, and never schedule or consuming.
A new cache format is a file beside packed.py, with boxes in kernels/hopper/launch_arguments.py, or a converter here.
"""
