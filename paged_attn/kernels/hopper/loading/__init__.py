"""How pages, queries and new keys come into shared memory: descriptors, rings of slots, the warps that load.

It imports planning's numbers, args, layouts, asm and shim, and nothing of who consumes or of who has which item.
A new cache format is a file here beside packed.py; what has to be converted on the way goes to convert.py.
"""
