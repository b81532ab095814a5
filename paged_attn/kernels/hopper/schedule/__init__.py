"""The tile scheduler finds the next work item, tells it to consumers and loaders, and joins a block's pieces.

The folder imports loading and the modules that loading imports, never consuming.
A new way of dividing work is a file beside walk.py and items.py.
"""
