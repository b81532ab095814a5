"""The definition of correct: the public calls once more, in dense float64 torch, one sequence at a time.

Same signatures, any device, no Triton, nothing of ours imported.  Written to be read, and to be believed; it copies
lengths to the host and checks nothing.
Shapes: T query tokens of one sequence, N keys that they see between them, H heads, G KV heads, D head_dim, of
values and results value_dim.
"""

from .attention import merge_states, paged_attention, write_kv

__all__ = ["merge_states", "paged_attention", "write_kv"]
