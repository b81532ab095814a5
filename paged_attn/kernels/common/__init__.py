"""Device code that all dialects share: records, blocks, bounds, shares, scores, the softmax, output, number formats.

The folder imports launching, and no other folder of the package.
A new mask or modifier is a function in scores.py or bounds.py, and a field in records.py.
"""

import importlib

importlib.import_module("..decorated", __package__)  # imports the kernels of common/ and portable/ in one scope
