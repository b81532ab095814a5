"""Batches of nothing, bounds, sizes and scores at their ends, and what a call must leave alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import paged_attn
from tests.features.test_paged_attention import EVERYTHING, FEW, FP16, MIXED, Cut
from tests.support.cases import Case, bits, build, compare, run


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_batches_in_which_nobody_sees_anything(segments: int, sinks: bool, device: str, cut: Cut) -> None:
    cut(segments)
    run(Case("nothing", (1, 3, 0, 20), (0, -5, 0, -40), sinks=sinks, padding=5, causal=False), device)
    run(Case("nothing, decode form", (1, 1), (0, -1), sinks=sinks, decode_form=True), device)


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("lengths", [((1, 1), (300, 5)), ((40, 3, 0), (200, 90, 7)), ((2, 1), (0, -1))], ids=str)
def test_a_sink_of_infinity_takes_all_weight(
    lengths: tuple[tuple[int, ...], tuple[int, ...]], segments: int, device: str, cut: Cut
) -> None:
    cut(segments)
    case = Case("infinite sink", *lengths, sinks=True)
    inputs = build(case, device)
    inputs["sinks"][1::2] = torch.inf
    out, lse = paged_attn.paged_attention(**inputs)
    compare(case, out, lse, inputs)
    assert not out[:, 1::2].any()
    assert (lse[: sum(case.query_lens), 1::2] == torch.inf).all()


@pytest.mark.parametrize("new", [False, True], ids=["cached", "new"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "non_causal"])
def test_sequences_shorter_than_their_queries(new: bool, causal: bool, device: str, cut: Cut) -> None:
    cut(segments=2)
    case = Case("short", (5, 12, 3), (2, 9, 3), new=new, causal=causal, alibi=True, sinks=True, qq_bias=4)
    run(case, device)
    run(replace(case, window_size=(3, 2)), device)


@pytest.mark.parametrize("seqs, tokens", [(0, 0), (0, 3), (2, 0)])
def test_empty_batches(seqs: int, tokens: int, device: str) -> None:
    inputs = build(Case("empty", (0,) * max(seqs, 1), (7,) * max(seqs, 1), padding=tokens), device)
    inputs["page_table"], inputs["seq_lens"] = inputs["page_table"][:seqs], inputs["seq_lens"][:seqs]
    inputs["cu_seqlens_q"] = inputs["cu_seqlens_q"][: seqs + 1]
    out, lse = paged_attn.paged_attention(**inputs)
    assert out.shape[0] == tokens
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


def test_no_tokens_may_have_any_strides(device: str) -> None:
    """What is contiguous for torch, though its last axis lies apart; of nothing, also scales by token."""
    inputs = build(Case("none", (0, 0), (7, 7)), device)
    q, cache = inputs["q"], inputs["k_cache"]
    inputs["q"] = q.new_empty(0, *reversed(q.shape[1:])).transpose(1, 2).contiguous()
    assert inputs["q"].is_contiguous()
    assert inputs["q"].stride(-1) != 1
    for scale in (None, q.new_ones(0, dtype=torch.float32), q.new_ones(0, 1, dtype=torch.float32)):
        assert paged_attn.paged_attention(**inputs, q_scale=scale, check=True)[0].shape == q.shape
    none = cache.new_empty(0, *reversed(cache.shape[2:])).transpose(1, 2)
    slots = torch.zeros(0, dtype=torch.int32, device=device)
    paged_attn.write_kv(none, none, inputs["k_cache"], inputs["v_cache"], slots)


@pytest.mark.parametrize("q_bound, k_bound", [(18, 67), (19, 4000), (4000, 67), (None, 67), (18, None)])
def test_bounds_may_be_loose(q_bound: int | None, k_bound: int | None, device: str) -> None:
    run(Case("bounds", **MIXED, dtype=FP16), device, max_seqlen_q=q_bound, max_seqlen_k=k_bound)


@pytest.mark.parametrize("segments", [1, 3])
def test_two_runs_give_the_same_bits(segments: int, device: str, cut: Cut) -> None:
    cut(segments)
    case = Case("twice", **FEW, dtype=FP16)
    first, second = (paged_attn.paged_attention(**build(case, device)) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def test_prefill_only_of_a_decode_batch_writes_nothing(device: str) -> None:
    case = Case("nothing asked", (1, 1), (5, 40), decode_form=True)
    inputs = build(case, device)
    out, _ = paged_attn.paged_attention(**{**inputs, "only": "prefill"})
    assert out.isnan().all()


def test_no_queries_over_a_long_table(device: str) -> None:
    """A table wide enough to cut keys, and nobody who asks: padding is still cleared."""
    inputs = build(Case("no queries", (0, 0), (4000, 9), padding=3), device)
    out, lse = paged_attn.paged_attention(**{**inputs, "max_seqlen_q": 0})
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("window", [(2**31 - 1, 2**31 - 1), (-1, 2**31 - 1), (2**31 - 3, -1)], ids=str)
def test_a_window_wider_than_any_sequence_hides_nothing(window: tuple[int, int], device: str) -> None:
    run(Case("wide", (3, 1, 4), (5, 40, 2), causal=False, window_size=window), device)


@pytest.mark.gpu
def test_tensors_on_the_cpu_are_served_in_plain_torch_beside_a_gpu(device: str) -> None:
    run(Case("cpu", (1,), (5,)), "cpu")


def test_many_short_prompts_beside_one_long(device: str) -> None:
    lens = (1, 9, 1, 2, 33, 1, 0, 4)
    run(Case("mix", lens, tuple(n + 20 for n in lens), heads=8, kv_heads=1, padding=6), device)


def test_the_result_takes_the_dtype_of_the_query(device: str) -> None:
    case = Case("no out", (1, 5), (20, 30), dtype=FP16)
    inputs = build(case, device)
    given, lse = paged_attn.paged_attention(**inputs)
    made, same_lse = paged_attn.paged_attention(**{**inputs, "out": None})
    alone = paged_attn.paged_attention(**{**inputs, "out": None, "return_lse": False})
    assert made.dtype == alone.dtype == FP16
    assert torch.equal(given, made)
    assert torch.equal(given, alone)
    assert torch.equal(lse, same_lse)


def test_inputs_are_not_written(device: str) -> None:
    inputs = build(replace(EVERYTHING, new=True), device)
    before = {name: bits(x).clone() for name, x in inputs.items() if isinstance(x, torch.Tensor) and name != "out"}
    paged_attn.paged_attention(**inputs)
    for name, copy in before.items():
        torch.testing.assert_close(bits(inputs[name]), copy, rtol=0, atol=0, equal_nan=True, msg=name)


def test_scores_of_any_size_are_safe(device: str, cut: Cut) -> None:
    cut(segments=2)
    run(Case("peaked", **FEW, softmax_scale=6.0), device)  # float32 rounds a score by its size
    run(Case("negative scale", **FEW, softmax_scale=-3.0), device)
    run(Case("flat", **FEW, softmax_scale=0.0), device)
    run(Case("flat, capped", (60, 1), (150, 70), softmax_scale=0.0, softcap=20.0), device)


@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("query_lens", [(40, 3), (1, 1)], ids=["prefill", "decode"])
def test_a_key_that_is_not_a_number_reaches_the_rows_that_see_it_and_no_others(
    softcap: float, query_lens: tuple[int, int], device: str
) -> None:
    """A cap hides nothing, and neither does joining the pieces of a sequence."""
    sizes: dict[str, Any] = dict(heads=8, kv_heads=2, head_dim=64, page_size=16, dtype=FP16, softcap=softcap)
    seq_lens, at, kv_head = (150, 20), 129, 1
    inputs = build(Case("nan", query_lens, seq_lens, **sizes), device)
    page, slot = divmod(at, 16)
    inputs["k_cache"][inputs["page_table"][0, page], slot, kv_head, 5] = torch.nan
    out, lse = paged_attn.paged_attention(**inputs)
    pos = torch.arange(seq_lens[0] - query_lens[0], seq_lens[0])
    wanted = torch.zeros(sum(query_lens), 8, dtype=torch.bool)
    wanted[: query_lens[0], 4:] = (pos >= at)[:, None]
    assert torch.equal(out[: sum(query_lens)].isnan().any(-1).cpu(), wanted)
    assert torch.equal(lse[: sum(query_lens)].isnan().cpu(), wanted)


def far_apart(x: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, head_dim] by head, as far apart as strides may be: the last of 130 is beyond 2^31 elements."""
    tokens, heads, dim = x.shape
    apart = (1 << 24) - 8
    room = torch.empty((heads - 1) * apart + tokens * dim, dtype=x.dtype, device=x.device)
    return room.as_strided(x.shape, (dim, apart, 1)).copy_(x)


