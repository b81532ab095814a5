"""Attention in plain torch: any device, no Triton.

The package imports arguments, launching, records and strides, no dialect, and Triton only for a score_mod in Triton.
A new modifier is a function in scores.py, and a new mask one in visible.py; `blocks.py` calls both files already.
"""
