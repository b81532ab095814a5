"""Ragged page tables under the Hopper kernels: each kernel, each of its loaders."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import paged_attn
from tests.support import hopper_plans
from tests.support.cases import build, run
from tests.support.hopper_cases import DEVICE, E4M3_CACHE, FEATURES, NEW, PACKED, ragged, sized

pytestmark = [pytest.mark.simulated, pytest.mark.hopper, pytest.mark.usefixtures("on_hopper")]

UNEVEN = ragged((1, 500), (70, 300), (1, 0), (9, 9))
# what has a loader of its own: even shares, of keys alone and of both; items, the queue's warp, new keys, fixed pieces
CASES: dict[str, dict[str, Any]] = {
    "decodes": ragged((1, 300), (1, 0), (1, 2000)) | dict(decode_form=True, table="gaps"),
    "decodes over e4m3": ragged((1, 300), (1, 1000)) | E4M3_CACHE | dict(decode_form=True, table="views"),
    "decodes, x-packed": ragged((1, 300), (1, 0), (1, 1000)) | PACKED | dict(decode_form=True, table="ragged"),
    "chunk": ragged((100, 700)) | dict(table="views"),
    "mixed, features": UNEVEN | FEATURES | dict(padding=3, table="gaps"),
    "mixed, new, page 8": UNEVEN | NEW | dict(table="views", page_size=8),
    "invariant": ragged((1, 600), (70, 700)) | dict(batch_invariant=True, table="gaps", integers=torch.int64),
}


QUICK = ("decodes, x-packed", "chunk")


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.quick] * (x in QUICK)) for x in CASES])
def test_ragged_page_tables_give_the_results_of_the_reference(name: str) -> None:
    run(sized(name, **CASES[name]), DEVICE)


@hopper_plans.mixed()
def test_few_rows_beside_blocks_follow_the_same_table() -> None:
    run(sized("beside", **ragged((100, 300), (1, 400), (1, 70), (2, 9)), table="gaps", bounds=True), DEVICE)


def test_both_kinds_of_a_page_table_give_the_same_bits() -> None:
    fields = UNEVEN | dict(bounds=True)
    ragged_one, dense = (
        paged_attn.paged_attention(**build(sized("both", **fields, table=table), DEVICE)) for table in ("gaps", "")
    )
    assert all(torch.equal(x, y) for x, y in zip(ragged_one, dense, strict=True))
