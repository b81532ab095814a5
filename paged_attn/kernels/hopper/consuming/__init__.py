"""Consumers of tiles: products, scores, softmax and results, for rows, for columns and for fp8.

The folder imports schedule, loading and kernels.common, never the kernels that are made of it.
A new modifier goes to kernels/common/scores.py and, by fragments, to tile_scores.py; a new product is a loop here.
"""
