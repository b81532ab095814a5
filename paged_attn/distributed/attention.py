"""Attention over keys that lie over ranks: a rank's own, and the states of all joined."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import api
from ..calls import checked
from ..calls.untraced import untraced
from ..checks.options import choice
from ..launching.platform import device_of
from ..records.formats import is_fp8, page_of, value_dim_of
from . import groups
from .merging import merge

Q_HEADS = ("all", "own")


@untraced
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Any,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None = None,
    *,
    group: Any,
    stripe: int | None = None,
    q_heads: str = "all",
    give: str = "heads",
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    check: bool | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`paged_attn.paged_attention` of keys that lie over ranks.

    Every rank calls it, with the same lengths and options, and its own caches and page table.

    Args:
        q: [tokens, heads, head_dim]; with q_heads = "own" [tokens, heads // world, head_dim].
        k_cache, v_cache, page_table: this rank's, which hold its own keys, as `shard` of paged_attention says.
        seq_lens, cu_seqlens_q: of whole sequences, as in paged_attention.
        group: a torch.distributed process group, a DeviceMesh of one dimension, None for all processes, or Peers.
        stripe: consecutive positions that lie with one rank; page_size if None.
        q_heads: "all": every rank has the queries of all heads, as where their projection is replicated.  "own": rank r
            has those of heads r * heads // world ..., and the call gathers them.
        give: as in merge: "heads", what the rank's part of the next projection takes, or "all".
        sinks: [heads], of all heads; counted once.
        out: [tokens, given heads, value_dim]; written and returned.  None: made by the call, of q's dtype, of fp8
            queries bfloat16.
        return_lse: also return the log-sum-exps over all keys.
        check: as in paged_attention; True also makes sure that lengths and options are the same on all ranks.
        options: other keywords of paged_attention, except those refused beside shard.

    Returns: as merge.

    Raises:
        ValueError: as paged_attention and merge; in a checked call also names the numbers that differ between ranks.
        TypeError: as paged_attention and merge.
        RuntimeError: as merge.
    """
    choice("q_heads", q_heads, Q_HEADS)
    process_group = groups.process_group(group)
    rank, world = groups.rank_and_world(process_group)
    if stripe is None:
        stripe = page_of(k_cache, options.get("kv_layout", "NHD"))[0]
    if checked.enabled(check, device_of(q.device)):
        _agree(process_group, q, seq_lens, cu_seqlens_q, stripe, give, options)
    if q_heads == "own":
        gathered = groups.gather(q, process_group)  # [world, tokens, own heads, head_dim]
        q = gathered.transpose(0, 1).flatten(1, 2)
    value_dim = value_dim_of(k_cache, v_cache)
    states = torch.empty((*q.shape[:2], value_dim), dtype=torch.float32, device=q.device)
    own, lse = api.paged_attention(
        q, k_cache, v_cache, page_table, seq_lens, cu_seqlens_q, shard=(rank, world, stripe), out=states,
        return_lse=True, check=check, **options,
    )  # fmt: skip
    if out is None:
        heads = q.shape[1] // world if give == "heads" else q.shape[1]
        dtype = torch.bfloat16 if is_fp8(q.dtype) else q.dtype
        out = torch.empty((q.shape[0], heads, value_dim), dtype=dtype, device=q.device)
    return merge(own, lse, group, sinks, give, into=out, return_lse=return_lse)


# Tensors of integers that all ranks must have alike, where they are given; some are options without a tensor.
ALIKE = ("causal", "window_size", "prefix_lens", "spans", "qq_mask", "query_positions")


def _agree(
    group: Any,
    q: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None,
    stripe: int,
    give: str,
    options: dict[str, Any],
) -> None:
    """What all ranks must have alike: as many numbers on each rank, whatever it was given."""
    others = {name: value for name, value in options.items() if name not in (*ALIKE, "score_mod_args")}
    plain = sorted((name, _named(value)) for name, value in others.items())
    alike = {name: options.get(name) for name in ALIKE}
    numbers = dict(shapes=list(q.shape), seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q, options=(stripe, give, plain))
    groups.agree(group, **numbers, **alike)


def _named(value: Any) -> str:
    """Return a text that is equal for the same option on all ranks; functions have names, tensors no numbers."""
    if isinstance(value, Tensor):
        return "a tensor"
    function = getattr(value, "fn", value)
    return f"{function.__module__}.{function.__qualname__}" if callable(function) else repr(value)
