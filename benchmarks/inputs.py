"""Tensors of a case for all peers, without the tests' poison, which some peers read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.masked import images
from tests.support.cases import BAD_PAGE, Case, bits, build, is_fp8


def inputs_of(case: Case, device: str) -> dict[str, Any]:
    """Return the arguments of `paged_attention` without poison: dead slots hold 0, table tails page 0.

    The tests' NaN and page 2^31 - 1 are legal, but some peers let them into the result.  Spans, prefix lengths and
    biases of trees are this folder's, not the tests'.
    """
    inputs = build(case, device)
    inputs["out"] = inputs["q"].new_empty((*inputs["q"].shape[:2], case.value_width), dtype=case.dtype_of_out)
    inputs["page_table"] = inputs["page_table"].where(inputs["page_table"] != BAD_PAGE, 0)
    for name in ("k_cache", "v_cache"):
        _clear(inputs[name])
    if case.spans:
        inputs["spans"] = torch.tensor(images(case), dtype=case.integers, device=device)
    if case.prefix:  # equal for all sequences
        inputs["prefix_lens"] = torch.full_like(inputs["prefix_lens"], case.prefix)
    if case.tree:
        inputs["qq_bias"] = tree(case.qq_bias).to(device, case.dtype)
    return inputs


def tree(nodes: int) -> Tensor:
    """Return the bias [nodes, nodes] of a binary tree of drafts: a node sees itself and its ancestors.

    The parent of node i is (i - 1) // 2.
    """
    bias = torch.full((nodes, nodes), -torch.inf)
    for node in range(nodes):
        ancestor = node
        while ancestor >= 0:
            bias[node, ancestor] = 0.0
            ancestor = (ancestor - 1) // 2 if ancestor else -1
    return bias


def _clear(cache: Tensor) -> None:
    """Replace NaN by 0, some pages at a time: a mask of the whole cache may not fit beside it."""
    for part in cache.split(1 << 12):
        nan = (bits(part) & 0x7F) == 0x7F if is_fp8(cache.dtype) else part.isnan()
        bits(part).masked_fill_(nan, 0)
