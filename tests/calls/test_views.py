"""Views: of any strides and offsets, what overlaps, and what is negated lazily."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import paged_attn
from paged_attn import reference
from paged_attn.calls import call_cache, writes
from paged_attn.checks import overlap
from paged_attn.launching.template import arguments_for
from paged_attn.records import layout
from tests.support.bad_input import as_bytes, refuses
from tests.support.cases import E4M3, Case, bits, build, run

CASE = Case("views", (1, 5), (9, 20), heads=4, kv_heads=2, page_size=8, sinks=True, alibi=True, qq_bias=4)
FP8 = Case("views of fp8", (1, 4), (9, 20), heads=4, kv_heads=2, page_size=8, dtype=E4M3, scales="per_head")
NEW = Case("views of new keys", (1, 5), (9, 20), heads=4, kv_heads=2, page_size=8, new=True, dtype=torch.float16)


# ---- overlap -------------------------------------------------------------------------------------


def places(x: Tensor) -> list[int]:
    """First bytes of all elements."""
    size = x.element_size()
    indices = itertools.product(*map(range, x.shape))
    return [x.data_ptr() + size * sum(i * s for i, s in zip(index, x.stride())) for index in indices]


def test_overlaps_are_found_exactly() -> None:
    rng, memory = random.Random(0), torch.zeros(5000, dtype=torch.int16)
    strides, found = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 20, 24, 60, 77), [0, 0]

    def view() -> Tensor:
        axes = rng.randint(1, 4)
        sizes, steps = [rng.randint(1, 5) for _ in range(axes)], [rng.choice(strides) for _ in range(axes)]
        return torch.as_strided(memory, sizes, steps, rng.randint(0, 200))

    for _ in range(500):
        x, y = view(), view()
        if rng.random() < 0.5 and y.stride(-1) == 1:
            y = y.view(torch.int8)
        one, other = places(x), places(y)
        itself = len({*one}) < len(one)
        both = {b + i for b in one for i in range(2)} & {b + i for b in other for i in range(y.element_size())}
        assert overlap.overlaps_itself(x) == itself, (x.shape, x.stride())
        assert overlap.overlap(x, y) == bool(both), (x.shape, x.stride(), y.shape, y.stride())
        found = [found[0] + itself, found[1] + bool(both)]
    assert all(100 < count < 400 for count in found), found


def test_pairs_that_overlap_are_found_among_many() -> None:
    rng, memory, found = random.Random(1), torch.zeros(300, dtype=torch.int16), 0

    def view() -> Tensor:
        axes = rng.randint(1, 3)
        sizes, steps = [rng.randint(0, 4) for _ in range(axes)], [rng.choice((1, 2, 3, 6, 12, 24)) for _ in range(axes)]
        x = memory if rng.random() < 0.5 else memory.view(torch.int8)
        return torch.as_strided(x, sizes, steps, rng.randint(0, 40))

    for _ in range(300):
        views = [view() for _ in range(4)]
        want = {(i, j) for i, j in itertools.combinations(range(4), 2) if overlap.overlap(views[i], views[j])}
        assert {*overlap.pairs_that_meet(views)} == want
        found += len(want)
    assert 100 < found < 1700


def test_usual_and_exotic_layouts_do_not_overlap() -> None:
    buffer = torch.empty(64, 16, 4, 2, 32, device="meta")
    assert not overlap.overlaps_itself(buffer[:, :, :, 1].permute(2, 0, 1, 3))
    both = torch.empty(64, 16, 4, 2, 32)
    assert not overlap.overlap(both[..., 0, :], both[..., 1, :])
    assert not overlap.overlap(both[::2], both[1::2])
    assert overlap.overlap(both[::2], both[::3])
    # steps of 2 and 3 with two elements each, which do not nest
    assert not overlap.overlaps_itself(torch.empty_strided((2, 2), (3, 2)))
    assert overlap.overlaps_itself(torch.empty_strided((2, 3), (4, 2)))


def racing(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The second axis steps by as much as the first."""
    x = torch.zeros(4096, dtype=dtype)
    strides = [*torch.empty(shape, device="meta").stride()]
    strides[0] = strides[1]
    return x.as_strided(shape, strides)


