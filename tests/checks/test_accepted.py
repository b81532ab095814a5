"""Calls that checks accept: a good one of each kind, and what is unusual and right."""

from __future__ import annotations

import pytest
import torch

from tests.support.bad_input import CALLS, Change, accept, call_of, like, strided, tensor, value
from tests.support.cases import E5M2, build


@pytest.mark.parametrize("call", CALLS)
def test_good_calls_are_accepted(call: str, device: str) -> None:
    axes = accept(call_of(call, device))
    case = CALLS[call]
    pages = build(case)["k_cache"].shape[0]
    sizes = (case.tokens, len(case.seq_lens), case.heads, case.kv_heads, case.head_dim, pages, case.page_size)
    assert axes[:7] == sizes
    assert axes.x == (8 if call == "packed" else 0)


LEGAL: dict[str, tuple[str, Change]] = {
    "a list as window": ("plain", value(window_size=[3, 0])),
    "a window without end": ("plain", value(window_size=(-1, -1))),
    "ints as numbers": ("fp8", value(softcap=30, softmax_scale=1, k_scale=2, out_scale=3)),
    "a negative softmax_scale": ("plain", value(softmax_scale=-0.5)),
    "bounds of zero": ("plain", value(max_seqlen_q=0, max_seqlen_k=0)),
    "gaps in a scale": ("fp8", lambda c: {"k_scale": strided(like(c["q"], 2, dtype=torch.float32))}),
    "gaps in an axis of one element": ("plain", lambda c: {"qq_bias": strided(like(c["q"], 1, 1))}),
    "an empty page table": ("new", lambda c: {"page_table": c["page_table"][:, :0]}),
    "an empty cache": ("new", lambda c: {"k_cache": c["k_cache"][:0], "v_cache": c["v_cache"][:0]}),
    "one page table for all": ("plain", lambda c: {"page_table": c["page_table"][:1].expand(3, -1)}),
    "padding after the last query": ("plain", lambda c: {"q": like(c["q"], 9, 6, 32), "out": None}),
    "no query at all": ("plain", lambda c: {"q": c["q"][:0], "out": None}),
    "no bias at all": ("plain", tensor("qq_bias", (0, 0))),
    "fp8 out of other queries": ("plain", lambda c: {"out": c["out"].to(E5M2), "out_scale": 0.1}),
    "wide out of fp8 queries": (
        "fp8",
        lambda c: {"out": like(c["q"], 5, 6, 32, dtype=torch.float32), "out_scale": None},
    ),
    "fp8 queries beside a half cache": (
        "fp8",
        lambda c: {"k_cache": c["k_cache"].half(), "v_cache": c["v_cache"].half(), "k_scale": None, "v_scale": None},
    ),
    "fp8 queries beside the other fp8": (
        "fp8",
        lambda c: {"k_cache": c["k_cache"].to(E5M2), "v_cache": c["v_cache"].to(E5M2)},
    ),
    "half sinks beside fp8 queries": ("fp8", tensor("sinks", (6,), torch.float16)),
    "scales of tokens": ("plain", tensor("q_scale", (5,))),
    "scales of tokens in a column": ("plain", tensor("q_scale", (5, 1))),
    "scales of fp8 tokens": ("fp8", tensor("q_scale", (5, 1))),
    "scales of fp8 tokens and heads": ("fp8", tensor("q_scale", (5, 2))),
    "a float32 gate beside half queries": ("plain", tensor("gate", (5, 6, 32), torch.float32)),
    "one gate for all heads": ("plain", lambda c: {"gate": like(c["q"], 5, 1, 32).expand(5, 6, 32)}),
    "a layout that a packed cache ignores": ("packed", value(kv_layout="HND")),
}


@pytest.mark.parametrize("legal", LEGAL)
def test_unusual_but_legal_calls_are_accepted(legal: str, device: str) -> None:
    call, change = LEGAL[legal]
    inputs = call_of(call, device)
    accept(inputs | change(inputs))


def test_queries_that_require_grad_are_legal_without_grad_mode(device: str) -> None:
    inputs = call_of("plain", device)
    inputs["q"] = inputs["q"].detach().requires_grad_()
    with torch.no_grad():
        accept(inputs)
