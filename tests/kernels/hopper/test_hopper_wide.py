"""Values of another width than keys and heads beyond 256 dims, of few rows: asked for, since no GPU has run them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paged_attn.calls import memo
from paged_attn.kernels.hopper.planning import wide
from paged_attn.planning import plan
from tests.cases import E4M3, Case, build, problem_of, run
from tests.hopper_cases import DEVICE, FEATURES, ragged, sized

pytestmark = [pytest.mark.hopper, pytest.mark.usefixtures("on_hopper", "asked")]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(wide, "ASKED", True)
    plan.plan.cache_clear()
    memo.clear()
    yield
    monkeypatch.undo()
    plan.plan.cache_clear()
    memo.clear()


DECODE = ragged((1, 300), (1, 0), (1, 1000), (1, 1)) | dict(decode_form=True)
DRAFTS = ragged((4, 500), (3, 3), (0, 9), (2, 1), (4, 260)) | dict(bounds=True)
LONE = ragged((1, 2500)) | dict(decode_form=True)
ROWS: dict[str, Any] = dict(heads=48, kv_heads=4)  # so many that they are 64 rows, not columns

TWO_WIDTHS: dict[str, dict[str, Any]] = {
    "decodes, 192 and 128": DECODE | dict(head_dim=192, value_dim=128),
    "decodes, 192 and 128, HND, page 8, float16": DECODE
    | dict(head_dim=192, value_dim=128, layout="HND", page_size=8, dtype=torch.float16),
    "decodes, 64 and 256, page 64": DECODE | dict(head_dim=64, value_dim=256, page_size=64),
    "decodes, 64 and 128, one buffer": DECODE | dict(head_dim=64, value_dim=128, shared_buffer=True),
    "decodes, 128 and 64": DECODE | dict(head_dim=128, value_dim=64),
    "decodes, 256 and 80": DECODE | dict(head_dim=256, value_dim=80),
    "decodes, 96 and 128, of as wide tiles": DECODE | dict(head_dim=96, value_dim=128),
    "decodes, 40 and 200, features": DECODE | FEATURES | dict(head_dim=40, value_dim=200),
    "drafts, 192 and 128": DRAFTS | dict(head_dim=192, value_dim=128),
    "drafts, 72 and 136, features, page 24": DRAFTS | FEATURES | dict(head_dim=72, value_dim=136, page_size=24),
    "drafts, 128 and 192, trees": DRAFTS | dict(head_dim=128, value_dim=192, qq_bias=4, tree=True),
    "drafts, 192 and 128, new": DRAFTS | dict(head_dim=192, value_dim=128, new=True, sinks=True),
    "drafts, 192 and 128, e4m3 out, gate, ragged table": DRAFTS
    | dict(head_dim=192, value_dim=128, out_dtype=E4M3, gate=True, table="ragged"),
    "rows, 192 and 128": DECODE | ROWS | dict(head_dim=192, value_dim=128),
    "rows, 64 and 128, features": DECODE | ROWS | FEATURES | dict(head_dim=64, value_dim=128),
    "rows, 256 and 64, softcap": DECODE | ROWS | dict(head_dim=256, value_dim=64, softcap=20.0, lse=False),
    "rows, 64 and 256, window to both sides": DECODE
    | ROWS
    | dict(head_dim=64, value_dim=256, causal=False, window_size=(150, 20)),
    "rows, 192 and 128, new": DRAFTS | ROWS | dict(head_dim=192, value_dim=128, new=True),
    "a lone decode, 192 and 128": LONE | dict(head_dim=192, value_dim=128, sinks=True),
    "a lone decode, 128 and 256": LONE | dict(head_dim=128, value_dim=256),
    "lone rows, 192 and 128": LONE | ROWS | dict(head_dim=192, value_dim=128),
}
CASES = TWO_WIDTHS
QUICK = ("decodes, 192 and 128", "rows, 64 and 128, features")


def assert_wide(case: Case) -> None:
    problem = problem_of(build(case, DEVICE))
    assert wide.is_wide(problem)
    launches = plan.plan(problem).launches
    assert all(x.pipe is not None and x.pipe.SHARES for x in launches)


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.quick] * (x in QUICK)) for x in CASES])
def test_few_rows_of_two_widths_or_wide_heads_give_the_results_of_the_reference(name: str) -> None:
    case = sized(name, **CASES[name])
    assert_wide(case)
    run(case, DEVICE)
    run(case, DEVICE)  # with counters as the first run left them
