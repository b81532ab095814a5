"""Consumers of tiles: products, scores, softmax and results, for rows, for columns and for fp8.

The folder imports schedule, loading and kernels.common, never the kernels that are made of it.
To add a modifier of scores, see common/scores.py, and `judge` in tile_scores.py for its form by fragments.  A new shape
of products is a loop in a file of its own.
"""