def test_an_out_that_overlaps_itself_is_refused() -> None:
    inputs = build(CASE)
    out = racing(*inputs["out"].shape)
    text = f"out must not overlap itself, got {[*out.shape]} strides {[*out.stride()]}"
    refuses(paged_attn.paged_attention, inputs | {"out": out}, ValueError, text)


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_a_cache_that_overlaps_itself_is_not_written(name: str) -> None:
    caches = {x: torch.zeros(2, 4, 1, 32) for x in ("k_cache", "v_cache")}
    caches[name] = racing(2, 4, 1, 32)
    text = f"{name} must not overlap itself, got [2, 4, 1, 32] strides [32, 32, 32, 1]"
    inputs = dict(k=torch.ones(1, 1, 32), v=torch.ones(1, 1, 32), slot_mapping=torch.tensor([1]))
    refuses(paged_attn.write_kv, inputs | caches, ValueError, text)


def test_caches_that_overlap_each_other_are_not_written(device: str) -> None:
    memory = torch.zeros(3, 4, 1, 32, device=device)
    k, v = torch.ones(2, 1, 1, 32, device=device)
    slots = torch.tensor([1], device=device)
    inputs = dict(k=k, v=v, k_cache=memory[:2], v_cache=memory[1:], slot_mapping=slots)
    refuses(paged_attn.write_kv, inputs, ValueError, "v_cache must share no memory with k_cache")
    # one cache of keys that are values, too: what is written twice is the same
    paged_attn.write_kv(k, k, memory, memory, slots)
    assert torch.equal(memory[0, 1], k[0])


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "k_new", "v_new", "query_positions"])
def test_an_out_in_the_memory_of_an_input_is_refused(name: str) -> None:
    inputs = build(replace(NEW, positions="tree"))
    memory = inputs[name].as_strided((inputs[name].numel(),), (1,), 0)
    wider = torch.zeros(memory.numel() + inputs["out"].numel(), dtype=memory.dtype)
    at = wider[: memory.numel()].copy_(memory)
    inputs[name] = at.view(inputs[name].shape)
    after = max(0, memory.numel() - 32)
    inputs["out"] = wider.view(inputs["out"].dtype)[after:][: inputs["out"].numel()].view(inputs["out"].shape)
    refuses(paged_attn.paged_attention, inputs, ValueError, f"out must share no memory with {name}")


@pytest.mark.parametrize("segments", [1, 3])
def test_out_may_be_the_queries_themselves(segments: int, cut: Any, device: str) -> None:
    cut(segments, 16)
    inputs = build(replace(CASE, padding=0), device)
    want, _ = paged_attn.paged_attention(**inputs)
    for _ in range(2):  # a kept call as well
        q = inputs["q"].clone()
        got, _ = paged_attn.paged_attention(**inputs | {"q": q, "out": q})
        assert got is q
        assert torch.equal(got, want)


# ---- negated and conjugated ------------------------------------------------------------------------

ARGUMENTS = ("q", "k_cache", "v_cache", "page_table", "seq_lens", "cu_seqlens_q", "alibi_slopes", "sinks", "qq_bias")


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("name", [*ARGUMENTS, "out"])
def test_a_lazily_negated_argument_is_refused(name: str, kept: bool, device: str) -> None:
    inputs = build(CASE, device)
    for _ in range(2 * kept):  # so that it would be found by its signature, and by its guard
        paged_attn.paged_attention(**inputs)
    text = f"{name} must hold its numbers, got a lazily negated view: pass {name}.resolve_neg()"
    with pytest.raises(ValueError) as raised:
        paged_attn.paged_attention(**inputs | {name: torch._neg_view(inputs[name])})
    assert str(raised.value) == text


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("name", ["k", "v", "k_cache", "v_cache", "slot_mapping"])
def test_writing_refuses_lazily_negated_arguments(name: str, kept: bool, device: str) -> None:
    inputs = {x: torch.ones(2, 1, 32, device=device) for x in ("k", "v")}
    inputs |= {x: torch.zeros(2, 4, 1, 32, device=device) for x in ("k_cache", "v_cache")}
    inputs["slot_mapping"] = torch.tensor([1, 2], device=device)
    for _ in range(2 * kept):
        paged_attn.write_kv(**inputs)
    with pytest.raises(ValueError, match=f"{name} must hold its numbers"):
        paged_attn.write_kv(**inputs | {name: torch._neg_view(inputs[name])})


