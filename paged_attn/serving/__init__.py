"""A small continuous-batching server around the library: traces, pages, the scheduler and the checked step loop.

The server has no model: queries, keys and values are random.  Lengths, pages and batches are those of real serving.
"""
