"""Integers of an engine's step, computed once for all layers: numbers of pages, positions, slots, trees of drafts.

The functions are plain torch without a host sync: CUDA graphs can capture them, and torch.compile fuses them.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeGuard, TypeVar

import torch
from torch import Tensor

from .arguments import table_parts
from .checks.axes import MAX_WORDS, Door
from .checks.contents import check_own_keys, query_lens
from .checks.kernel_tensors import INTEGER, names, watched
from .checks.options import INT32_MAX, both, integer, kind, unboxed
from .checks.page_table import admit_ragged, first_true

Table = Tensor | tuple[Tensor, Tensor]
IntOrTensor = TypeVar("IntOrTensor", int, Tensor)


def pages_needed(lengths: IntOrTensor, page_size: int) -> IntOrTensor:
    """Number of pages that hold the given numbers of tokens.

    Args:
        lengths: numbers of tokens: an int, or an integer tensor of any shape.  0 or less: no page.
        page_size: tokens in a page, an int >= 1.

    Returns:
        An int for an int; a tensor of the same shape and dtype for a tensor.

    Raises:
        ValueError: page_size is out of range.
        TypeError: names the argument, the given and the wanted type, and a conversion if there is one.
    """
    integer("page_size", page_size, 1, "an int")
    lengths, page_size = unboxed((lengths, page_size))
    _whole("lengths", lengths)
    if isinstance(lengths, Tensor):
        return (lengths // page_size + (lengths % page_size > 0)).clamp(min=0)  # lengths + page_size - 1 could overflow
    return max(0, -(-lengths // page_size))


def _whole(name: str, value: Any) -> None:
    """Check an int, or a tensor of integers of any width."""
    wanted = "an int or a tensor of integers"
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            given = f"{names((value.dtype,))}: {name}.long()"
            raise TypeError(f"{name} must be {wanted}, got {given}")
    elif not isinstance(value, int):
        cure = "torch.as_tensor" if hasattr(value, "__len__") else "int" if isinstance(value, float) else ""
        given = f"{kind(value)}: {cure}({name})" if cure else kind(value)
        raise TypeError(f"{name} must be {wanted}, got {given}")


def positions(seq_lens: Tensor, cu_seqlens_q: Tensor | None = None, *, tokens: int | None = None) -> Tensor:
    """Position of each query token in its sequence, for rotary embeddings and `slots`; -1 for padding.

    Query i of a sequence has position context_len + i, where context_len = seq_len - query_len, as in paged_attention.

    Args:
        seq_lens: [seqs] int32 | int64; number of keys of each sequence after the step, the step's own included.
        cu_seqlens_q: [seqs + 1] int32 | int64; sequence s has the tokens cu_seqlens_q[s] to cu_seqlens_q[s + 1] - 1.
            None: one query token per sequence.
        tokens: number of rows of q, an int, padding included.  Required with cu_seqlens_q, because the last entry of
            cu_seqlens_q stays on the device.  None without cu_seqlens_q.

    Returns:
        [tokens] int64.  -1 for padding (tokens from cu_seqlens_q[-1] on, and tokens of empty sequences).

    Raises:
        ValueError: names the tensor, the axis and both sizes, and what to do.  Tensors on the host are read, too:
            cu_seqlens_q must ascend from 0 to at most `tokens`.  A sequence of two or more query tokens must have at
            least as many keys as query tokens, unless its entry in seq_lens is negative.
        TypeError: names the dtype or type wanted, and what to do.
    """
    admit(seq_lens=(seq_lens, ("seqs",)), cu_seqlens_q=(cu_seqlens_q, ("seqs + 1",)))
    if cu_seqlens_q is None and tokens is None:
        return seq_lens.long().clamp(min=0) - 1
    both("tokens", tokens, "cu_seqlens_q", cu_seqlens_q)
    integer("tokens", tokens, 0, "an int")
    tokens = unboxed(tokens)
    assert cu_seqlens_q is not None
    assert tokens is not None
    check_lengths(seq_lens, cu_seqlens_q, tokens)
    if seq_lens.shape[0] == 0:
        return seq_lens.new_full((tokens,), -1, dtype=torch.int64)
    token, sequence, live = sequences_of(cu_seqlens_q, tokens)
    # The last query of a sequence has position seq_len - 1.
    position = token + (seq_lens.long().clamp(min=0) - cu_seqlens_q[1:])[sequence]
    return torch.where(live, position, -1).clamp(min=-1)


def slots(page_table: Table, positions: Tensor, page_size: int, cu_seqlens_q: Tensor | None = None) -> Tensor:
    """Compute the slot number of each token from its position: the slot_mapping of write_kv.

    Args:
        page_table: [seqs, max_pages] int32 | int64, or (indptr [seqs + 1], indices), as in paged_attention.
        positions: [tokens] int32 | int64, as `positions` returns them.  Negative: padding.
        page_size: tokens in a page, an int >= 1.
        cu_seqlens_q: [seqs + 1] int32 | int64; sequence s has the tokens cu_seqlens_q[s] to cu_seqlens_q[s + 1] - 1.
            None: one token per sequence, so tokens = seqs.

    Returns:
        [tokens] int64, page * page_size + slot.  Padding and positions without a page have -1, which write_kv skips.
            Positions have no page past the last column or the end of a ragged row, or where the table's entry is
            negative.

    Raises:
        ValueError: names the tensor, the axis and both sizes, and what to do.  If cu_seqlens_q is on the host, it must
            ascend from 0 to at most the number of tokens.
        TypeError: names the dtype or type wanted, and what to do.
    """
    axis = "seqs" if cu_seqlens_q is None else "tokens"
    table = (page_table, ("seqs", "max_pages"))
    admit(page_table=table, positions=(positions, (axis,)), cu_seqlens_q=(cu_seqlens_q, ("seqs + 1",)))
    integer("page_size", page_size, 1, "an int")
    page_size = unboxed(page_size)
    pages, indptr = table_parts(page_table)
    seqs = pages.shape[0] if indptr is None else indptr.shape[0] - 1
    position = positions.long()
    live = position >= 0
    check_starts(cu_seqlens_q, position.shape[0])
    if cu_seqlens_q is None:
        sequence = torch.arange(seqs, device=position.device)
    else:
        _, sequence, owned = sequences_of(cu_seqlens_q, position.shape[0])
        live = live & owned
    if seqs == 0 or pages.numel() == 0:
        return torch.full_like(position, -1)
    column = position // page_size
    if indptr is None:
        live = live & (column < pages.shape[1])
        page = pages[sequence, column.clamp(0, pages.shape[1] - 1)].long()
    else:
        first, past = indptr[sequence], indptr[sequence + 1]
        live = live & (column < past - first) & (column < pages.shape[0] - first)
        page = pages[(first + column.clamp(max=pages.shape[0])).clamp(0, pages.shape[0] - 1)].long()
    page = page.clamp(max=INT32_MAX)  # larger ids are in no cache; their slot numbers could overflow
    return torch.where(live & (page >= 0), page * page_size + position % page_size, -1)


class Tree(NamedTuple):
    """Keywords of paged_attention: `paged_attention(..., **tree(...)._asdict())`."""

    qq_mask: Tensor  # int32 [tokens, words]
    query_positions: Tensor  # int32 [tokens]


def tree(parents: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, *, nodes: int = 64) -> Tree:
    """qq_mask and query_positions of paged_attention for trees of drafts.

    A node sees itself, its ancestors, and the whole context.  Its position is context_len + its depth; windows, chunks
    and ALiBi use this position.

    Args:
        parents: [tokens] int32 | int64; index of each query's parent among the queries of its sequence, less than the
            query's own index.  -1: no parent.  Padding may hold anything.
        seq_lens: [seqs] int32 | int64; number of keys of each sequence, the call's own included.
        cu_seqlens_q: [seqs + 1] int32 | int64, as in paged_attention.
        nodes: upper bound of the nodes of a tree, an int from 1 to 1024; the mask has a word for each 32 nodes.  A
            sequence with more queries is a prefill: each query sees itself and all queries before it, and parents are
            ignored.

    Returns:
        Tree(qq_mask [tokens, words] int32, query_positions [tokens] int32), where words = ceil(nodes / 32).

    Raises:
        ValueError: names the tensor, the axis and both sizes, and what to do.  If the tensors are on the host, their
            numbers are checked, too: a parent must be -1 or the index of an earlier query, and lengths must be as
            `positions` wants them.
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
    """Check that the parent of each node is -1 or an earlier query of its sequence.

    index: number of each query in its sequence [tokens].  nodes: whether a query is a node of a tree [tokens].
    """
    for i in first_true(nodes & ((parents < -1) | (parents >= index))):
        which = f"parents[{i}] = {parents[i]} (sequence {sequence[i]}, query {index[i]})"
        raise ValueError(f"{which} must be -1 or the number of a query before its own")


