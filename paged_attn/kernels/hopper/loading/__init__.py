"""Loading of pages, queries and new keys into shared memory: descriptors, rings of slots, loader warps, converters.

The folder imports planning's numbers, args, layouts, asm and shim, and never schedule or consuming.
To add a cache format, add a file beside packed.py.  Conversions on the way go to convert.py.
"""
