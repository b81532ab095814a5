"""Which item of work comes next, how consumers and loaders are told, and who joins the pieces of a block.

It imports loading and what lies below it, never the consumers, who are told.
A new way to share work out is a file beside walk.py and items.py.
"""