def sequences_of(cu_seqlens_q: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """(index of each token, index of its sequence, whether a sequence has the token), [tokens] each."""
    last = cu_seqlens_q.shape[0] - 2
    token = torch.arange(tokens, dtype=cu_seqlens_q.dtype, device=cu_seqlens_q.device)
    # If several sequences begin at one token, all but the last of them are empty.
    sequence = torch.searchsorted(cu_seqlens_q, token, right=True) - 1
    return token, sequence.clamp(0, max(last, 0)), sequence <= last


def on_host(*tensors: Tensor) -> bool:
    """Whether the contents of these tensors can be read now: they are on the host, and no graph is traced."""
    return not torch.compiler.is_compiling() and not watched(*tensors) and all(x.device.type == "cpu" for x in tensors)


def check_starts(cu_seqlens_q: Tensor | None, tokens: int | None = None) -> None:
    """Check that cu_seqlens_q, if it is on the host, ascends from 0 to at most `tokens`."""
    if cu_seqlens_q is not None and on_host(cu_seqlens_q):
        query_lens(cu_seqlens_q.shape[0] - 1, tokens, cu_seqlens_q)


def check_lengths(seq_lens: Tensor, cu_seqlens_q: Tensor, tokens: int) -> None:
    """Check tensors, if they are on the host: cu_seqlens_q ascends, and seq_lens count the query tokens, too."""
    check_starts(cu_seqlens_q, tokens)
    if on_host(seq_lens, cu_seqlens_q):
        query = cu_seqlens_q.long().diff()
        check_own_keys(seq_lens.long(), query, query > 0)


def admit(**given: tuple[Any, tuple[str, ...]]) -> None:
    """Check dtypes and shapes of integer tensors, and that all are on one device.  A page_table may be ragged.

    given: (tensor, names of its axes) for each argument name.  Inside torch.compile nothing is checked; torch's own
    errors remain.
    """
    if torch.compiler.is_compiling():
        return
    door = Door()
    for name, (value, axes) in given.items():
        if name == "page_table" and is_ragged(value):
            admit_ragged(door, *value)
        elif name != "cu_seqlens_q":
            door.tensor(name, value, axes, INTEGER)
        elif value is not None:
            door.sizes["seqs + 1"] = door.sizes["seqs"] + 1
            door.tensor(name, value, axes, INTEGER)


def is_ragged(page_table: Any) -> TypeGuard[tuple[Tensor, Tensor]]:
    """Whether a page table is (indptr, indices), and not a tensor or rows of page ids."""
    return isinstance(page_table, (tuple, list)) and len(page_table) == 2 and isinstance(page_table[0], Tensor)
