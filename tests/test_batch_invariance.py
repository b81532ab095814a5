"""With batch_invariant=True a query's result has the same bits, whoever else is in the call and however it is cut.

Every test compares calls that ask for the same queries in different company; bits, not closeness.  On the CPU, where
arithmetic is float32 and slow, tiles have 16 keys and pieces 32, so that short sequences have several; on a GPU the
same holds for the plans that ship, in 16 bits and at lengths of several pieces of 1024.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime import interpreter

from paged_attn import paged_attention
from paged_attn.kernels.portable import plan as portable_plan
from paged_attn.kernels.portable import tuning
from paged_attn.launching import scratch
from paged_attn.planning import plan
from tests.cases import BAD_PAGE, E4M3, Case, bits, build, problem_of, run

Inputs = dict[str, Any]
Chunk = tuple[int, int, int]  # queries begin ... end - 1 of a sequence, as positions
Result = tuple[Tensor, Tensor]  # out, lse
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
        plan.plan.cache_clear()
        monkeypatch.setattr(portable_plan, "_shares", lambda *_: shares)
        small = dict(tile=TILE, piece=PIECE, least=1)
        monkeypatch.setattr(portable_plan, "invariant_config", lambda p: config(p)._replace(**small))

    yield cut
    monkeypatch.undo()
    plan.plan.cache_clear()


@pytest.fixture(autouse=True)
def counters() -> Iterator[None]:
    """Who joins the pieces of a block is counted, and every call leaves all counters at zero for the next."""
    yield
    assert not any(room.counters.any() for room in scratch._rooms.values() if room.counters is not None)


@pytest.fixture(autouse=True)
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter a product is numpy's, whose bits depend on where in the tile a row stands; a GPU's do not."""

    def dot(_: Any, a: Any, b: Any, acc: Any, *__: Any) -> interpreter.TensorHandle:
        total = acc.data
        for k in range(a.data.shape[1]):
            total = total + a.data[:, k, None] * b.data[k]
        return interpreter.TensorHandle(total, acc.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def whole(case: Case) -> list[Chunk]:
    """Every query of the case, sequence by sequence."""
    return [(seq, *span) for seq, span in enumerate(zip(case.context_lens, case.seq_lens))]


def take(tensor: Tensor, rows: Any) -> Tensor:
    """Some rows, of an fp8 tensor too."""
    return bits(tensor)[rows].view(tensor.dtype)


def attend(case: Case, inputs: Inputs, chunks: Sequence[Chunk], **changes: Any) -> list[Result]:
    """(out, lse) of each chunk, all asked for in one call."""
    device = inputs["q"].device
    at = [sum(case.query_lens[:seq]) - context_len for seq, context_len in enumerate(case.context_lens)]
    rows = torch.cat([torch.arange(at[seq] + begin, at[seq] + end) for seq, begin, end in chunks]).to(device)
    lens = [end - begin for _, begin, end in chunks]
    int32 = dict(dtype=torch.int32, device=device)
    given = dict(
        q=take(inputs["q"], rows),
        out=take(inputs["out"], rows),
        page_table=inputs["page_table"][[seq for seq, *_ in chunks]],
        seq_lens=torch.tensor([end for *_, end in chunks], **int32),
        cu_seqlens_q=torch.tensor([0, *lens]).cumsum(0).to(device, torch.int32),
    )
    out, lse = paged_attention(**{**inputs, **given, "max_seqlen_q": max(lens), **changes})
    return list(zip(out.split(lens), lse.split(lens)))


def decode(case: Case, inputs: Inputs, positions: Sequence[tuple[int, int]], **changes: Any) -> list[Any]:
    """The same of single queries (sequence, position), without cu_seqlens_q."""
    return attend(case, inputs, [(seq, pos, pos + 1) for seq, pos in positions], **{"cu_seqlens_q": None, **changes})


def same(case: Case, got: Sequence[Result], chunks: Sequence[Chunk], want: Sequence[Result]) -> None:
    """Bit by bit what the call of all the case's queries gave for these."""
    for (seq, begin, end), result in zip(chunks, got, strict=True):
        context_len = case.context_lens[seq]
        for name, one, other in zip(("out", "lse"), result, want[seq], strict=True):
            other = other[begin - context_len : end - context_len]
            assert torch.equal(bits(one), bits(other)), f"{name} of queries {begin} ... {end - 1} of sequence {seq}"


def chunked(case: Case, size: int) -> Iterator[list[Chunk]]:
    """One step after another of every sequence's prefill by chunks."""
    for done in range(0, max(case.query_lens), size):
        live = [(seq, begin + done, end) for seq, begin, end in whole(case) if begin + done < end]
        yield [(seq, begin, min(begin + size, end)) for seq, begin, end in live]


# --- in the interpreter, too -----------------------------------------------------------------------------------------


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
    joining = [x.shape.MERGE for x in plan.plan(problem_of(inputs)).launches if x.shape.SPLIT]
    monkeypatch.setattr(portable_plan, "MIN_JOIN_STEPS_WORTH_A_LAUNCH", 0)
    plan.plan.cache_clear()
    same(case, attend(case, inputs, whole(case)), whole(case), want)
    assert joining
    assert all(joining)
    assert not any(x.shape.MERGE for x in plan.plan(problem_of(inputs)).launches)


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


# --- on a GPU: the plans that ship -----------------------------------------------------------------------------------

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
LONG = (5000, 3, 1024, 1025, 2900)
SERVER = Case("server", LONG, LONG, heads=16, kv_heads=4, head_dim=128, dtype=BF16, batch_invariant=True)
GPU_FEATURES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp16": {"dtype": FP16},
    "fp32": {"dtype": FP32, "heads": 8, "kv_heads": 2},
    "fp8_cache": {"cache_dtype": E4M3, "scales": "per_head"},
    "all_fp8": {"dtype": E4M3, "out_dtype": E4M3, "scales": "tensor"},
    "window_sinks": {"window_size": (1500, -1), "sinks": True},
    "softcap_alibi": {"softcap": 20.0, "alibi": True},
    "group_1": {"kv_heads": 16},
    "group_10_dim_80": {"heads": 20, "kv_heads": 2, "head_dim": 80},
    "group_64": {"heads": 64, "kv_heads": 1},
    "packed": {"layout": "x"},
    "hnd_page_24": {"layout": "HND", "page_size": 24},
    "page_128": {"page_size": 128},
    "dim_64": {"head_dim": 64},
    "dim_256": {"head_dim": 256, "heads": 8, "kv_heads": 2},
}
SERVERS = [replace(SERVER, name=name, **feature) for name, feature in GPU_FEATURES.items()]


