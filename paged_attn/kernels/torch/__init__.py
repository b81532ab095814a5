"""Attention in plain torch: any device, no Triton.

The folder imports arguments, launching, records, strides; kernels.common and Triton only for a score_mod in Triton.
A new modifier gets a line in `modify` and `modifies` of scores.py, a new mask a field of `Sight` and one in `mask_of`.
"""
