"""How fp8 keys and values become operands of blocks' products (`loading/convert.py`)."""

import torch

from ....records.problem import Problem
from .shapes import is_wide

NONE, WIDEN, TRANSPOSE, WIDEN_VALUES = 0, 1, 2, 3


def conversion(p: Problem) -> int:
    """What a converter does to tiles."""
    if p.cache.itemsize == 2:
        return NONE
    if is_wide(p):
        return WIDEN
    both = p.query == p.cache == torch.float8_e4m3fn
    if both and p.query_box and p.head_dim <= 128:
        return TRANSPOSE
    # the tensor cores keep 14 bits of a sum of fp8 products: what a log-sum-exp would show
    in_two = p.query == torch.bfloat16 and p.cache == torch.float8_e4m3fn and not p.lse and p.head_dim <= 128
    return WIDEN_VALUES if in_two else WIDEN