@pytest.mark.parametrize(
    "query_lens", [(1, 1), pytest.param((3, 70), marks=pytest.mark.gpu)], ids=["decode", "prefill"]
)
@pytest.mark.parametrize("page_size", [16, 12], ids=["page 16", "page 12"])
def test_heads_may_lie_far_apart(query_lens: tuple[int, int], page_size: int, device: str) -> None:
    """Memory between them is asked for, and never touched."""
    sizes: dict[str, Any] = dict(heads=130, kv_heads=130, head_dim=64, page_size=page_size, dtype=FP16, padding=3)
    inputs = build(Case("far", query_lens, (20, 90), **sizes), device)
    near, _ = paged_attn.paged_attention(**inputs)
    empty = far_apart(torch.full_like(near, torch.nan))
    out, _ = paged_attn.paged_attention(**inputs | dict(q=far_apart(inputs["q"]), out=empty))
    assert torch.equal(near, out)
    keys = torch.randn(5, 130, 64, dtype=FP16, device=device)
    slots = torch.arange(5, device=device)
    caches = [inputs[x].nan_to_num(0) for x in ("k_cache", "v_cache")]
    wanted = [x.clone() for x in caches]
    paged_attn.write_kv(keys, keys, *wanted, slots)
    paged_attn.write_kv(far_apart(keys), far_apart(keys), *caches, slots)
    assert all(torch.equal(a, b) for a, b in zip(caches, wanted, strict=True))


def test_more_heads_than_32_bits_hold_of_the_widest_strides(device: str) -> None:
    run(Case("130 heads", (1, 3), (5, 20), heads=130, kv_heads=130, head_dim=16, padding=2), device)