@pytest.mark.parametrize("name", ["outs", "lses"])
def test_merging_refuses_lazily_negated_arguments(name: str, device: str) -> None:
    inputs = {"outs": torch.ones(2, 1, 1, 32, device=device), "lses": torch.ones(2, 1, 1, device=device)}
    with pytest.raises(ValueError, match=f"{name} must hold its numbers"):
        paged_attn.merge_states(**inputs | {name: torch._neg_view(inputs[name])})


def test_the_imaginary_part_of_a_conjugate_is_refused(device: str) -> None:
    inputs = build(CASE, device)
    numbers = torch.complex(inputs["q"], inputs["q"]).conj()
    with pytest.raises(ValueError, match="q must hold its numbers"):
        paged_attn.paged_attention(**inputs | {"q": numbers.imag[..., :1].expand_as(inputs["q"])})
    with pytest.raises(TypeError, match="q must be"):
        paged_attn.paged_attention(**inputs | {"q": numbers})


# ---- offsets -------------------------------------------------------------------------------------


def offset(x: Tensor, elements: int) -> Tensor:
    """A copy of a tensor, `elements` elements behind an aligned address."""
    memory = torch.zeros(x.numel() + elements + 64, dtype=x.dtype, device=x.device)
    gap = -memory.data_ptr() % 64 // x.element_size() + elements
    assert x.is_contiguous()
    moved = memory[gap : gap + x.numel()].view(x.shape)
    bits(moved)[:] = bits(x)
    return moved


@pytest.mark.parametrize("elements", [1, 3, 8])
@pytest.mark.parametrize("case", [replace(CASE, dtype=torch.float16), FP8, NEW], ids=str)
def test_every_argument_may_lie_at_any_offset(case: Case, elements: int, device: str) -> None:
    inputs = build(case, device)
    tensors = [name for name, given in inputs.items() if isinstance(given, Tensor)]
    assert len(tensors) >= 9
    moved = {name: offset(inputs[name].contiguous(), elements) for name in tensors}
    bits(moved["out"])[:] = bits(inputs["out"])
    run(case, device, **moved)


@pytest.mark.parametrize("elements", [2, 4, 8, 16, 32])
def test_pairs_of_fp8_promise_no_more_than_their_address_keeps(elements: int) -> None:
    """A GPU reads as many bytes at once as the promise allows, and fails where the address breaks it."""
    inputs = build(FP8, "cpu")
    caches = [offset(inputs[name].contiguous(), elements) for name in ("k_cache", "v_cache")]
    with arguments_for(caches) as held:
        paired = layout.pairs(layout.cache(*held, "NHD"), FP8.head_dim, FP8.head_dim)
        for kv, tensor in zip(paired, caches):
            assert kv.PARTS.value == 2
            assert tensor.data_ptr() % (2 * kv.ALIGN.value) == 0
            assert kv.ALIGN.value == min(16, elements // 2)


# ---- strides from 2^24 on --------------------------------------------------------------------------


def far(x: Tensor, axis: int, stride: int) -> Tensor:
    """A copy of a tensor with a large stride of tokens or heads; most of its memory is allocated and never touched."""
    strides = [x.shape[2], x.shape[2], 1]
    strides[axis] = stride
    if axis == 0:
        strides[1] = x.shape[2]
    moved = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)
    bits(moved)[:] = bits(x)
    return moved


