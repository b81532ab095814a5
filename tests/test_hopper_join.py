"""Blocks of so many pieces that the Hopper kernels join groups of them first: of few KV heads, over many keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import paged_attn
from paged_attn import plan
from paged_attn.hopper import even_shares
from paged_attn.hopper.shapes import COLUMNS
from tests import hopper_plans
from tests.cases import Case, bits, build, poison_scratch, problem_of, run
from tests.hopper_cases import ALL_E4M3, CAPPED, DEVICE, E4M3_CACHE, FEATURES, PACKED, ragged, sized

pytestmark = [pytest.mark.hopper, pytest.mark.usefixtures("on_hopper")]

ONE: dict[str, Any] = dict(heads=8, kv_heads=1)
DECODE = ragged((1, 2112)) | ONE | dict(decode_form=True)
DECODES = ragged((1, 30), (1, 2112), (1, 0), (1, 100)) | ONE | dict(decode_form=True)
DRAFTS = ragged((4, 30), (4, 5000)) | ONE | dict(bounds=True)
CASES: dict[str, dict[str, Any]] = {
    "a decode": DECODE,
    "a decode, features": DECODE | FEATURES | dict(window_size=(1500, -1)),
    "a decode, 16 heads": DECODE | dict(heads=16),
    "a decode, 48 heads": ragged((1, 9000)) | dict(heads=48, kv_heads=1, decode_form=True),
    "a decode, 2 KV heads": DECODE | dict(kv_heads=2),
    "a decode, head_dim 64": DECODE | dict(head_dim=64),
    "a decode, head_dim 256": DECODE | dict(head_dim=256),
    "a decode, page 544": DECODE | dict(page_size=544),
    "a decode, x-packed": DECODE | PACKED,
    "a decode over e4m3": DECODE | E4M3_CACHE,
    "a decode all in e4m3": DECODE | ALL_E4M3,
    "decodes": DECODES,
    "decodes, sinks, softcap": DECODES | CAPPED | dict(sinks=True),
    "decodes, head_dim 256": DECODES | dict(head_dim=256),
    "drafts": DRAFTS,
    "drafts over e4m3": DRAFTS | E4M3_CACHE,
    "drafts, head_dim 192": DRAFTS | dict(head_dim=192),
    "trees": ragged((6, 20), (8, 5000), (0, 77), (7, 3000)) | ONE | dict(bounds=True, qq_bias=8, tree=True),
    "more queries than the host was told of": ragged((9, 3000), (9, 20)) | ONE | dict(bounds=True),
}


@pytest.fixture(autouse=True)
def _few_at_once(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Groups of more than four pieces."""
    monkeypatch.setattr(even_shares, "GROUPING", 1)
    with hopper_plans.planned():
        yield


@pytest.mark.parametrize("name", CASES)
def test_pieces_joined_in_groups_give_the_results_of_the_reference(name: str) -> None:
    case = sized(name, **CASES[name])
    (launch,) = plan.plan(problem_of(build(case, DEVICE))).launches
    assert launch.pipe.SHARES
    assert launch.pipe.GROUPED == 4
    run(case, DEVICE)
    run(case, DEVICE)  # with counters as the first run left them


@pytest.mark.parametrize("name", ["a decode", "drafts"])
def test_whoever_is_last_the_bits_are_the_same(name: str) -> None:
    inputs = build(sized(name, **CASES[name]), DEVICE)
    found = []
    for _ in range(3):
        poison_scratch()
        inputs["out"].fill_(torch.nan)
        paged_attn.paged_attention(**inputs)
        found.append(bits(inputs["out"]).clone())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("pieces", [4, 5, 17, 32, 33])
def test_groups_of_any_number_of_pieces(pieces: int) -> None:
    """One sequence, of a tile for each piece."""
    run(Case("pieces", (1,), (64 * pieces,), heads=8, head_dim=128, dtype=torch.bfloat16, decode_form=True), DEVICE)


def test_a_small_decode_of_one_kv_head_has_code_for_few_pieces_of_its_own() -> None:
    (launch,) = plan.plan(problem_of(build(sized("", **DECODE), DEVICE))).launches
    assert launch.pipe.BRIEF
    assert launch.pipe.COLUMNS == COLUMNS
