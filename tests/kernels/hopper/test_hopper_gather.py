"""Tiles gathered row by row, of pages of any number of tokens: asked for, since no GPU has run them yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paged_attn.kernels.hopper.planning import gathering
from paged_attn.planning import plan
from tests import hopper_plans
from tests.cases import Case, build, problem_of, run
from tests.hopper_cases import DEVICE, FEATURES, ragged, sized
from tests.simulator import SIMULATES

pytestmark = [pytest.mark.hopper, pytest.mark.usefixtures("on_hopper", "asked")]


@pytest.fixture
def asked() -> Iterator[None]:
    with hopper_plans.asked(gathering):
        yield


def assert_gathered(case: Case) -> None:
    launches = plan.plan(problem_of(build(case, DEVICE))).launches
    pipes = [part.pipe for launch in launches for part in launch.parts if part.pipe is not None]
    assert pipes
    assert all(pipe.GATHER for pipe in pipes)


UNEVEN = ragged((1, 500), (70, 300), (1, 0), (9, 9))
DECODE = ragged((1, 300), (1, 0), (1, 1000)) | dict(decode_form=True)
CASES: dict[str, dict[str, Any]] = {
    "decodes, page 1": DECODE | dict(page_size=1, table="ragged"),
    "decodes, page 2, float16": DECODE | dict(page_size=2, dtype=torch.float16),
    "decodes, page 4, pairs of heads": DECODE | dict(page_size=4, head_dim=64),
    "decodes, page 12, head_dim 256": DECODE | dict(page_size=12, head_dim=256),
    "decodes, page 1, HND, head_dim 96": DECODE | dict(page_size=1, head_dim=96, layout="HND"),
    "one sequence": ragged((1, 2000)) | dict(page_size=1, decode_form=True),
    "drafts, page 3": ragged((8, 500), (5, 5), (0, 9)) | dict(bounds=True, page_size=3, table="gaps"),
    "chunk, page 1": ragged((100, 700)) | dict(page_size=1, table="views"),
    "chunk, softcap, page 4": ragged((100, 700)) | dict(page_size=4, softcap=20.0, lse=False),
    "chunk, page 7, head_dim 64": ragged((100, 500)) | dict(page_size=7, head_dim=64),
    "mixed, features, page 1": UNEVEN | FEATURES | dict(padding=3, page_size=1),
}


QUICK = ("decodes, page 4, pairs of heads", "chunk, page 7, head_dim 64")


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.quick] * (x in QUICK)) for x in CASES])
def test_gathered_tiles_give_the_results_of_the_reference(name: str) -> None:
    case = sized(name, **CASES[name])
    assert_gathered(case)
    run(case, DEVICE)


@hopper_plans.mixed()
def test_few_rows_beside_blocks_gather_for_themselves() -> None:
    case = sized("beside", **ragged((100, 300), (1, 400), (1, 70), (2, 9)), page_size=2, bounds=True)
    assert_gathered(case)
    run(case, DEVICE)


@pytest.mark.skipif(not SIMULATES, reason="is about simulated kernels")
def test_gathered_tiles_are_fenced_by_who_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whole tiles alone: nothing else that tensor cores read is written by threads."""
    from tests.simulator import process

    monkeypatch.setattr(process, "edit", lambda ptx: ptx.replace("fence.proxy.async.shared::cta;", ""))
    case = sized("unfenced", **ragged((128, 512)), page_size=4)
    assert_gathered(case)
    with pytest.raises(RuntimeError, match="a product reads what was written without a fence since"):
        run(case, DEVICE)
