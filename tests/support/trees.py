"""Trees of drafts, and their branches, each of which has the results of a plain sequence."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from paged_attn import reference
from tests.support.cases import TOLERANCES, bound_of

Parents = Sequence[int]  # the parent of each node, an earlier node; -1: none


def random_tree(rng: random.Random, nodes: int, wide: int = 4) -> Parents:
    """Return a tree in which a node's parent is one of the `wide` nodes before it, or none."""
    return [rng.randint(max(-1, i - wide), i - 1) for i in range(nodes)]


def path_to(parents: Parents, node: int) -> list[int]:
    """Return the nodes from a root down to a node."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def depths(parents: Parents) -> list[int]:
    return [len(path_to(parents, node)) - 1 for node in range(len(parents))]


def bias_of(parents: Parents, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the `qq_bias` [nodes, nodes] that shows a node only its ancestors and itself."""
    bias = torch.full((len(parents), len(parents)), -torch.inf, dtype=dtype)
    for node in range(len(parents)):
        bias[node, path_to(parents, node)] = 0
    return bias


def with_tree(inputs: dict[str, Any], parents: Parents) -> dict[str, Any]:
    """Return a call's inputs with a tree's bias and positions; no sequence may have more queries than nodes."""
    starts, lens = inputs["cu_seqlens_q"].tolist(), inputs["seq_lens"].tolist()
    positions = torch.full((len(inputs["q"]),), -1, dtype=torch.int32)
    for seq, (start, end) in enumerate(itertools.pairwise(starts)):
        positions[start:end] = torch.tensor(depths(parents)[: end - start]) + (lens[seq] - (end - start))
    device = inputs["q"].device
    return inputs | {"qq_bias": bias_of(parents).to(device), "query_positions": positions.to(device)}


def branches(inputs: dict[str, Any], parents: Parents) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield for each node (tokens of its branch, results of a plain causal sequence, those of magnitudes of values).

    The call must be over an NHD cache without scales that holds all keys.
    """
    starts, lens = inputs["cu_seqlens_q"].tolist(), inputs["seq_lens"].tolist()
    names = ("window_size", "softcap", "alibi_slopes", "sinks", "softmax_scale")
    options = {name: inputs[name] for name in names if name in inputs}
    device, page = inputs["q"].device, inputs["k_cache"].shape[1]
    for seq, (start, end) in enumerate(itertools.pairwise(starts)):
        context = lens[seq] - (end - start)
        for node in range(end - start):
            path = torch.tensor(path_to(parents, node), device=device)
            slots = torch.cat([torch.arange(context, device=device), context + path])
            pages = inputs["page_table"][seq].long()[slots // page]
            seen = pages < len(inputs["k_cache"])  # other keys are left of every window
            pages = pages.where(seen, 0)
            k, v = (
                inputs[name][pages, slots % page].where(seen[:, None, None], torch.zeros((), dtype=inputs[name].dtype))
                for name in ("k_cache", "v_cache")
            )
            one = dict(
                q=inputs["q"][start + path], k_cache=k[None], page_table=path.new_zeros(1, 1),
                seq_lens=path.new_tensor([len(slots)]), cu_seqlens_q=path.new_tensor([0, len(path)]), **options,
            )  # fmt: skip
            want, weighted = (reference.paged_attention(**one, v_cache=x[None]) for x in (v, v.abs()))
            yield start + path, want, weighted


def assert_branches(out: Tensor, inputs: dict[str, Any], parents: Parents) -> None:
    """Assert that the results of a tree are those of its branches as plain sequences."""
    compute = TOLERANCES[inputs["k_cache"].dtype][0]
    for tokens, want, weighted in branches(inputs, parents):
        bound = bound_of(want, weighted, compute, out.dtype)
        error = (out[tokens].double() - want).abs()
        assert (error <= bound).all(), f"tokens {tokens.tolist()}: {float((error / bound).max()):.3g} of the bound"
