"""Properties that hold for every ragged batch, whatever the numbers: no oracle but the library and arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from paged_attn import merge_states, paged_attention, write_kv
from tests.support.cases import BAD_PAGE, E4M3, Case, bits, build, is_fp8

Inputs = dict[str, Any]

# On a failure hypothesis imports what warns, and warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore:mypy_extensions.TypedDict:DeprecationWarning")

# A call takes the interpreter a tenth of a second and more: few examples of a few dozen keys, and no shrinking.  On a
# GPU each example is a kernel to compile.
few = settings(
    max_examples=3 if torch.cuda.is_available() else 8,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@st.composite
def batches(draw: st.DrawFn, queries: tuple[int, ...] = (1, 1, 3, 9), **fixed: Any) -> Case:
    """Ragged float32 batches of 1 to 3 sequences of up to 70 keys, in any layout, with random features.

    A page is smaller or larger than a tile (16 keys here), or neither divides the other.
    """
    lens = draw(st.lists(st.tuples(st.sampled_from(queries), st.integers(0, 60)), min_size=1, max_size=3))
    group = draw(st.sampled_from([1, 2, 3]))
    features: dict[str, Any] = dict(
        query_lens=tuple(query_len for query_len, _ in lens),
        seq_lens=tuple(query_len + context_len for query_len, context_len in lens),
        kv_heads=2,
        heads=2 * group,
        head_dim=draw(st.sampled_from([16, 24])),
        page_size=draw(st.sampled_from([1, 8, 12, 32])),
        layout=draw(st.sampled_from(["NHD", "HND", "x"])),
        window_size=(draw(st.sampled_from([-1, -1, 0, 20])), -1),
        softcap=draw(st.sampled_from([0.0, 5.0])),
        alibi=draw(st.booleans()),
        sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )
    if "window_size" not in fixed:
        features["head_windows"] = draw(st.sampled_from([(), (), ((-1, -1), (5, -1)), ((20, -1), (0, -1), (5, -1))]))
    return Case("drawn", **{**features, **fixed})


@pytest.fixture(params=[1, 3], ids=["whole", "3 segments"], autouse=True)
def segments(request: pytest.FixtureRequest, cut: Callable[..., None]) -> int:
    """Every property holds for a sequence in one piece and in shares; tiles are small enough to be many."""
    cut(request.param, tile=16)
    return int(request.param)


def close(got: Tensor, want: Tensor) -> None:
    """Equal up to another order of the same float32 sums; outputs and log-sum-exps here are numbers below 100."""
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def attend(inputs: Inputs, **changes: Any) -> tuple[Tensor, Tensor]:
    """The library, into an `out` of its own."""
    given_out = changes.get("out", inputs["out"])
    return paged_attention(**{**inputs, **changes, "out": given_out.clone(), "return_lse": True})


def same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    """Bit by bit."""
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def page_slot(inputs: Inputs, case: Case, seq: int, pos: range) -> tuple[Tensor, Tensor]:
    at = torch.arange(pos.start, pos.stop, device=inputs["q"].device)
    return inputs["page_table"][seq, at // case.page_size].long(), at % case.page_size


def keys_at(inputs: Inputs, case: Case, seq: int, pos: range) -> tuple[Tensor, Tensor]:
    """Keys and values [N, kv_heads, head_dim] at these positions of a sequence, from the cache."""
    page, slot = page_slot(inputs, case, seq, pos)
    k, v = inputs["k_cache"], inputs["v_cache"]
    if case.layout == "NHD":
        return k[page, slot], v[page, slot]
    return k[page, :, :, slot].flatten(2) if case.layout == "x" else k[page, :, slot], (
        v[page, :, :, slot] if case.layout == "x" else v[page, :, slot]
    )


def starts(case: Case) -> list[int]:
    return [sum(case.query_lens[:i]) for i in range(len(case.query_lens) + 1)]


def int32(numbers: Any, like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=like.device)


@few
@given(case=batches())
def test_permuting_pages_changes_nothing(case: Case, device: str) -> None:
    inputs = build(case, device)
    pages = inputs["k_cache"].shape[0]
    new_place = torch.randperm(pages, generator=torch.Generator().manual_seed(case.seed)).to(device)
    moved = {name: torch.empty_like(inputs[name]) for name in ("k_cache", "v_cache")}
    for name, cache in moved.items():
        cache[new_place] = inputs[name]
    table = inputs["page_table"].long()
    moved["page_table"] = torch.where(table < pages, new_place[table.clamp(max=pages - 1)], BAD_PAGE).to(torch.int32)
    same(attend(inputs, **moved), attend(inputs))


@few
@given(
    case=batches(window_size=(0, -1), sinks=False),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_one_key_returns_its_value(case: Case, dtype: torch.dtype, device: str) -> None:
    """A causal window of one: a query sees its own position, whose weight is 1.

    Exactly so in 16 bits; a GPU's float32 exponential and division may be 2 ulp off each.
    """
    case = replace(case, dtype=dtype)
    inputs = build(case, device)
    out, _ = attend(inputs)
    for seq, start in enumerate(starts(case)[:-1]):
        pos = range(case.context_lens[seq], case.seq_lens[seq])
        _, values = keys_at(inputs, case, seq, pos)
        own = values.repeat_interleave(case.heads // case.kv_heads, dim=1)
        got, rtol = out[start : start + len(pos)], 5e-7 if dtype == torch.float32 else 0.0
        torch.testing.assert_close(got, own, rtol=rtol, atol=0.0)


@few
@given(case=batches())
def test_weights_sum_to_one(case: Case, device: str) -> None:
    """Values of 1 give 1, or what the sink leaves: 1 - exp(sink - lse)."""
    inputs = build(case, device)
    dead = bits(inputs["v_cache"]).isnan()
    out, lse = attend(inputs, v_cache=torch.ones_like(inputs["v_cache"]).masked_fill(dead, torch.nan))
    total = 1 - (inputs["sinks"] - lse).exp() if case.sinks else torch.ones_like(lse)
    close(out, total[..., None].expand_as(out))


@few
@given(case=batches(sinks=True))
def test_a_sink_is_one_more_key(case: Case, device: str) -> None:
    """It adds exp(sink) to the denominator, once, and nothing to the sum of values."""
    inputs = build(case, device)
    out, lse = attend(inputs)
    plain_out, plain_lse = attend(inputs, sinks=None)
    close(lse, torch.logaddexp(plain_lse, inputs["sinks"].expand_as(lse)))
    close(out, plain_out * (plain_lse - lse).exp()[..., None])


@few
@given(case=batches())
def test_prefix_and_new_keys_equal_all_in_the_cache(case: Case, device: str) -> None:
    inputs = build(case, device)
    own = [keys_at(inputs, case, seq, range(c, n)) for seq, (c, n) in enumerate(zip(case.context_lens, case.seq_lens))]
    k_new, v_new = (torch.cat(tensors) for tensors in zip(*own, strict=True))
    want = attend(inputs)

    for seq, (context_len, seq_len) in enumerate(zip(case.context_lens, case.seq_lens, strict=True)):
        page, slot = page_slot(inputs, case, seq, range(context_len, seq_len))
        for name in ("k_cache", "v_cache"):  # the call's own keys are no longer in the cache
            cache = inputs[name]
            if case.layout == "NHD":
                cache[page, slot] = torch.nan
            elif case.layout == "HND":
                cache[page, :, slot] = torch.nan
            else:
                cache[page, :, :, slot] = torch.nan
    got = attend(inputs, k_new=k_new, v_new=v_new)
    close(got[0], want[0])
    close(got[1], want[1])


@few
@given(case=batches(query_lens=(9, 5), seq_lens=(9, 40)), first=st.integers(1, 4))
def test_chunked_prefill_equals_one_prefill(case: Case, first: int, device: str) -> None:
    """The first `first` queries of each sequence in one call, the others in the next."""
    inputs = build(case, device)
    want = attend(inputs)
    begin = starts(case)
    chunks = [range(b, b + first) for b in begin[:-1]], [range(b + first, e) for b, e in pairwise(begin)]
    for last, chunk in enumerate(chunks):
        rows = [token for tokens in chunk for token in tokens]
        lens = [len(tokens) for tokens in chunk]
        seq_lens = case.seq_lens if last else [c + first for c in case.context_lens]
        got = attend(
            inputs,
            q=inputs["q"][rows],
            out=inputs["out"][rows],
            cu_seqlens_q=int32([0, lens[0], sum(lens)], inputs["q"]),
            seq_lens=int32(seq_lens, inputs["q"]),
        )
        close(got[0], want[0][rows])
        close(got[1], want[1][rows])


@few
@given(case=batches(dtype=torch.float32), fp8=st.booleans())
def test_decode_after_write_kv_equals_the_last_row_of_prefill(case: Case, fp8: bool, device: str) -> None:
    case = replace(case, cache_dtype=E4M3 if fp8 else None, scales="float")
    inputs = build(case, device)
    last = [end - 1 for end in starts(case)[1:]]
    want = attend(inputs)

    # take the last token of each sequence out of the cache, and let write_kv put it back
    spots = [page_slot(inputs, case, seq, range(n - 1, n)) for seq, n in enumerate(case.seq_lens)]
    slot_mapping = torch.cat([page * case.page_size + slot for page, slot in spots])
    tokens = [keys_at(byte_view(inputs), case, seq, range(n - 1, n)) for seq, n in enumerate(case.seq_lens)]
    k, v = (torch.cat(parts).view(case.dtype_of_cache).to(torch.float32) for parts in zip(*tokens, strict=True))
    scales = {name: inputs[name] for name in ("k_scale", "v_scale") if inputs.get(name) is not None}
    if fp8:
        k, v = k * scales["k_scale"], v * scales["v_scale"]
    nothing = torch.full_like(k, torch.nan)
    caches = inputs["k_cache"], inputs["v_cache"]
    for new in ((nothing, nothing), (k, v)):
        write_kv(*new, *caches, slot_mapping, kv_layout=inputs["kv_layout"], **scales)
    got = attend(inputs, q=inputs["q"][last], out=inputs["out"][last], cu_seqlens_q=None)
    close(got[0], want[0][last])
    close(got[1], want[1][last])


def byte_view(inputs: Inputs) -> Inputs:
    """The same call with fp8 caches as bytes, which every device can index."""
    return {**inputs, "k_cache": bits(inputs["k_cache"]), "v_cache": bits(inputs["v_cache"])}


@few
@given(case=batches(queries=(1,), causal=False, window_size=(-1, -1), alibi=False), split=st.integers(1, 3))
def test_merging_two_halves_of_the_keys_equals_the_whole(case: Case, split: int, device: str) -> None:
    """Each half a call of its own, over its own columns of the page table; the sink belongs to the first."""
    inputs = build(case, device)
    want = attend(inputs)
    columns = min(split * 8 // case.page_size + 1, inputs["page_table"].shape[1] - 1)
    first = inputs["seq_lens"].clamp(max=columns * case.page_size)
    states = [
        attend(inputs, page_table=inputs["page_table"][:, :columns], seq_lens=first),
        attend(inputs, page_table=inputs["page_table"][:, columns:], seq_lens=inputs["seq_lens"] - first, sinks=None),
    ]
    out, lse = merge_states(*(torch.stack(parts) for parts in zip(*states, strict=True)))
    close(out, want[0])
    close(lse, want[1])


@few
@given(case=batches(window_size=(-1, -1)), beyond=st.sampled_from([0, 1, 10**6, 2**31 - 1]))
def test_a_window_of_the_whole_sequence_equals_no_window(case: Case, beyond: int, device: str) -> None:
    inputs = build(case, device)
    window = min(max(case.seq_lens) - 1 + beyond, 2**31 - 1)
    got, want = attend(inputs, window_size=(window, window)), attend(inputs)
    close(got[0], want[0])
    close(got[1], want[1])


@pytest.mark.filterwarnings(
    "ignore:invalid value:RuntimeWarning"
)  # numpy's, for dead keys of infinities before the mask
@few
@given(
    case=batches(dtype=torch.bfloat16),
    fp8=st.booleans(),
    other=st.sampled_from([0.0, -1.0, torch.inf]),
)
def test_what_dead_slots_hold_is_never_seen(case: Case, fp8: bool, other: float, device: str) -> None:
    """NaN there, or anything else: dead slots, free pages, table tails, padding; the results are the same bits."""
    case = replace(case, cache_dtype=E4M3 if fp8 else None, scales="float", padding=1)
    inputs = build(case, device)
    want = attend(inputs)
    changed = {}
    for name in ("q", "k_cache", "v_cache"):
        tensor = inputs[name]
        filled = tensor.float().nan_to_num(nan=other, posinf=torch.inf).to(tensor.dtype)
        changed[name] = tensor.clone().copy_(filled) if not is_fp8(tensor.dtype) else filled
    changed["page_table"] = inputs["page_table"].masked_fill(inputs["page_table"] == BAD_PAGE, -(2**31))
    assert not want[0].isnan().any()
    same(attend(inputs, **changed), want)


@few
@given(case=batches())
def test_segments_change_nothing_beyond_rounding(case: Case, cut: Callable[..., None], device: str) -> None:
    inputs = build(case, device)
    states = []
    for number in (1, 2, 7):
        cut(number, tile=16)
        states.append(attend(inputs))
    for out, lse in states[1:]:
        close(out, states[0][0])
        close(lse, states[0][1])


@few
@given(case=batches(), extra=st.integers(1, 3))
def test_a_sequence_does_not_depend_on_its_neighbours(case: Case, extra: int, device: str) -> None:
    """Rows of one sequence are the same bits when it is alone in the call, with the same bounds."""
    inputs = build(case, device)
    bounds = dict(max_seqlen_q=max(case.query_lens), max_seqlen_k=max(case.seq_lens) + extra)
    out, lse = attend(inputs, **bounds)
    seq = extra % len(case.seq_lens)
    rows = slice(*starts(case)[seq : seq + 2])
    alone = attend(
        inputs,
        q=inputs["q"][rows],
        out=inputs["out"][rows],
        page_table=inputs["page_table"][seq : seq + 1],
        seq_lens=inputs["seq_lens"][seq : seq + 1],
        cu_seqlens_q=int32([0, case.query_lens[seq]], inputs["q"]),
        **bounds,
    )
    close(alone[0], out[rows])
    close(alone[1], lse[rows])
