"""Strides of axes of one element, and of empty tensors, mean nothing: no call looks at them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import paged_attn
from paged_attn.calls import call_cache, launched
from paged_attn.checks import overlap
from paged_attn.integrations import flash_attn
from paged_attn.strides import lies_in, same_steps, settled
from tests.support.cases import E4M3, Case, build, compare, problem_of, run
from tests.support.hopper_cases import DEVICE, NEW, PACKED, ragged, sized

ODD = (0, 1, 3, 7, 1 << 20, 1 << 33)


def odd(x: Tensor, stride: int = 3) -> Tensor:
    """A view of all elements with this stride on each axis that has one, and on all axes of an empty tensor."""
    strides = [stride if size < 2 or x.numel() == 0 else s for size, s in zip(x.shape, x.stride())]
    return x.as_strided(x.shape, strides)


def with_odd(given: Any, stride: int) -> Any:
    if isinstance(given, (tuple, list)) and any(isinstance(x, Tensor) for x in given):
        return type(given)(with_odd(x, stride) for x in given)
    return odd(given, stride) if isinstance(given, Tensor) else given


# ---- what strides mean ---------------------------------------------------------------------------


def test_settled_strides_are_those_of_a_contiguous_tensor() -> None:
    for shape in itertools.product((0, 1, 2, 16), repeat=4):
        x = torch.empty(shape, dtype=torch.float16)
        assert settled(x) is x, shape
        for stride in ODD:
            assert settled(odd(x, stride)).stride() == x.stride(), (shape, stride)


def test_settled_views_are_the_same_elements_and_as_well_aligned() -> None:
    """Strides of slices are multiples of eight elements, and so are those that are put in for others."""
    rng = random.Random(0)
    memory = torch.arange(32 * 48 * 24 * 8).view(32, 48, 24, 8)
    for _ in range(300):
        sizes = [rng.choice((1, 1, 2, 3)) for _ in range(3)]
        x = memory[: sizes[0], : sizes[1], : sizes[2]].permute(*rng.sample(range(3), 3), 3)
        y = settled(odd(x, rng.choice(ODD)))
        assert torch.equal(x, y)
        assert same_steps(x, y)
        assert all(stride > 0 and stride % 8 == 0 for stride in y.stride()[:-1]), y.stride()


def test_steps_differ_where_an_index_of_two_lies_elsewhere() -> None:
    x = torch.zeros(4, 1, 6)
    assert same_steps(x, odd(x))
    assert not same_steps(x, torch.zeros(4, 1, 7)[..., :6])
    assert not same_steps(x, torch.zeros(4, 2, 6)[:, :1])
    assert not same_steps(x, torch.zeros(4, 6, 1))
    assert same_steps(x[..., :5], x, 2)


# ---- every argument ------------------------------------------------------------------------------

ONE: dict[str, Any] = dict(query_lens=(1,), seq_lens=(1,), heads=1, page_size=1)
CASES = [
    Case("one token", **ONE, sinks=True, alibi=True, qq_bias=1, gate=True, table="ragged"),
    Case("one head", (1, 3), (9, 20), heads=1, spans=1, prefix=2, window_size=(6, -1)),
    Case("one of each", **ONE, dtype=torch.float16, new=True, qq_mask=1, positions="tree", head_windows=((5, -1),)),
    Case("x-packed", **ONE, dtype=torch.float16, layout="x"),
    Case("x-packed, one head", (2,), (20,), dtype=torch.float16, layout="x"),
    Case("one page", (2,), (9,), heads=4, kv_heads=2, layout="HND", token_scales=True),
    Case("one page of one head", (1,), (9,), dtype=torch.float16, head_dim=64),
    Case("fp8", (1,), (20,), heads=2, dtype=E4M3, scales="per_head", token_scales=True, causal_by_seq=True),
    Case("a dim", (1, 2), (9, 16), heads=4, kv_heads=2, head_dim=1),
    Case("a dim of values", (1, 2), (9, 16), heads=2, head_dim=16, value_dim=1, latent=True),
    Case("no tokens", (0, 0), (9, 16), heads=2),
]


def call_of(case: Case, device: str) -> dict[str, Any]:
    """One page: the cache has no other."""
    inputs = build(case, device)
    if case.name.startswith("one page"):
        page = int(inputs["page_table"][0, 0])
        inputs |= {name: inputs[name][page : page + 1] for name in ("k_cache", "v_cache")}
        inputs["page_table"] = torch.zeros_like(inputs["page_table"][:, :1])
    return inputs


@pytest.mark.parametrize("stride", ODD)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_argument_may_have_odd_strides(case: Case, stride: int, device: str) -> None:
    """Twice, for kept calls; beside it each tensor alone, which the plan does not notice."""
    call_cache.clear()
    inputs = call_of(case, device)
    for _ in range(2):
        given = {name: with_odd(x, stride) for name, x in inputs.items()}
        out, lse = paged_attn.paged_attention(**given)
        assert out is given["out"]
        compare(case, out, lse, inputs)


@pytest.mark.kernels
@pytest.mark.parametrize("stride", ODD)
def test_odd_strides_change_no_plan(stride: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hopper's path wants steps of 16 bytes, and counts pages in steps of slots."""
    asked: list[Any] = []

    def plan_of(problem: Any) -> Any:
        asked.append(problem)
        return made(problem)

    made = launched.plan
    monkeypatch.setattr(launched, "plan", plan_of)
    for case in CASES:
        asked.clear()
        call_cache.clear()
        inputs = call_of(case, device)
        paged_attn.paged_attention(**inputs)
        call_cache.clear()
        paged_attn.paged_attention(**{name: with_odd(x, stride) for name, x in inputs.items()})
        assert len(asked) == 2, case
        assert asked[0] == asked[1], case


