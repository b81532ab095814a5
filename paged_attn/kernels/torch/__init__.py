"""Attention in plain torch: any device, no Triton.

The package imports records and launching, and neither Triton nor another dialect.
A new modifier is a function in scores.py, and a new mask one in visible.py; `blocks.py` calls both files already.
"""
