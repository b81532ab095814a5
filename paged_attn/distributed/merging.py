"""merge: ranks exchange their states once, then each rank joins the rows that it returns.

States travel as float32.  After a collective and between Peers, they are joined in the order of the ranks, by the same
arithmetic.  Every rank thus gets the bits that `merge_states` gives in one process.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from ..calls.untraced import untraced
from ..checks.axes import Door
from ..checks.kernel_tensors import FLOAT, FLOAT32
from ..checks.options import choice, refused
from ..checks.overlap import no_overlap
from ..launching.platform import device_of
from . import groups
from .packing import GIVES, Sizes
from .peers import Peers


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
            contiguous.  Results are exchanged as float32; 16-bit results have been rounded before they join.
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