@pytest.mark.hopper
@pytest.mark.parametrize("features", ["bf16", "softcap_alibi", "dim_64"])
def test_hopper_kernels_for_few_rows_and_for_many_agree(features: str, device: str) -> None:
    lens = (1100, 3, 130)
    case = replace(SERVER, query_lens=lens, seq_lens=lens, heads=8, kv_heads=2, **GPU_FEATURES[features])
    inputs = build(case, device)
    want = attend(case, inputs, whole(case))
    spots = [(seq, pos) for seq, seq_len in enumerate(lens) for pos in (0, 63, 64, 129, 1023, 1099) if pos < seq_len]
    rows = [(seq, pos, pos + 1) for seq, pos in spots]
    same(case, decode(case, inputs, spots), rows, want)
    same(case, decode(case, inputs, spots[5:6]), rows[5:6], want)
    for chunks in chunked(case, 300):
        same(case, attend(case, inputs, chunks), chunks, want)


@pytest.mark.gpu
@pytest.mark.parametrize("case", SERVERS, ids=str)
def test_on_a_gpu_pieces_are_right(case: Case, device: str) -> None:
    run(replace(case, query_lens=(300, 3, 1, 64, 1)), device)
    run(replace(case, query_lens=(1,) * 5, decode_form=True), device)


@pytest.mark.gpu
@pytest.mark.parametrize("case", SERVERS, ids=str)
def test_on_a_gpu_a_decode_equals_the_row_of_the_prefill(case: Case, device: str) -> None:
    inputs = build(case, device)
    want = attend(case, inputs, whole(case))
    ends = {0, 1, 63, 64, 1022, 1023, 1024, 1087, 2047, 2048, 2899, 4095, 4999}
    spots = [(seq, pos) for seq, seq_len in enumerate(case.seq_lens) for pos in sorted(ends) if pos < seq_len]
    rows = [(seq, pos, pos + 1) for seq, pos in spots]
    same(case, decode(case, inputs, spots), rows, want)
    for spot, row in zip(spots[::3], rows[::3]):
        same(case, decode(case, inputs, [spot]), [row], want)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 7, 64, 300, 1024, 3000])
