"""The definition of correct: the public calls once more, in dense float64 torch, one sequence at a time, unchecked.

The folder imports torch, but no other module of this package, so that it shares no fault with a kernel.
What a new argument means goes here first: a mask into attention.py, a cache format into cache.py and scales.py.
"""

from .attention import merge_states, paged_attention
from .cache import copy_pages, gather_pages, move_pages, write_kv
from .rotation import write_qkv

__all__ = ["copy_pages", "gather_pages", "merge_states", "move_pages", "paged_attention", "write_kv", "write_qkv"]
