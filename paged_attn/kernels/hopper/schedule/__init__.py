"""The tile scheduler: the next work item, its letters to consumers and loaders, and the joining of a block's pieces.

The folder imports loading and the modules that loading imports, never consuming.
A new way of dividing work is a file beside walk.py and items.py.
"""
