"""Attention over keys that are divided among ranks: a rank's attention to its own keys, then the merge.

In the merge, ranks exchange their states once, then each rank joins the rows that it returns.  States travel as
float32.  Whether a collective or Peers brought the states, a rank joins them in the order of the ranks, by the same
arithmetic.  Every rank thus gets the bits that `merge_states` gives in one process.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from .. import api
from ..calls import checked
from ..calls.untraced import untraced
from ..checks.axes import Door
from ..checks.kernel_tensors import FLOAT, FLOAT32
from ..checks.options import choice, refused
from ..checks.overlap import no_overlap
from ..launching.platform import device_of
from ..records.formats import is_fp8, page_of, value_dim_of
from . import groups
from .packing import GIVES, Sizes
from .peers import Peers

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
    """`paged_attn.paged_attention` over keys that are divided among ranks.

    Every rank calls this function, with the same lengths and options, its own caches and its own page table.

    Args:
        q: [tokens, heads, head_dim].  With q_heads = "own": [tokens, heads // world, head_dim].
        k_cache: this rank's cache of keys, which holds its own keys as `shard` of paged_attention says.
        v_cache: this rank's cache of values.
        page_table: this rank's page table.
        seq_lens: as in paged_attention, for whole sequences.
        cu_seqlens_q: as in paged_attention; every rank has all query tokens.
        group: a torch.distributed process group, a DeviceMesh of one dimension, None for all processes, or Peers.
        stripe: number of consecutive positions that lie with one rank.  None: page_size.
        q_heads: heads of q on each rank.  With "all", q has all heads, as after a replicated projection of queries.
            With "own", rank r has the r-th of `world` equal parts of the heads, and the call gathers all heads.
        give: heads that each rank returns, as in merge.  "heads" suits a rank's part of the output projection.
        sinks: [heads], all heads on every rank; counted once.
        out: [tokens, given heads, value_dim]; written and returned.  None: a new tensor with the dtype of q, or with
            bfloat16 if q is fp8.
        return_lse: also return the log-sum-exps over all keys.
        check: as in paged_attention.  A checked call also checks that lengths and options are equal on all ranks.
        options: other keywords of paged_attention, except those that shard refuses.

    Returns: as merge.

    Raises:
        ValueError: as paged_attention and merge; in a checked call also names what differs between ranks.
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


# Options that may be tensors of integers or bools.  A checked call then compares their contents between ranks.
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
    """Raise ValueError if lengths or options differ between ranks.

    `groups.agree` gathers one hash for each name, and every rank must give it equally many names.  A rank therefore
    gives all names of ALIKE, with None for the options that this call lacks.
    """
    others = {name: value for name, value in options.items() if name not in (*ALIKE, "score_mod_args")}
    plain = sorted((name, _named(value)) for name, value in others.items())
    alike = {name: options.get(name) for name in ALIKE}
    numbers = dict(shapes=list(q.shape), seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q, options=(stripe, give, plain))
    groups.agree(group, **numbers, **alike)


def _named(value: Any) -> str:
    """Return a text that is equal on all ranks for equal options.

    For a function, the text is its module and name.  All tensors have one text, so their contents are not compared.
    """
    if isinstance(value, Tensor):
        return "a tensor"
    function = getattr(value, "fn", value)
    return f"{function.__module__}.{function.__qualname__}" if callable(function) else repr(value)


# ---- the merge -----------------------------------------------------------------------------------


@untraced
def merge(
    out: Tensor,
    lse: Tensor,
    group: Any,
    sinks: Tensor | None = None,
    give: str = "heads",
    *,
    into: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Join each rank's attention over its own keys into attention over the keys of all ranks.

    Every rank calls this function, with tensors of equal shapes.

    Args:
        out: [tokens, heads, head_dim] float16 | bfloat16 | float32; results over this rank's keys, last axis
            contiguous.  Ranks exchange results as float32.  Give float32, because 16-bit results are already rounded
            before the merge.
        lse: [tokens, heads] float32; log-sum-exps of `out`, minus infinity for a row without a key on this rank.
        group: a torch.distributed process group, a DeviceMesh of one dimension, None for all processes, or Peers.
        sinks: [heads] float16 | bfloat16 | float32, all heads on every rank; counted once, here.
        give: heads that each rank returns, for all tokens.  With "heads", rank r returns the r-th of `world` equal
            parts of the heads; `heads` must be a multiple of `world`.  With "all", every rank returns all heads.
        into: [tokens, given heads, head_dim]; written and returned.  Results are rounded to its dtype.
            None: a new tensor with the dtype of `out`.
        return_lse: also return the log-sum-exps over all keys, sinks included.

    Returns:
        [tokens, given heads, head_dim]; with return_lse also [tokens, given heads] float32.

    Raises:
        ValueError: names the tensor, the axis and both sizes.  Nothing has been sent.
        TypeError: names the dtype or type wanted.
        RuntimeError: names the rank that did not answer Peers within their timeout in an earlier merge.

    Source: Milakov & Gimelshein 2018; Ye et al. 2025 (attention states).
    """
    choice("give", give, GIVES)
    peers = group if isinstance(group, Peers) else None
    process_group = groups.process_group(group)
    rank, world = (peers.rank, peers.world) if peers is not None else groups.rank_and_world(process_group)
    lse = lse.contiguous() if isinstance(lse, Tensor) else lse
    sizes = _sizes(out, lse, sinks, into, give, world, peers)
    if into is None:
        into = out.new_empty((sizes.tokens, sizes.given, sizes.dims))
    merged = torch.empty(into.shape[:2], dtype=torch.float32, device=out.device) if return_lse else None
    if sizes.tokens:
        if peers is not None and peers.holds(sizes):
            peers.exchange(out, lse, sinks, into, merged, sizes)
        else:
            by_collective(out, lse, sinks, into, merged, sizes, process_group, rank)
    return into if merged is None else (into, merged)


def _sizes(
    out: Tensor, lse: Tensor, sinks: Tensor | None, into: Tensor | None, give: str, world: int, peers: Peers | None
) -> Sizes:
    """Check the arguments of a merge, but not the contents of tensors, and return its sizes."""
    door = Door()
    if peers is not None and peers.why_not is None:
        door.device, door.first = peers.device, "group"
    door.tensor("out", out, ("tokens", "heads", "head_dim"), FLOAT)
    door.tensor("lse", lse, ("tokens", "heads"), FLOAT32)
    if sinks is not None:
        door.tensor("sinks", sinks, ("heads",), FLOAT)
    tokens, heads, dims = out.shape
    if give == "heads" and heads % world:
        raise refused("out", f"[tokens, heads, head_dim] with heads a multiple of world = {world}", list(out.shape))
    given = heads // world if give == "heads" else heads
    if into is not None:
        door.sizes["given heads"] = given
        door.tensor("into", into, ("tokens", "given heads", "head_dim"), FLOAT)
        # with Peers, some programs write joined rows to `into` while other programs still send rows of `out`
        no_overlap("into", into, out=out, lse=lse)
    device_of(out.device)
    return Sizes(tokens, heads, given, dims, world)


def by_collective(
    out: Tensor, lse: Tensor, sinks: Tensor | None, into: Tensor, merged: Tensor | None, sizes: Sizes, group: Any,
    rank: int,
) -> None:  # fmt: skip
    """Exchange packed states by an all-to-all, or by an all-gather if every rank returns all heads; then join them."""
    halves: Any = importlib.import_module(".packing" if device_of(out.device).in_torch else ".steps", __package__)
    sent = halves.packed(out, lse, sizes)
    came = groups.exchange(sent, group) if sizes.given < sizes.heads else groups.gather(sent[0], group)
    halves.unpacked(into, merged, came, sinks, sizes, rank)
