"""With batch_invariant=True a query's result has the same bits, whoever else is in the call and however it is cut.

Every test compares calls that ask for the same queries in different company; bits, not closeness.  Arithmetic of the
interpreter is float32 and slow: tiles have 16 keys and pieces 32, so that short sequences have several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from paged_attn.kernels.portable import launches as portable_plan
from paged_attn.kernels.portable import tuning
from paged_attn.planning import planner
from tests.support.cases import BAD_PAGE, E4M3, Case, build, problem_of, run
from tests.support.chunks import attend, chunked, counters, decode, in_order, same, whole  # noqa: F401, fixtures of all tests
from tests.support.replanned import forget

Cut = Callable[[int], None]

# On a failure hypothesis imports what warns, and warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore:mypy_extensions.TypedDict:DeprecationWarning")

TILE, PIECE = 16, 32
# Ends within a tile, at a piece's end and one past it; one key.  Queries begin within a tile, and at its end.
SMALL = Case("small", (26, 17, 1, 24), (75, 64, 1, 33), heads=2, kv_heads=1, head_dim=16, batch_invariant=True)
FEATURES: dict[str, dict[str, Any]] = {
    "two_heads": {"kv_heads": 2},
    "window_sinks": {"window_size": (37, -1), "sinks": True},
    "sinks": {"sinks": True},
    "softcap_alibi": {"softcap": 2.0, "alibi": True},
    "group_3_packed": {"heads": 3, "layout": "x", "page_size": 12},
    "fp8_dim_24": {"cache_dtype": E4M3, "scales": "per_head", "layout": "HND", "head_dim": 24},
}
CASES = [replace(SMALL, name=name, **feature) for name, feature in FEATURES.items()]


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cut]:
    """cut(shares): small tiles and pieces, and work in so many shares; 0: a program per block."""
    config = tuning.invariant_config

    def cut(shares: int) -> None:
        forget()
        monkeypatch.setattr(portable_plan, "_shares", lambda *_: shares)
        small = dict(tile=TILE, piece=PIECE, least=1)
        monkeypatch.setattr(portable_plan, "invariant_config", lambda p: config(p)._replace(**small))

    yield cut
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize("shares", [0, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_pieces_are_right(case: Case, shares: int, device: str, cut: Cut) -> None:
    cut(shares)
    run(replace(case, query_lens=(9, 1, 1, 24)), device)
    run(replace(case, query_lens=(1, 3, 0, 1), seq_lens=(75, 40, 5, 0), padding=2), device)
    run(replace(case, query_lens=(2, 9, 1), seq_lens=(1, 5, -3), causal=False), device)


@pytest.mark.parametrize("shares", [2, 7])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_shares_change_no_bit(case: Case, shares: int, device: str, cut: Cut) -> None:
    cut(0)
    inputs = build(case, device)
    want = attend(case, inputs, whole(case))
    cut(shares)
    same(case, attend(case, inputs, whole(case)), whole(case), want)


@pytest.mark.parametrize("shares", [2, 7])
def test_who_joins_changes_no_bit(shares: int, device: str, cut: Cut, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last share to arrive, or a launch of its own."""
    case = CASES[0]
    inputs = build(case, device)
    cut(shares)
    want = attend(case, inputs, whole(case))
    joining = [x.shape.MERGE for x in planner.plan(problem_of(inputs)).launches if x.shape.SPLIT]
    monkeypatch.setattr(portable_plan, "MIN_JOIN_STEPS_WORTH_A_LAUNCH", 0)
    forget()
    same(case, attend(case, inputs, whole(case)), whole(case), want)
    assert joining
    assert all(joining)
    assert not any(x.shape.MERGE for x in planner.plan(problem_of(inputs)).launches)


@pytest.mark.parametrize("shares", [0, 5])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_decode_equals_the_row_of_the_prefill(case: Case, shares: int, device: str, cut: Cut) -> None:
    cut(0)
    inputs = build(case, device)
    want = attend(case, inputs, whole(case))
    cut(shares)
    spots = [(seq, pos) for seq, begin, end in whole(case) for pos in {begin, begin + 15, end - 1} if pos < end]
    same(case, decode(case, inputs, spots), [(seq, pos, pos + 1) for seq, pos in spots], want)


@pytest.mark.parametrize("size", [5, 18])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunks_equal_the_whole_prefill(case: Case, size: int, device: str, cut: Cut) -> None:
    cut(0)
    inputs = build(case, device)
    want = attend(case, inputs, whole(case))
    for step, chunks in enumerate(chunked(case, size)):
        cut((3, 0, 5)[step % 3])
        same(case, attend(case, inputs, chunks), chunks, want)


@pytest.mark.parametrize("shares", [0, 4])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_neighbours_and_their_order_change_no_bit(case: Case, shares: int, device: str, cut: Cut) -> None:
    cut(3)
    inputs = build(case, device)
    want = attend(case, inputs, whole(case))
    cut(shares)
    order = [whole(case)[seq] for seq in (3, 0, 2, 1)]
    same(case, attend(case, inputs, order), order, want)
    for chunk in order[:2]:
        same(case, attend(case, inputs, [chunk]), [chunk], want)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "not_causal"])
def test_bounds_and_the_width_of_the_table_change_no_bit(causal: bool, device: str, cut: Cut) -> None:
    case = replace(SMALL, causal=causal, window_size=(-1, -1) if causal else (30, 9))
    cut(0)
    inputs = build(case, device)
    want = attend(case, inputs, whole(case))
    cut(3)
    tail = torch.full_like(inputs["page_table"][:, :1], BAD_PAGE).expand(-1, 40)
    wide = torch.cat([inputs["page_table"], tail], 1)
    for bounds in (dict(max_seqlen_q=26, max_seqlen_k=75), dict(max_seqlen_q=None), dict(page_table=wide)):
        same(case, attend(case, inputs, whole(case), **bounds), whole(case), want)


def test_a_key_beyond_the_bound_has_no_room_and_harms_nobody(device: str, cut: Cut) -> None:
    """Undefined, but the neighbours' results are theirs."""
    cut(0)
    inputs = build(SMALL, device)
    want = attend(SMALL, inputs, whole(SMALL))
    cut(7)
    got = attend(SMALL, inputs, whole(SMALL), max_seqlen_k=70)
    for seq in (1, 2, 3):
        same(SMALL, [got[seq]], [whole(SMALL)[seq]], want)


# A call takes the interpreter a tenth of a second and more: few examples, and no shrinking.
@settings(
    max_examples=12,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data(), case=st.sampled_from(CASES), shares=st.sampled_from([0, 1, 2, 3, 9]))
def test_any_batch_of_any_chunks(data: st.DataObject, case: Case, shares: int, device: str, cut: Cut) -> None:
    """Chunks of any sequences, the same one twice included, decodes and prefills side by side."""
    cut(0)
    inputs = build(case, device)
    want = attend(case, inputs, whole(case))
    cut(shares)
    chunks = []
    for _ in range(data.draw(st.integers(1, 4))):
        seq = data.draw(st.integers(0, len(case.seq_lens) - 1))
        _, begin, last = whole(case)[seq]
        end = data.draw(st.integers(begin + 1, last))
        chunks.append((seq, max(begin, end - data.draw(st.sampled_from([1, 1, 5, 40]))), end))
    same(case, attend(case, inputs, chunks), chunks, want)
