"""What all dialects share on the device: records, blocks, bounds, shares, scores, the softmax, output, numbers.

It imports launching and nothing else of ours: who calls is not its business.
A new mask or modifier is a function in scores.py or bounds.py and a field in records.py.
"""
