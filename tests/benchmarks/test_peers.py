"""Peers without a GPU: what they decline, and what they are given."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend

from benchmarks.inputs import inputs_of, tree
from benchmarks.peers import PEERS, flashinfer, sdpa
from benchmarks.peers.cannot import Cannot, allow, features
from tests.benchmarks.stand_ins import EVEN, SMALL, truth
from tests.support.cases import E4M3, Case


def test_peers_that_need_no_package_decline_or_agree_here() -> None:
    inputs = inputs_of(SMALL, "cpu")
    for name in ("sdpa cudnn", "cudnn paged", "flashinfer fa2", "vllm triton"):
        with pytest.raises((Cannot, ImportError)):
            PEERS[name](SMALL, inputs)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_sdpa_gathers_the_pages_it_is_a_bound_for(layout: str) -> None:
    for lengths in ((EVEN.query_lens, EVEN.seq_lens), ((1, 1), (40, 40))):
        case = replace(EVEN, query_lens=lengths[0], seq_lens=lengths[1], layout=layout)
        inputs = inputs_of(case, "cpu")
        got = sdpa._call(case, inputs, SDPBackend.MATH)()
        # a step of bfloat16 at 2 is 2^-7; a wrong key is far beyond
        torch.testing.assert_close(got.float(), truth(case, inputs)().float(), atol=2**-6, rtol=0)


def test_sdpa_copies_neither_queries_nor_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy would be timed; several sequences of several queries once had one."""
    inputs, made = inputs_of(EVEN, "cpu"), []
    real = torch.nn.functional.scaled_dot_product_attention

    def attend(q: torch.Tensor, *args: torch.Tensor, **options: object) -> torch.Tensor:
        made.append((q, real(q, *args, **options)))
        return made[-1][1]

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    got = sdpa.flash(EVEN, inputs)()
    assert len(EVEN.query_lens) > 1
    assert EVEN.query_lens[0] > 1
    assert made[0][0].data_ptr() == inputs["q"].data_ptr()
    assert got.data_ptr() == made[0][1].data_ptr()


def test_features_name_what_a_case_asks_for() -> None:
    case = Case("", (1,), (9,), softcap=3.0, sinks=True, cache_dtype=E4M3, dtype=torch.bfloat16)
    assert features(case) == {"softcap", "sinks", "fp8", "log-sum-exps"}
    allow(case, "softcap", "sinks", "fp8", "log-sum-exps")
    with pytest.raises(Cannot, match="no sinks, fp8, log-sum-exps"):
        allow(case, "softcap", "window")


def test_flashinfer_gets_the_live_pages_in_order() -> None:
    case = Case("", (1, 1, 1), (33, 16, 1))
    inputs = inputs_of(case, "cpu")
    indptr, indices, last = flashinfer._pages(case, inputs)
    table = inputs["page_table"]
    assert indptr.tolist() == [0, 3, 4, 5]
    assert indices.tolist() == [*table[0, :3].tolist(), table[1, 0].item(), table[2, 0].item()]
    assert last.tolist() == [1, 16, 1]


def test_flashinfers_mask_is_the_tree_behind_the_context() -> None:
    case = Case("", (3, 2), (5, 2), qq_bias=3, tree=True)
    mask = flashinfer._mask(case, tree(3))
    rows = ["11100", "11110", "11101", "10", "11"]
    assert mask.int().tolist() == [int(digit) for row in rows for digit in row]
