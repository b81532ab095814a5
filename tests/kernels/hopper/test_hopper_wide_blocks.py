"""Values of another width than keys, by blocks of many rows: asked for, since no GPU has run them yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paged_attn.calls import memo
from paged_attn.kernels.hopper.planning import wide
from paged_attn.planning import plan
from tests.cases import E4M3, Case, build, problem_of, run
from tests.hopper_cases import DEVICE, FEATURES, NEW, ragged, sized

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


def assert_blocks(case: Case) -> None:
    launches = plan.plan(problem_of(build(case, DEVICE))).launches
    assert [x.dialect for x in launches] == ["hopper"]
    assert not launches[0].pipe.SHARES


def widths(head_dim: int, value_dim: int) -> dict[str, Any]:
    return dict(head_dim=head_dim, value_dim=value_dim)


PREFILLS = ragged((200, 300), (150, 150)) | dict(bounds=True)
CHUNK = ragged((150, 700))
UNEVEN = ragged((1, 500), (130, 300), (1, 0), (9, 9), (0, 70), (70, 20))
SEAMS = ragged((150, 150), (40, 104), (1, 1), (90, 218), (5, 3))  # caches that end on and beside borders of tiles
CASES: dict[str, dict[str, Any]] = {
    "prefills, 128/64": PREFILLS | widths(128, 64),
    "prefills, 64/128": PREFILLS | widths(64, 128),
    "prefills, 192/128": PREFILLS | widths(192, 128),
    "prefills, 192/128, group 1": PREFILLS | widths(192, 128) | dict(heads=8, kv_heads=8),
    # several items to a program, of one tile, of two and of three, so that the next one's queries are waited for
    "many prefills, 192/128": ragged(*[(40, 45 + 11 * i) for i in range(24)]) | dict(bounds=True) | widths(192, 128),
    "chunk, 192/128, group 12, hnd": CHUNK | widths(192, 128) | dict(heads=24, kv_heads=2, layout="HND"),
    "chunk, 128/256": CHUNK | widths(128, 256),
    "chunk, 256/64, float16": CHUNK | widths(256, 64) | dict(dtype=torch.float16),
    "chunk, 64/256, window": CHUNK | widths(64, 256) | dict(window_size=(200, -1)),
    "chunk, 192/128, fp8 out": CHUNK | widths(192, 128) | dict(out_dtype=E4M3, lse=False),
    "chunk, 192/128, negative scale, page 8": CHUNK | widths(192, 128) | dict(softmax_scale=-0.1, page_size=8),
    "chunk, 192/128, not causal": CHUNK | widths(192, 128) | dict(causal=False, window_size=(100, 50)),
    "chunk, 192/128, features, strided": CHUNK | FEATURES | widths(192, 128) | dict(strided=True),
    "chunk, 72/40, softcap": CHUNK | widths(72, 40) | dict(softcap=30.0, lse=False),
    "mixed, 128/64, features": UNEVEN | FEATURES | widths(128, 64) | dict(padding=3),
    "mixed, 192/128, sinks, alibi, page 24": UNEVEN
    | widths(192, 128)
    | dict(sinks=True, alibi=True, page_size=24, padding=3),
    "mixed, 192/128, gate": UNEVEN | widths(192, 128) | dict(gate=True),
    "mixed, 192/128, tree": UNEVEN | widths(192, 128) | dict(qq_bias=16, tree=True),
    "new, 192/128": SEAMS | NEW | widths(192, 128),
    "new, 64/128, window, features": SEAMS | NEW | FEATURES | widths(64, 128),
    "new, 192/128, window of the own key": SEAMS | NEW | widths(192, 128) | dict(window_size=(0, -1)),
    "chunk, 192/192": CHUNK | widths(192, 192),
    "chunk, 136/136, features": CHUNK | FEATURES | widths(136, 136),
    "new, 168/168": SEAMS | NEW | widths(168, 168),
    "heads of 72 on one, 192/128": ragged((130, 300)) | widths(192, 128) | dict(heads=72, kv_heads=1),
}
QUICK = ("prefills, 128/64", "prefills, 192/128, group 1")


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.quick] * (x in QUICK)) for x in CASES])
def test_values_of_another_width_give_the_results_of_the_reference(name: str) -> None:
    case = sized(name, **CASES[name])
    assert_blocks(case)
    run(case, DEVICE)
    run(case, DEVICE)  # with counters as the first run left them