LARGE = [(0, 1 << 24), (1, 1 << 24), (1, (1 << 29) + 8)]


@pytest.mark.parametrize(("axis", "stride"), LARGE)
@pytest.mark.parametrize("name", ["q", "out", "k_new", "v_new"])
def test_strides_may_be_large(name: str, axis: int, stride: int, device: str) -> None:
    inputs = build(NEW, device)
    run(NEW, device, **{name: far(inputs[name], axis, stride)})


def test_head_major_queries_of_131072_tokens_are_taken() -> None:
    """The layout of one large prefill, as a record; the call itself has few tokens in the tests above."""
    q = torch.empty(2, 131072, 128, dtype=torch.float16, device="meta").transpose(0, 1)
    record = layout.rows(q)
    assert (record.stride_token, record.stride_head) == (128, 1 << 24)
    assert record.WIDE is not None


@pytest.mark.parametrize(
    ("shape", "strides", "wide"),
    [
        ((8, 4, 32), (128, 32, 1), False),
        ((8, 4, 32), ((1 << 19) - 1, 32, 1), False),
        ((8, 4, 32), (1 << 19, 32, 1), True),
        ((8, 4, 32), (32, (1 << 23) - 1, 1), False),
        ((8, 4, 32), (32, 1 << 23, 1), True),
        ((1, 4, 32), (1 << 40, 32, 1), False),
        ((8, 1, 32), (32, 1 << 40, 1), False),
    ],
)
def test_only_large_strides_are_counted_in_64_bits(
    shape: tuple[int, ...], strides: tuple[int, ...], wide: bool
) -> None:
    assert (layout.rows(torch.empty_strided(shape, strides, device="meta")).WIDE is not None) == wide


@pytest.mark.parametrize(("axis", "stride"), LARGE)
def test_keys_of_large_strides_are_written(axis: int, stride: int, device: str) -> None:
    k, v = torch.randn(2, 3, 2, 32, device=device)
    slots = torch.tensor([5, 0, 9], device=device)
    ours, theirs = torch.zeros(2, 2, 2, 8, 2, 32, device=device)
    paged_attn.write_kv(far(k, axis, stride), far(v, axis, stride), *ours, slots)
    reference.write_kv(k, v, *theirs, slots)
    assert torch.equal(ours, theirs)


def test_padding_of_large_strides_is_cleared(device: str) -> None:
    case = Case("padding", (2,), (9,), heads=3, padding=2)
    out = far(build(case, device)["out"], 1, (1 << 29) + 8)
    run(case, device, out=out)


HOPPER = {
    "decodes": Case("decodes", (1,) * 3, (300, 9, 64), heads=8, kv_heads=2, head_dim=64, decode_form=True),
    "blocks": Case("blocks", (100,), (160,), heads=8, kv_heads=2, head_dim=64),
    "mixed": Case("mixed", (1, 70), (90, 100), heads=8, kv_heads=2, head_dim=64, padding=1),
}


@pytest.mark.hopper
@pytest.mark.parametrize(("axis", "stride"), LARGE[:2])
@pytest.mark.parametrize("name", HOPPER)
def test_hopper_kernels_take_large_strides(name: str, axis: int, stride: int, on_hopper: None, device: str) -> None:
    case = replace(HOPPER[name], dtype=torch.bfloat16)
    inputs = build(case, device)
    run(case, device, q=far(inputs["q"], axis, stride), out=far(inputs["out"], axis, stride))


@pytest.mark.hopper
@pytest.mark.parametrize("elements", [1, 3])
@pytest.mark.parametrize("name", HOPPER)
def test_hopper_kernels_take_any_offset(name: str, elements: int, on_hopper: None, device: str) -> None:
    """All tensors but the caches are shifted: caches at such addresses go to the portable kernels."""
    case = replace(HOPPER[name], dtype=torch.bfloat16, sinks=True, alibi=True)
    inputs = build(case, device)
    tensors = [name for name, given in inputs.items() if isinstance(given, Tensor) and "cache" not in name]
    run(case, device, **{name: offset(inputs[name].contiguous(), elements) for name in tensors})


