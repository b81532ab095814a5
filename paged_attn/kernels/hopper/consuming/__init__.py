"""What is done with tiles: products, scores, softmax, results, for rows, for columns and for fp8.

It imports schedule, loading and kernels.common; of the kernels that are made of it none.
A new modifier of scores goes to tile_scores.py; a new shape of products is a loop in a file of its own.
"""