SHARED: dict[str, Any] = ragged((1, 130), (1, 40)) | dict(kv_heads=1, heads=8)
HOPPER: dict[str, dict[str, Any]] = {
    "one head": SHARED,
    "one head, hnd, new": SHARED | NEW | dict(layout="HND"),
    "one head, x-packed": SHARED | PACKED,
    "latents": SHARED | dict(head_dim=576, value_dim=512, latent=True),
    "one sequence": ragged((1, 70)) | dict(lse=False),
    "one prefill": ragged((70, 90)) | dict(kv_heads=1, heads=8),
}


@pytest.mark.hopper
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("name", HOPPER)
def test_hopper_kernels_are_given_strides_that_mean_something(name: str) -> None:
    """A stride of 3 is none of the copy engine's."""
    case = sized(name, **HOPPER[name])
    run(case, DEVICE, **{name: with_odd(x, 3) for name, x in build(case, DEVICE).items()})


@pytest.mark.parametrize("stride", ODD)
@pytest.mark.parametrize("layout", ["NHD", "HND", "x"])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (3, 1, 4, 1), (1, 4, 1, 2)], ids=str)
def test_writes_with_odd_strides(layout: str, sizes: tuple[int, ...], stride: int, device: str) -> None:
    """sizes: tokens, pages, slots of a page, KV heads."""
    tokens, pages, page, heads = sizes
    k, v = torch.randn(2, tokens, heads, 16, dtype=torch.float16, device=device)
    if layout == "x":
        shapes = [(pages, heads, 2, page, 8), (pages, heads, 16, page)]
    else:
        shapes = [(pages, page, heads, 16) if layout == "NHD" else (pages, heads, page, 16)] * 2
    slots = torch.arange(tokens, device=device).clamp(max=pages * page - 1).unique()
    slots = torch.cat([slots, slots.new_full((tokens - len(slots),), -1)])
    want = [torch.zeros(shape, dtype=torch.float16, device=device) for shape in shapes]
    got = [x.clone() for x in want]
    kv_layout = "NHD" if layout == "x" else layout
    paged_attn.write_kv(k, v, *want, slots, kv_layout=kv_layout)
    paged_attn.write_kv(*[odd(x, stride) for x in (k, v, *got, slots)], kv_layout=kv_layout)
    assert any(x.abs().max() > 0 for x in want)
    assert all(map(torch.equal, want, got))


@pytest.mark.parametrize("stride", ODD)
@pytest.mark.parametrize("shape", [(1, 1, 1, 16), (3, 1, 2, 16), (1, 4, 1, 16), (2, 0, 2, 16)], ids=str)
def test_merges_with_odd_strides(shape: tuple[int, ...], stride: int, device: str) -> None:
    outs, lses = torch.randn(shape, device=device), torch.randn(shape[:3], device=device)
    want = paged_attn.merge_states(outs, lses)
    assert all(map(torch.equal, want, paged_attn.merge_states(odd(outs, stride), odd(lses, stride))))


@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=str)
def test_one_token_writes_over_its_queries_by_another_view(case: Case, device: str) -> None:
    inputs = build(case, device)
    want, _ = paged_attn.paged_attention(**inputs | {"out": None})
    out, _ = paged_attn.paged_attention(**inputs | {"out": odd(inputs["q"], 5)})
    assert torch.equal(out, want)
    assert overlap.same_elements(inputs["q"], odd(inputs["q"]))


# ---- latents as engines view them ----------------------------------------------------------------

RANK, ROPE, PAGE = 32, 16, 4
VIEWS = {
    "vLLM's unsqueeze": lambda x: x.unsqueeze(-2),
    "SGLang's view": lambda x: x.view(-1, 1, x.shape[-1]).view(-1, PAGE, 1, x.shape[-1]),
    "any": lambda x: odd(x.unsqueeze(2), 5),
}


