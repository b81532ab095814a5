"""Blocks of many pieces, of few KV heads over many keys: groups of them are joined first, or all by a launch behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paged_attn.explain import host_schedule
from paged_attn.explain.host_schedule import cut
from paged_attn.kernels.hopper.planning import share_layout
from paged_attn.planning import planner
from paged_attn.records.key_bounds import key_bounds_of
from tests.support import hopper_plans
from tests.support.cases import Case, build, problem_of, run
from tests.support.hopper_cases import ALL_E4M3, CAPPED, DEVICE, E4M3_CACHE, FEATURES, PACKED, ragged, sized

pytestmark = [pytest.mark.simulated, pytest.mark.hopper, pytest.mark.usefixtures("on_hopper")]

ONE: dict[str, Any] = dict(heads=8, kv_heads=1)
DECODE = ragged((1, 2112)) | ONE | dict(decode_form=True)
DECODES = ragged((1, 30), (1, 2112), (1, 0), (1, 100)) | ONE | dict(decode_form=True)
DRAFTS = ragged((4, 30), (4, 5000)) | ONE | dict(bounds=True)
# beside so much longer ones sequences have no room of their own: a share ends the first block and begins the second
UNEVEN = ragged((1, 3000), (1, 2900), *[(1, 40)] * 69) | ONE | dict(decode_form=True)
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
    "uneven decodes": UNEVEN,
    "uneven decodes, head_dim 256": UNEVEN | dict(head_dim=256),
    "uneven decodes over e4m3": UNEVEN | E4M3_CACHE,
    "drafts": DRAFTS,
    "drafts of 2": ragged((2, 30), (1, 3000), (2, 5000)) | ONE | dict(bounds=True),
    "drafts over e4m3": DRAFTS | E4M3_CACHE,
    "drafts, head_dim 192": DRAFTS | dict(head_dim=192),
    "trees": ragged((6, 20), (8, 5000), (0, 77), (7, 3000)) | ONE | dict(bounds=True, qq_bias=8, tree=True),
    "two blocks each": ragged((9, 3000), (9, 20)) | ONE | dict(bounds=True),
}

QUICK = {"a decode over e4m3", "uneven decodes", "drafts of 2"}
CHUNK = ragged((150, 4000)) | dict(bounds=True)
CHUNKS = ragged((90, 3000), (90, 90), (90, 2000), (90, 0)) | dict(bounds=True)
BLOCKS: dict[str, dict[str, Any]] = {
    "a chunk": CHUNK,
    "a chunk, features": CHUNK | FEATURES | dict(window_size=(1500, -1)),
    "a chunk, softcap, no lse": CHUNK | CAPPED,
    "a chunk, group 3": CHUNK | dict(heads=24),
    "a chunk, parts of a group": CHUNK | dict(heads=12, kv_heads=1),
    "a chunk, head_dim 64": CHUNK | dict(head_dim=64),
    "a chunk, head_dim 192": CHUNK | dict(head_dim=192),
    "a chunk, page 544": CHUNK | dict(page_size=544),
    "a chunk, x-packed": CHUNK | PACKED,
    "a chunk of new keys": CHUNK | dict(new=True),
    "a chunk over e4m3": CHUNK | E4M3_CACHE,
    "a chunk over e4m3, no lse": CHUNK | E4M3_CACHE | dict(lse=False),
    "a chunk all in e4m3": CHUNK | ALL_E4M3,
    "chunks": CHUNKS,
    "chunks over e4m3, head_dim 256": CHUNKS | E4M3_CACHE | dict(head_dim=256),
    "chunks of any length": ragged((150, 4000), (3, 1000), (0, 50), (64, 64), (128, 2000)) | dict(padding=5),
}
QUICK_BLOCKS = {"chunks of any length", "a chunk all in e4m3"}


@pytest.fixture(autouse=True)
def _few_at_once(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Groups of more than four pieces."""
    monkeypatch.setattr(share_layout, "ROWS_WORTH_A_COUNT", 1)
    monkeypatch.setattr(share_layout, "MIN_ROWS_WORTH_A_MERGE", 1 << 20)
    with hopper_plans.planned():
        yield


