"""Trees of drafts, each sequence's own, as paged_attention takes them: made once a step, for all layers.

Plain torch without a host sync, as the integers of step.py are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .checks.axes import MAX_WORDS
from .checks.options import integer, unboxed
from .step import admit, sequences_of


class Tree(NamedTuple):
    """Keywords of paged_attention: `paged_attention(..., **tree(...)._asdict())`."""

    qq_mask: Tensor  # int32 [tokens, words]
    query_positions: Tensor  # int32 [tokens]


def tree(parents: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, *, nodes: int = 64) -> Tree:
    """Which of the call's own keys each query sees in its sequence's tree, and where it stands: behind its ancestors.

    A node sees itself and its ancestors, and all of the context.  Its position is the context's length plus its depth,
    which windows and ALiBi count by.

    Args:
        parents: [tokens] int32 | int64; the number of a query's parent among the queries of its sequence, less than
            its own; -1: none.  Padding may hold anything.
        seq_lens: [seqs] int32 | int64; keys of each sequence, those of the call included.
        cu_seqlens_q: [seqs + 1] int32 | int64, as in paged_attention.
        nodes: the most nodes of a tree, on the host, up to 1024; a word of the mask is 32 of them.  A sequence of more
            queries is a prefill beside the trees: each sees all before itself, whatever its parents say.

    Returns: qq_mask and query_positions, as paged_attention takes them.

    Raises: ValueError naming the tensor, the axis and both sizes; TypeError naming the dtype wanted.
    """
    integer("nodes", nodes, 1, "an int")
    nodes = unboxed(nodes)
    if nodes > 32 * MAX_WORDS:
        given = f"{nodes}: sequences of more queries are prefills"
        raise ValueError(f"nodes must be at most {32 * MAX_WORDS}, got {given}")
    admit(seq_lens=(seq_lens, ("seqs",)), cu_seqlens_q=(cu_seqlens_q, ("seqs + 1",)), parents=(parents, ("tokens",)))
    tokens, words, device = len(parents), -(-nodes // 32), parents.device
    if seq_lens.shape[0] == 0:
        return Tree(parents.new_full((tokens, words), -1, dtype=torch.int32), parents.new_zeros(tokens).int())
    token, sequence, live = sequences_of(cu_seqlens_q.long(), tokens)
    start, query_len = cu_seqlens_q.long()[:-1][sequence], cu_seqlens_q.long().diff()[sequence]
    index = token - start
    plain = (query_len > nodes) | ~live
    # Behind the last token is one that stands for no parent.
    above = torch.where(plain | (parents < 0), tokens, (start + parents).clamp(0, tokens))
    above = torch.cat([above, above.new_full((1,), tokens)])
    depth = (above < tokens).int()
    word = torch.arange(words, device=device)
    bits = torch.where(index[:, None] // 32 == word, torch.ones_like(index, dtype=torch.int32)[:, None], 0)
    bits = torch.cat([bits << (index % 32).int()[:, None], bits.new_zeros(1, words)])
    for _ in range((nodes - 1).bit_length()):  # twice as many ancestors each time
        bits, depth, above = bits | bits[above], depth + depth[above], above[above]
    depth = torch.where(plain, index, depth[:-1])
    context_len = seq_lens.long()[sequence] - query_len
    return Tree(torch.where(plain[:, None], -1, bits[:-1]), (context_len + depth).int())
