"""Keys over ranks: each rank has some keys of every sequence, and a group of processes joins the results of all ranks.

The folder imports api.py and layers below it.  Adapters may import the folder.
A new way to exchange states is a file beside peers.py and a branch of `attention.merge`.
"""

from .attention import merge, paged_attention
from .indices import gathered_table, own_lens, own_positions, page_table, slots, zigzag
from .peers import Peers

__all__ = [
    "Peers",
    "gathered_table",
    "merge",
    "own_lens",
    "own_positions",
    "page_table",
    "paged_attention",
    "slots",
    "zigzag",
]