@pytest.fixture
def merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever may be cut is joined by a launch of its own."""
    for name in ("MIN_ROWS_WORTH_A_MERGE", "MIN_STATES_WORTH_A_MERGE", "MAX_TILES_OF_ONE_SHARE"):
        monkeypatch.setattr(share_layout, name, 0)


BY_NAME = [pytest.param(x, marks=[pytest.mark.quick] * (x in QUICK)) for x in CASES]


@pytest.mark.usefixtures("merged")
@pytest.mark.parametrize("name", BY_NAME)
def test_pieces_joined_by_a_launch_of_its_own_give_the_results_of_the_reference(name: str) -> None:
    case = sized(name, **CASES[name])
    (launch,) = planner.plan(problem_of(build(case, DEVICE))).launches
    assert launch.merge is not None
    assert not launch.pipe.GROUPED
    run(case, DEVICE)


@pytest.mark.usefixtures("merged")
@pytest.mark.parametrize(
    ("case", "pieces"),
    [
        (sized("many rows", **ragged((16, 3000), (16, 64), (3, 2000), (0, 7)) | dict(bounds=True)), False),
        (sized("one sequence", **ragged((5, 4000)) | ONE | dict(bounds=True)), True),
        (sized("one of 256 dims", **ragged((5, 4000)) | ONE | dict(bounds=True, head_dim=256)), True),
        (sized("padding", **ragged((4, 1500), (9, 40)) | ONE | dict(bounds=True, padding=7)), True),
    ],
    ids=lambda x: getattr(x, "name", None),
)
def test_rows_or_their_pieces_are_joined_side_by_side(case: Case, pieces: bool) -> None:
    (launch,) = planner.plan(problem_of(build(case, DEVICE))).launches
    assert (launch.merge.lanes > 1) == pieces
    run(case, DEVICE)


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.quick] * (x in QUICK_BLOCKS)) for x in BLOCKS])
def test_blocks_joined_by_a_launch_of_its_own_give_the_results_of_the_reference(name: str) -> None:
    case = sized(name, **BLOCKS[name])
    pieces = dict(MIN_PIECES_WORTH_A_MERGE=0, MIN_FP8_PIECES_WORTH_A_MERGE=0)
    with hopper_plans.planned(MIN_TOKENS_PER_LONG_SEQ=0, even_shares_end_sooner=lambda p: False, **pieces):
        (launch,) = planner.plan(problem_of(build(case, DEVICE))).launches
        assert not launch.pipe.SHARES
        assert launch.merge is not None
        lengths = host_schedule.KnownBatch(case.query_lens, case.seq_lens, key_bounds_of(case))
        assert cut(launch, lengths).cut
        run(case, DEVICE)


@pytest.mark.parametrize("name", BY_NAME)
def test_pieces_joined_in_groups_give_the_results_of_the_reference(name: str) -> None:
    case = sized(name, **CASES[name])
    (launch,) = planner.plan(problem_of(build(case, DEVICE))).launches
    assert launch.pipe.SHARES
    assert launch.pipe.GROUPED == 4
    run(case, DEVICE)
    run(case, DEVICE)  # with counters as the first run left them


def test_a_share_ends_one_cut_block_and_begins_the_next() -> None:
    (launch,) = planner.plan(problem_of(build(sized("", **UNEVEN), DEVICE))).launches
    tiles = [-(-n // launch.shape.TILE) for n in UNEVEN["seq_lens"]]
    size, extra = divmod(sum(tiles), launch.programs)
    assert size + (extra > 0) < tiles[1]
    assert tiles[0] not in {i * size + min(i, extra) for i in range(launch.programs)}
    done = cut(launch, host_schedule.KnownBatch(UNEVEN["query_lens"], UNEVEN["seq_lens"]))
    assert (done.schedule, done.least, done.most) == ("shares", size, size + (extra > 0))


@pytest.mark.parametrize("pieces", [4, 5, 17, 32, 33, 66, 129, 132])
def test_groups_of_any_number_of_pieces(pieces: int) -> None:
    """One sequence, of a tile for each piece where there are as many programs; up to four have code of their own."""
    case = Case("pieces", (1,), (64 * pieces,), heads=8, head_dim=128, dtype=torch.bfloat16, decode_form=True)
    (launch,) = planner.plan(problem_of(build(case, DEVICE))).launches
    assert (launch.shape.TILE, launch.pipe.BRIEF, launch.pipe.GROUPED) == (64, True, 4)
    done = cut(launch, host_schedule.KnownBatch(case.query_lens, case.seq_lens))
    assert min(pieces, launch.programs) == done.pieces
    run(case, DEVICE)
