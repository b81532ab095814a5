"""Loading of pages, queries and new keys into shared memory: descriptors, rings of slots, loader warps, converters.

The folder imports planning's numbers, args, layouts, asm and shim, and never schedule or consuming.
A new cache format is a file beside packed.py; conversions on the way go to convert.py.
"""