@pytest.mark.parametrize("case", SERVERS, ids=str)
def test_on_a_gpu_chunks_equal_the_whole_prefill(case: Case, size: int, device: str) -> None:
    case = replace(case, query_lens=(1300, 3, 1024, 1025, 2900), seq_lens=(1300, 3, 1024, 1025, 2900))
    inputs = build(case, device)
    want = attend(case, inputs, whole(case))
    for chunks in list(chunked(case, size))[:: 97 if size == 1 else 11 if size == 7 else 1]:
        same(case, attend(case, inputs, chunks), chunks, want)


@pytest.mark.gpu
@pytest.mark.parametrize("case", SERVERS, ids=str)
def test_on_a_gpu_alone_equals_among_64_in_any_order(case: Case, device: str) -> None:
    """Prefills and decodes together; the bounds of the calls differ, too."""
    lens = tuple(1 + (i * 389) % 2500 for i in range(64))
    case = replace(case, query_lens=lens, seq_lens=lens)
    inputs = build(case, device)
    want = attend(case, inputs, whole(case))
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0)).tolist()
    mixed = [(seq, 0 if i % 8 == 0 else lens[seq] - 1, lens[seq]) for i, seq in enumerate(order)]
    same(case, attend(case, inputs, mixed), mixed, want)
    for chunk in mixed[:12]:
        same(case, attend(case, inputs, [chunk]), [chunk], want)
        same(case, attend(case, inputs, [chunk], max_seqlen_k=chunk[2]), [chunk], want)


@pytest.mark.gpu
@pytest.mark.parametrize("case", SERVERS, ids=str)
def test_on_a_gpu_long_decodes_do_not_depend_on_the_batch(case: Case, device: str) -> None:
    """In which the same sequence is cut at other places, or not at all."""
    lens = (32768, 40000, 1, 700, 33000, 8192, 20000, 65536)
    case = replace(case, query_lens=(1,) * 8, seq_lens=lens, decode_form=True)
    inputs = build(case, device)
    out, lse = paged_attention(**inputs)
    for seqs in ([0], [1], [7], [5, 2, 0], [4, 4, 4, 6, 3, 2], [7, 6, 5, 4, 3, 2, 1, 0] * 8):
        given = {name: take(inputs[name], seqs) for name in ("q", "page_table", "seq_lens")}
        for bound in (None, max(lens[seq] for seq in seqs)):
            changes = dict(**given, out=torch.empty_like(take(out, seqs)), max_seqlen_k=bound)
            got, got_lse = paged_attention(**{**inputs, **changes})
            assert torch.equal(bits(got), bits(out)[seqs])
            assert torch.equal(got_lse, lse[seqs])


@pytest.mark.gpu
@pytest.mark.parametrize("case", SERVERS, ids=str)
def test_on_a_gpu_room_for_states_changes_no_bit(case: Case, device: str) -> None:
    """Bounds so wide that nothing, or little, can be cut, and so narrow that shares are smaller than a piece."""
    inputs = build(replace(case, query_lens=(300, 3, 40, 1, 2900)), device)
    case = replace(case, query_lens=(300, 3, 40, 1, 2900))
    want = attend(case, inputs, whole(case), max_seqlen_k=5000)
    for bound in (1 << 17, 1 << 20, 1 << 28):
        same(case, attend(case, inputs, whole(case), max_seqlen_k=bound), whole(case), want)
    chunks = [(seq, end - 1, end) for seq, _, end in whole(case)]
    for some in (chunks, chunks[:1], chunks[4:]):
        for bound in (5000, 1 << 28):
            same(case, decode(case, inputs, [x[:2] for x in some], max_seqlen_k=bound), some, want)


@pytest.mark.gpu
@pytest.mark.parametrize("case", SERVERS[:1], ids=str)
def test_on_a_gpu_a_key_beyond_the_bound_has_no_room_and_harms_nobody(case: Case, device: str) -> None:
    case = replace(case, query_lens=(40, 3, 1, 1, 30))
    inputs = build(case, device)
    want = attend(case, inputs, whole(case))
    got = attend(case, inputs, whole(case), max_seqlen_k=3000)
    for seq in (1, 2, 3, 4):
        same(case, [got[seq]], [whole(case)[seq]], want)


@pytest.mark.gpu
def test_on_a_gpu_a_captured_call_keeps_its_bits(device: str) -> None:
    case = replace(SERVER, query_lens=(1,) * 5, decode_form=True)
    inputs = build(case, device)
    paged_attention(**inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = paged_attention(**inputs)
    inputs["seq_lens"].copy_(inputs["seq_lens"] // 2)
    graph.replay()
    got = out.clone(), lse.clone()
    for one, other in zip(got, paged_attention(**{**inputs, "out": torch.empty_like(out)}), strict=True):
        assert torch.equal(one, other)
