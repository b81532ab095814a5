"""Two widths, and wide heads, by blocks of many rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paged_attn.planning import planner
from tests.simulator import SIMULATES
from tests.support import hopper_plans
from tests.support.cases import E4M3, E5M2, Case, build, problem_of, run
from tests.support.hopper_cases import ALL_E4M3, DEVICE, E4M3_CACHE, E4M3_NO_LSE, FEATURES, NEW, PACKED, ragged, sized

pytestmark = [pytest.mark.simulated, pytest.mark.hopper]


def assert_blocks(case: Case) -> None:
    launches = planner.plan(problem_of(build(case, DEVICE))).launches
    assert [(x.dialect, x.pipe.SHARES) for x in launches] == [("hopper", False)] * (1 + (case.value_width > 256))


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
    "chunk over e4m3, 192/128": CHUNK | E4M3_CACHE | widths(192, 128),
    "chunk over e4m3, no lse, 64/128, window": CHUNK | E4M3_NO_LSE | widths(64, 128) | dict(window_size=(100, -1)),
    "chunk over e5m2, 128/256, float16": CHUNK | dict(cache_dtype=E5M2, dtype=torch.float16) | widths(128, 256),
    "chunk of e4m3, 128/64, features": CHUNK | ALL_E4M3 | FEATURES | widths(128, 64),
    "prefills of mixed over e4m3, 192/128, features": UNEVEN
    | E4M3_CACHE
    | FEATURES
    | widths(192, 128)
    | dict(padding=3, only="prefill", heads=64, kv_heads=4),
    "chunk, x-packed, 192/128": CHUNK | PACKED | widths(192, 128),
    "mixed, x-packed, 64/128, features": UNEVEN | PACKED | FEATURES | widths(64, 128) | dict(padding=3),
    "new, x-packed, 128/64": SEAMS | PACKED | NEW | widths(128, 64),
    "prefills, 512/512": ragged((150, 300), (150, 150)) | widths(512, 512) | dict(bounds=True),
    "chunk, 512/512, features": CHUNK | FEATURES | widths(512, 512) | dict(heads=8, kv_heads=4),
    "chunk, 512/512, gate, hnd": CHUNK | widths(512, 512) | dict(heads=8, kv_heads=4, gate=True, layout="HND"),
    "chunk, 320/320, window, float16": CHUNK | widths(320, 320) | dict(dtype=torch.float16, window_size=(100, -1)),
    "chunk, 512/128, no lse": CHUNK | widths(512, 128) | dict(lse=False),
    "chunk, 128/512, strided": CHUNK | widths(128, 512) | dict(strided=True),
    "new, 512/512": ragged((150, 150), (150, 214), (150, 160)) | NEW | widths(512, 512) | dict(bounds=True, padding=3),
    "chunk, 192/192": CHUNK | widths(192, 192),
    "chunk, 136/136, features": CHUNK | FEATURES | widths(136, 136),
    "new, 168/168": SEAMS | NEW | widths(168, 168),
    "heads of 72 on one, 192/128": ragged((130, 300)) | widths(192, 128) | dict(heads=72, kv_heads=1),
}
QUICK = ("prefills, 128/64", "prefills, 192/128, group 1")


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.quick] * (x in QUICK)) for x in CASES])
def test_values_of_another_width_give_the_results_of_the_reference(name: str) -> None:
    case = sized(name, **CASES[name])
    assert_blocks(case)
    run(case, DEVICE)
    run(case, DEVICE)  # with counters as the first run left them


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("sizes", [widths(192, 128), widths(128, 64), widths(192, 192)], ids=str)
@hopper_plans.three()
def test_long_queries_of_two_widths_may_have_two_copies_of_a_consumer(sizes: dict[str, Any]) -> None:
    """Calls with an exact softcap have two copies; three copies exist for 128 dims only."""
    case = sized("long", **PREFILLS, **sizes, softcap=20.0)
    (launch,) = planner.plan(problem_of(build(case, DEVICE))).launches
    assert (launch.pipe.CONSUMERS, launch.pipe.ROWS) == (2, 64)
    run(case, DEVICE)
    run(sized("long", **PREFILLS, **sizes), DEVICE)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("name", ["chunk, 192/128", "chunk, 512/512"])
def test_scores_far_apart_are_weighed_again(name: str) -> None:
    """The scale often puts a later tile's maximum far above the maxima before."""
    fields = dict(widths(192, 128) if "192" in name else widths(512, 512), softmax_scale=3.0)
    run(sized(name, **ragged((150, 400), (150, 700)), bounds=True, **fields), DEVICE)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("sizes", [widths(512, 512), widths(512, 128), widths(320, 320)], ids=str)
def test_decodes_of_wide_heads_have_shares_before_blocks(sizes: dict[str, Any]) -> None:
    case = sized("mixed", **UNEVEN, **FEATURES, **sizes, padding=3, heads=16, kv_heads=4)
    launches = planner.plan(problem_of(build(case, DEVICE))).launches
    assert [x.pipe.SHARES for x in launches] == [True] + [False] * (1 + (case.value_width > 256))
    run(case, DEVICE)
    run(case, DEVICE)


@pytest.mark.skipif(SIMULATES, reason="portable kernels are not simulated")
def test_decodes_over_fp8_are_portable_before_blocks_of_two_widths() -> None:
    case = sized("mixed", **UNEVEN, **E4M3_CACHE, **widths(192, 128))
    launches = planner.plan(problem_of(build(case, DEVICE))).launches
    assert [x.dialect for x in launches] == ["portable", "hopper"]
    run(case, DEVICE)


@pytest.mark.usefixtures("on_hopper")
def test_queries_in_no_box_are_multiplied_by_keys_of_256_dims() -> None:
    """The queries lie 2 bytes off the alignment of 16 bytes that TMA asks for."""
    case = sized("chunk", **CHUNK, **widths(192, 128))
    given = build(case, DEVICE)
    q = given["q"].contiguous()
    off = torch.empty(q.numel() + 1, dtype=q.dtype, device=q.device)[1:].view(q.shape).copy_(q)
    (launch,) = planner.plan(problem_of(given | dict(q=off))).launches
    assert (launch.pipe.QUERY_BOX, launch.shape.DIM) == (False, 256)
    run(case, DEVICE, q=off)
