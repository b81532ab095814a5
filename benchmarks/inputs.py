"""Tensors of a case for all peers, without the poison that a peer may read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.masked import images
from tests.support.cases import BAD_PAGE, Case, bits, build, is_fp8


def inputs_of(case: Case, device: str) -> dict[str, Any]:
    """The arguments of `paged_attention` without poison: dead slots hold 0, table tails page 0.

    The tests' NaN and page 2^31 - 1 are legal, but some peers let them into the result.
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
    """[nodes, nodes] bias of a binary tree of drafts: node i descends from (i - 1) // 2, and sees its ancestors."""
    bias = torch.full((nodes, nodes), -torch.inf)
    for node in range(nodes):
        ancestor = node
        while ancestor >= 0:
            bias[node, ancestor] = 0.0
            ancestor = (ancestor - 1) // 2 if ancestor else -1
    return bias


def _clear(cache: Tensor) -> None:
    """Replace NaN by 0, page by page: a copy of a large cache may not fit beside it."""
    for part in cache.split(1 << 12):
        nan = (bits(part) & 0x7F) == 0x7F if is_fp8(cache.dtype) else part.isnan()
        bits(part).masked_fill_(nan, 0)
