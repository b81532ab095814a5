"""Attention in plain torch: any device, no Triton.

The package imports records and launching, and neither Triton nor another dialect.
A new modifier is a function in scores.py, a new mask one in visible.py; both have their place in `blocks.py` already.
"""
