"""Trees of drafts, one for each sequence, as arguments of paged_attention; made once per step for all layers.

The function is plain torch without a host sync, like those of step.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .checks.axes import MAX_WORDS
from .checks.options import integer, unboxed
from .checks.page_table import first_true
from .step import admit, check_lengths, on_host, sequences_of


class Tree(NamedTuple):
    """Keywords of paged_attention: `paged_attention(..., **tree(...)._asdict())`."""

    qq_mask: Tensor  # int32 [tokens, words]
    query_positions: Tensor  # int32 [tokens]


def tree(parents: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, *, nodes: int = 64) -> Tree:
    """qq_mask and query_positions of paged_attention for trees of drafts.

    A node sees itself, its ancestors, and the whole context.  Its position is context_len + its depth, which windows
    and ALiBi use.

    Args:
        parents: [tokens] int32 | int64; index of each query's parent among the queries of its sequence, less than the
            query's own index.  -1: no parent.  Padding may hold anything.
        seq_lens: [seqs] int32 | int64; number of keys of each sequence, the call's own included.
        cu_seqlens_q: [seqs + 1] int32 | int64, as in paged_attention.
        nodes: upper bound of the nodes of a tree, an int from 1 to 1024; the mask has a word for each 32 nodes.  A
            sequence with more queries is a prefill: each query sees all queries before it, and parents do not count.

    Returns:
        Tree(qq_mask [tokens, words] int32, query_positions [tokens] int32), where words = ceil(nodes / 32).

    Raises:
        ValueError: names the tensor, the axis and both sizes, and what to do.  Tensors on the host are read: a parent
            that is no query before its own is named, and so is what `positions` finds.
        TypeError: names the dtype or type wanted, and what to do.

    Source: Miao et al. 2024 (SpecInfer: attention over token trees).
    """
    integer("nodes", nodes, 1, "an int")
    nodes = unboxed(nodes)
    if nodes > 32 * MAX_WORDS:
        given = f"{nodes}: sequences of more queries are prefills"
        raise ValueError(f"nodes must be at most {32 * MAX_WORDS}, got {given}")
    admit(seq_lens=(seq_lens, ("seqs",)), cu_seqlens_q=(cu_seqlens_q, ("seqs + 1",)), parents=(parents, ("tokens",)))
    tokens, words, device = len(parents), -(-nodes // 32), parents.device
    check_lengths(seq_lens, cu_seqlens_q, tokens)
    if seq_lens.shape[0] == 0:
        return Tree(parents.new_full((tokens, words), -1, dtype=torch.int32), parents.new_zeros(tokens).int())
    token, sequence, live = sequences_of(cu_seqlens_q.long(), tokens)
    start, query_len = cu_seqlens_q.long()[:-1][sequence], cu_seqlens_q.long().diff()[sequence]
    index = token - start
    plain = (query_len > nodes) | ~live
    if on_host(parents, cu_seqlens_q):
        _check_parents(parents, index, sequence, ~plain)
    # Index `tokens`, one past the last token, stands for "no parent".
    above = torch.where(plain | (parents < 0), tokens, (start + parents.clamp(max=tokens)).clamp(0, tokens))
    above = torch.cat([above, above.new_full((1,), tokens)])
    depth = (above < tokens).int()
    word = torch.arange(words, device=device)
    bits = torch.where(index[:, None] // 32 == word, torch.ones_like(index, dtype=torch.int32)[:, None], 0)
    bits = torch.cat([bits << (index % 32).int()[:, None], bits.new_zeros(1, words)])
    for _ in range((nodes - 1).bit_length()):  # pointer doubling: each step doubles the ancestors found
        bits, depth, above = bits | bits[above], depth + depth[above], above[above]
    depth = torch.where(plain, index, depth[:-1])
    context_len = seq_lens.long()[sequence] - query_len
    return Tree(torch.where(plain[:, None], -1, bits[:-1]), (context_len + depth).int())


def _check_parents(parents: Tensor, index: Tensor, sequence: Tensor, nodes: Tensor) -> None:
    """Each of the nodes, a token's number in its sequence, has a parent before itself, or none."""
    for i in first_true(nodes & ((parents < -1) | (parents >= index))):
        which = f"parents[{i}] = {parents[i]} (sequence {sequence[i]}, query {index[i]})"
        raise ValueError(f"{which} must be -1 or the number of a query before its own")
