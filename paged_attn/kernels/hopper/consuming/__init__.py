"""Consumers of tiles: products, scores, softmax and results, for rows, for columns and for fp8.

The folder imports schedule, loading and the modules that loading imports, never the kernels blocks, shares and mixed.
A new modifier goes to kernels/common/scores.py and, on fragments, to tile_scores.py; a new mainloop is a file here.
"""