def latents(device: str) -> Iterator[tuple[str, Tensor, Tensor, Tensor, Tensor]]:
    """(name, the cache [pages, PAGE, RANK + ROPE], its keys, its values, its rotated parts)."""
    for name, view in VIEWS.items():
        torch.manual_seed(0)
        cache = torch.randn(8, PAGE, RANK + ROPE, device=device)
        if name.startswith("SGLang"):
            rows = cache.view(-1, 1, RANK + ROPE)
            yield name, cache, *[view(x) for x in (rows, rows[..., :RANK], rows[..., RANK:])]
        else:
            yield name, cache, *[view(x) for x in (cache, cache[..., :RANK], cache[..., RANK:])]


@pytest.mark.parametrize("widths", [(RANK, RANK + ROPE), (512, 576)], ids=str)
def test_slices_with_an_axis_of_one_head_are_latents(widths: tuple[int, int], device: str) -> None:
    rank, dims = widths
    cache = torch.randn(8, 16, dims, device=device)
    q, lens = torch.randn(2, 4, dims, device=device), torch.tensor([40, 9], dtype=torch.int32, device=device)
    table = torch.arange(6, dtype=torch.int32, device=device).view(2, 3)
    whole = cache[:, :, None]
    want = paged_attn.paged_attention(q, whole, whole[..., :rank], table, lens)
    for k, v in ((cache.unsqueeze(2), cache[..., :rank].unsqueeze(2)), (odd(whole), odd(whole[..., :rank], 7))):
        assert lies_in(v, k)
        for _ in range(2):
            assert torch.equal(paged_attn.paged_attention(q, k, v, table, lens), want)
    assert not lies_in(cache[..., 1 : rank + 1].unsqueeze(2), whole)
    assert not lies_in(cache[::2, :, :rank].unsqueeze(2), whole[:4])


def test_latents_in_the_views_of_engines_are_written(device: str) -> None:
    for name, cache, k, v, _ in latents(device):
        new = torch.randn(3, 1, RANK + ROPE, device=device)
        slots = torch.tensor([5, -1, 9], device=device)
        cache.zero_()
        paged_attn.write_kv(new, None, k, v, slots)
        assert torch.equal(cache.view(-1, RANK + ROPE)[[5, 9]], new[[0, 2], 0]), name
        assert int(cache.count_nonzero()) == 2 * (RANK + ROPE)


def test_queries_in_two_parts_take_the_views_of_engines(device: str) -> None:
    q, qv = torch.randn(2, 4, ROPE, device=device), torch.randn(2, 4, RANK, device=device)
    lens = torch.tensor([9, 3], dtype=torch.int32, device=device)
    table = torch.arange(6, dtype=torch.int32, device=device).view(2, 3)
    starts = torch.arange(3, dtype=torch.int32, device=device)
    for _, cache, _, v, rope in latents(device):
        whole = cache[:, :, None]
        want = paged_attn.paged_attention(torch.cat([qv, q], -1), whole, whole[..., :RANK], table, lens)
        got = flash_attn.flash_attn_with_kvcache(
            q[:, None], rope, v, cache_seqlens=lens, page_table=table, qv=qv[:, None], causal=True
        )
        torch.testing.assert_close(got[:, 0], want)
        got = flash_attn.flash_attn_varlen_func(
            q, rope, v, cu_seqlens_q=starts, max_seqlen_q=1, max_seqlen_k=12, seqused_k=lens, block_table=table, q_v=qv,
            causal=True,
        )  # fmt: skip
        torch.testing.assert_close(got, want)


def test_results_of_one_sequence_may_have_an_odd_stride_of_sequences(device: str) -> None:
    q, k, v = torch.randn(3, 1, 4, 2, 16, device=device)
    lens = torch.tensor([4], dtype=torch.int32, device=device)
    want = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, causal=True)
    out = odd(torch.zeros_like(q))
    got = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, causal=True, out=out)
    assert torch.equal(got, want)
    assert torch.equal(out, want)


def test_a_decode_reads_a_latent_cache_once(device: str) -> None:
    case = Case("latent", (1, 1), (40, 9), heads=4, head_dim=48, value_dim=32, latent=True, decode_form=True)
    inputs = build(case, device)
    inputs["k_cache"], inputs["v_cache"] = odd(inputs["k_cache"], 9), odd(inputs["v_cache"], 5)
    assert problem_of(inputs).latent
    run(case, device, k_cache=inputs["k_cache"], v_cache=inputs["v_cache"])


@pytest.mark.parametrize("stride", ODD)
@pytest.mark.parametrize("seqs", [1, 2])
def test_one_key_of_plain_generate_may_have_odd_strides(seqs: int, stride: int, device: str) -> None:
    from paged_attn.integrations.transformers import plain

    class Scores(NamedTuple):
        softcap: float = 0.0

    q, k, v = torch.randn(3, seqs, 2, 1, 16, device=device)
    want = plain.attend(q, k, v, None, None, Scores())
    assert torch.equal(plain.attend(*[odd(x, stride) for x in (q, k, v)], None, None, Scores()), want)
    torch.testing.assert_close(want, v.transpose(1, 2))
