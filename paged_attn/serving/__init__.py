"""A small continuous-batching server around the library: traces, pages, the scheduler and the checked step loop.

It holds no model: queries, keys and values are random.  Everything that attention sees of serving is real.
"""
