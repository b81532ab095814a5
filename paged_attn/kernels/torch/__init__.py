"""Attention in plain torch: any device, no Triton.

The folder imports arguments, launching, records, strides; kernels.common and Triton only for a score_mod in Triton.
A modifier has a line in `modify` and `modifies` of scores.py, a mask has a field of `Sight` and a line in `mask_of`.
"""