@pytest.mark.hopper
@pytest.mark.parametrize("name", HOPPER)
def test_hopper_results_may_take_the_place_of_queries(name: str, on_hopper: None, device: str) -> None:
    case = replace(HOPPER[name], dtype=torch.bfloat16)
    inputs = build(case, device)
    want, _ = paged_attn.paged_attention(**inputs)
    q = inputs["q"].clone()
    got, _ = paged_attn.paged_attention(**inputs | {"q": q, "out": q})
    assert torch.equal(as_bytes(got), as_bytes(want))


def test_caches_at_odd_offsets_are_left_to_the_portable_kernels() -> None:
    inputs = build(replace(HOPPER["blocks"], dtype=torch.bfloat16))
    k, v = (offset(inputs[name], 1) for name in ("k_cache", "v_cache"))
    assert layout.rows_per_page(inputs["k_cache"], inputs["v_cache"], "NHD") > 0
    assert layout.rows_per_page(k, v, "NHD") == 0


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    call_cache.clear()


@pytest.mark.parametrize("function", ["write_kv", "write_qkv", "copy_pages", "move_pages", "gather_pages"])
def test_a_kept_call_refuses_tensors_that_overlap_where_the_calls_before_had_others(function: str, device: str) -> None:
    """Shapes and strides are those of the calls before; only the distance of two tensors differs."""
    both = torch.zeros(2, 3, 8, 2, 16, device=device)
    k, v = torch.randn(2, 3, 2, 16, device=device)
    slots, pages = torch.arange(3, device=device), torch.tensor([0], device=device)
    table, lens = torch.zeros(1, 1, dtype=torch.int32, device=device), torch.tensor([3], device=device)

    def call(x: torch.Tensor, y: torch.Tensor) -> None:
        """x, y: caches [2, 8, 2, 16]."""
        if function == "write_kv":
            paged_attn.write_kv(k, v, x, y, slots, check=False)
        elif function == "write_qkv":
            paged_attn.write_qkv((k.clone(), k, v), x, y, slots, check=False)
        elif function == "copy_pages":
            paged_attn.copy_pages([x, y], pages, pages + 1, check=False)
        elif function == "move_pages":
            paged_attn.move_pages([x], [y], pages, pages + 1, check=False)
        else:
            paged_attn.gather_pages(x, table, lens, out=y.view(-1, 2, 16)[:3], check=False)

    for _ in range(3):  # and views of other objects
        call(both[0, :2], both[1, 1:])
        call(both[1, :2], both[0, 1:])
    given = [(both[0, :2], both[0, 1:])]
    if function != "copy_pages":  # whose caches may be one
        given.append((both[0, :2], both[0, :2].view(2, 8, 2, 16)))
    for x, y in given:
        with pytest.raises(ValueError, match=r"share no memory|must not overlap"):
            call(x, y)
    call(both[0, :2], both[1, 1:])


def test_a_kept_call_may_write_the_same_keys_twice(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cache for keys and values, and values that are the keys: both writes store the same bytes."""
    k, cache = torch.randn(3, 2, 16, device=device), torch.zeros(2, 8, 2, 16, device=device)
    slots = torch.arange(3, device=device)
    for _ in range(3):
        paged_attn.write_kv(k, k.view_as(k), cache, cache.view_as(cache), slots, check=False)
    monkeypatch.setattr(writes.checks, "check_write", None)  # a kept call is not checked
    paged_attn.write_kv(k, k.view_as(k), cache, cache.view_as(cache), slots, check=False)
    with pytest.raises(TypeError, match="not callable"):
        paged_attn.write_kv(k, k.clone(), cache, cache.view_as(cache), slots, check=False)
