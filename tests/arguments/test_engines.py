"""Arguments as engines hold them: scales of any shape, integers of 32 and of 64 bits; as they are, without a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import paged_attn
from paged_attn import reference
from tests.support.bad_input import as_bytes, refuses
from tests.support.cases import E4M3, Case, build, run

FP8 = Case(
    "fp8", (1, 4, 1), (9, 20, 0), heads=4, kv_heads=4, dtype=E4M3, out_dtype=E4M3, page_size=8, scales="per_head"
)
PLAIN = Case("plain", (1, 5, 0), (20, 33, 0), heads=4, kv_heads=4, page_size=8, padding=2)
DECODE = Case("decode", (1, 1, 1), (20, 9, 0), heads=4, kv_heads=2, page_size=8, decode_form=True)
SEQS = len(FP8.seq_lens)

# What becomes of scales [kv_heads], and whether each head keeps its own.
SHAPES: dict[str, tuple[bool, Callable[[Tensor], Tensor]]] = {
    "0-dim": (False, lambda x: x[1]),
    "[1]": (False, lambda x: x[1:2]),
    "[1, 1]": (False, lambda x: x[1:2, None]),
    "[kv_heads]": (True, lambda x: x.clone()),
    "[1, kv_heads]": (True, lambda x: x[None]),
    "every second": (True, lambda x: torch.stack([x, x + 1], 1)[:, 0]),
    "0-dim expanded to [kv_heads]": (False, lambda x: x[1].expand(4)),
    "0-dim expanded to [seqs, kv_heads]": (False, lambda x: x[1].expand(SEQS, 4)),
    "[kv_heads] expanded to [seqs, kv_heads]": (True, lambda x: x.expand(SEQS, 4)),
    "[kv_heads] repeated to [seqs, kv_heads]": (True, lambda x: x.repeat(SEQS, 1)),
}
NAMES = ("q_scale", "k_scale", "v_scale")


def bits_of(inputs: dict[str, Any]) -> Tensor:
    out, lse = paged_attn.paged_attention(**inputs | {"out": torch.zeros_like(inputs["out"])})
    return torch.cat([as_bytes(out), as_bytes(lse)])


@pytest.mark.parametrize("shape", SHAPES)
def test_scales_of_every_shape_are_the_numbers_they_hold(shape: str, device: str) -> None:
    own, of = SHAPES[shape]
    inputs = build(FP8, device)
    plain = {name: inputs[name] if own else inputs[name][1:2] for name in NAMES}
    given = {name: of(inputs[name]) for name in NAMES} | {"out_scale": inputs["out_scale"][0]}
    assert torch.equal(bits_of(inputs | given), bits_of(inputs | plain))
    run(FP8, device, **(inputs | given))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_reference_takes_scales_of_every_shape(shape: str, device: str) -> None:
    own, of = SHAPES[shape]
    inputs = build(FP8, device)
    plain = {name: inputs[name] if own else float(inputs[name][1]) for name in NAMES}
    given = {name: of(inputs[name]) for name in NAMES} | {"out_scale": inputs["out_scale"][0]}
    results = [reference.paged_attention(**inputs | changed | {"out": None}) for changed in (given, plain)]
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [name for name in SHAPES if "seqs" not in name])
def test_write_kv_takes_scales_of_every_shape(shape: str, device: str) -> None:
    _, of = SHAPES[shape]
    numbers = torch.tensor([0.5, 2.0, 0.25, 4.0], device=device)
    k, v = torch.randn(2, 5, 4, 32, device=device)
    slots = torch.tensor([0, 9, -1, 3, 17], device=device)
    caches = [torch.zeros(2, 3, 8, 4, 32, dtype=E4M3, device=device) for _ in range(2)]
    scales = dict(k_scale=of(numbers), v_scale=of(numbers.flip(0)))
    paged_attn.write_kv(k, v, *caches[0], slots, **scales)
    reference.write_kv(k, v, *caches[1], slots, **scales)
    assert torch.equal(as_bytes(caches[0]), as_bytes(caches[1]))


def test_a_kept_call_reads_scales_where_they_are_now(device: str) -> None:
    for scale in torch.rand(3, device=device) + 0.5:  # made, found by its signature, then by its guard
        run(FP8, device, **dict.fromkeys(NAMES, scale))


INTEGERS = ("page_table", "seq_lens", "cu_seqlens_q")
WIDE = [("page_table",), ("seq_lens",), ("cu_seqlens_q",), INTEGERS]


def widened(inputs: dict[str, Any], wide: tuple[str, ...]) -> dict[str, Any]:
    return inputs | {name: inputs[name].long() for name in wide if name in inputs}


@pytest.mark.parametrize("wide", WIDE, ids=" and ".join)
@pytest.mark.parametrize("case", [PLAIN, DECODE], ids=str)
def test_integers_of_64_bits_give_the_bits_of_32(case: Case, wide: tuple[str, ...], device: str) -> None:
    inputs = build(case, device)
    assert torch.equal(bits_of(widened(inputs, wide)), bits_of(inputs))


@pytest.mark.parametrize("segments", [1, 3])
def test_integers_of_64_bits_where_keys_are_cut(segments: int, cut: Callable[..., None], device: str) -> None:
    cut(segments, 16)
    run(PLAIN, device, **(widened(build(PLAIN, device), INTEGERS)))


def test_a_table_of_64_bits_may_end_in_anything(device: str) -> None:
    inputs = widened(build(PLAIN, device), INTEGERS)
    table = inputs["page_table"]
    table[table > 2**30] = 2**62 + 5
    run(PLAIN, device, **inputs)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_slots_of_both_widths_are_written(dtype: torch.dtype, device: str) -> None:
    k, v = torch.randn(2, 5, 4, 32, device=device)
    slots = torch.tensor([0, 9, -1, 3, 17], device=device, dtype=dtype)
    ours, theirs = torch.zeros(2, 2, 3, 8, 4, 32, device=device)
    paged_attn.write_kv(k, v, *ours, slots, check=True)
    reference.write_kv(k, v, *theirs, slots)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("length", [2**31, 2**32 + 5, -(2**32) + 5])
def test_a_checked_call_refuses_lengths_beyond_32_bits(length: int, device: str) -> None:
    inputs = widened(build(PLAIN, device), INTEGERS)
    inputs["seq_lens"][1] = length
    text = f"seq_lens[1] = {length}, but lengths must fit 32 bits"
    refuses(paged_attn.paged_attention, inputs | {"check": True}, ValueError, text)


@pytest.mark.parametrize("page", [2**32 + 1, -(2**32)])
def test_a_checked_call_refuses_pages_beyond_32_bits(page: int, device: str) -> None:
    inputs = widened(build(PLAIN, device), INTEGERS)
    inputs["page_table"][1, 1] = page
    pages = len(inputs["k_cache"])
    text = f"page_table[1, 1] = {page}, but the cache has {pages} pages"
    refuses(paged_attn.paged_attention, inputs | {"check": True}, ValueError, text)


HOPPER = {
    "decodes": Case(
        "decodes", (1,) * 5, (300, 9, 1000, 64, 1), heads=8, kv_heads=2, head_dim=64, dtype=torch.bfloat16,
        decode_form=True,
    ),
    "mixed": Case(
        "mixed", (1, 200, 1, 70), (90, 300, 33, 70), heads=8, kv_heads=2, head_dim=64, dtype=torch.bfloat16, padding=2
    ),
    "all fp8": Case(
        "all fp8", (1, 100, 3), (90, 300, 33), heads=8, kv_heads=4, head_dim=64, dtype=E4M3, scales="per_head"
    ),
}  # fmt: skip


@pytest.mark.hopper
@pytest.mark.parametrize("name", HOPPER)
def test_hopper_kernels_take_what_engines_hold(name: str, on_hopper: None, device: str) -> None:
    case = HOPPER[name]
    inputs = widened(build(case, device), INTEGERS)
    for scale in NAMES:
        if scale in inputs:
            inputs[scale] = inputs[scale].expand(len(case.seq_lens), case.kv_heads)
    run(case, device, **inputs)
