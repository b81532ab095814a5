"""The quickened interpreter computes what Triton's own does, and fails where that fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, InterpreterError

import paged_attn
from paged_attn.launching import platform, triton_version
from tests.features.test_paged_attention import EVERYTHING, FEW, Cut
from tests.support import replayed
from tests.support.cases import E4M3, Case, bits, build, run
from tests.support.interpreter import PATCHES, READ, is_as_read, quicken

Both = Callable[[Callable[[], Any]], tuple[Any, Any]]

pytestmark = pytest.mark.skipif(not platform.INTERPRET, reason="needs the interpreter")

INVARIANT = Case("invariant", (9, 1), (75, 40), heads=4, head_dim=24, window_size=(37, -1), batch_invariant=True)
CASES = {
    "everything": EVERYTHING,
    "everything, packed, new": replace(EVERYTHING, layout="x", new=True),
    "bf16, fp8 cache": Case("bf16", **FEW, dtype=torch.bfloat16, cache_dtype=E4M3, scales="per_head"),
    "all fp8": Case("fp8", **FEW, dtype=E4M3, cache_dtype=E4M3, out_dtype=E4M3, scales="tensor"),
    "invariant": INVARIANT,
}


def test_all_that_is_replaced_in_a_known_triton_was_read(quick: pytest.MonkeyPatch) -> None:
    quick.undo()
    try:
        assert all(map(is_as_read, READ)) or not triton_version.known()
    finally:
        quicken(quick)
    assert {function for of in PATCHES.values() for function in of} == set(READ)


@pytest.fixture
def both(quick: pytest.MonkeyPatch) -> Both:
    """What a function returns in Triton's interpreter as it comes, and quickened."""

    def both(compute: Callable[[], Any]) -> tuple[Any, Any]:
        quick.undo()
        try:
            plain = compute()
        finally:
            quicken(quick)
        return plain, compute()

    return both


def same(one: Tensor, other: Tensor) -> bool:
    """Bit by bit, what is not a number too."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_calls_give_the_same_bits(case: Case, segments: int, both: Both, cut: Cut) -> None:
    cut(segments, tile=16)
    plain, quick = both(lambda: paged_attn.paged_attention(**build(case)))
    assert all(same(one, other) for one, other in zip(plain, quick, strict=True))


def test_writing_gives_the_same_bits(both: Both) -> None:
    case = Case("write", (3,), (20,), dtype=torch.float16, cache_dtype=E4M3, scales="per_head")

    def written() -> list[Tensor]:
        inputs = build(case)
        k = torch.randn(3, 1, 32, generator=torch.Generator().manual_seed(0))
        scales = {name: inputs[name] for name in ("k_scale", "v_scale")}
        paged_attn.write_kv(k, k + 1, inputs["k_cache"], inputs["v_cache"], torch.tensor([5, -1, 8]), **scales)
        return [bits(inputs["k_cache"]), bits(inputs["v_cache"])]

    assert all(same(*caches) for caches in zip(*both(written), strict=True))


def test_merging_gives_the_same_bits(both: Both) -> None:
    rng = torch.Generator().manual_seed(0)
    outs, lses = torch.randn(3, 5, 2, 24, generator=rng), torch.randn(3, 5, 2, generator=rng)
    lses[1, 2] = -torch.inf
    plain, quick = both(lambda: paged_attn.merge_states(outs, lses))
    assert all(same(one, other) for one, other in zip(plain, quick, strict=True))


@triton.jit
def halve(x, EVEN: tl.constexpr):
    tl.static_assert(EVEN, "odd")
    return x // 2


@triton.jit
def kernel(out, first, EVEN: tl.constexpr):
    at = tl.arange(0, 4)
    tl.store(out + at, halve(first + at, EVEN))


def launched(first: int, even: bool = True) -> list[int] | str:
    """What the kernel stores, or its error."""
    out = torch.zeros(4, dtype=torch.int32)
    try:
        kernel[(1,)](out, first, even)
    except InterpreterError as error:
        return repr(error)
    return out.tolist()


def test_a_helper_that_fails_fails_the_launch_and_no_later_one(both: Both) -> None:
    plain, quick = both(lambda: [launched(2), launched(2, even=False), launched(6)])
    assert plain == quick
    assert "odd" in quick[1]
    assert [quick[0], quick[2]] == [[1, 1, 2, 2], [3, 3, 4, 4]]
    assert all(tl.core.is_builtin(x) for x in (tl.arange, tl.store, tl.tensor.__add__))  # the language is back


def test_nobody_reads_whether_integers_overflow(both: Both) -> None:
    """Sums wrap in either, so nothing is lost where they are not computed twice."""
    plain, quick = both(lambda: launched(2**31 - 2))
    assert plain == quick == [2**30 - 1, 2**30 - 1, -(2**30), -(2**30) + 1]


@triton.jit
def numbers_kernel(out, x, other, NUMBER: tl.constexpr):
    at = tl.arange(0, 2)
    value = tl.load(x + at).to(tl.float32)
    loaded = tl.load(x + at, mask=at < 1, other=tl.load(other)).to(tl.float32)  # Triton's asks whether a number is zero
    tl.store(out + at, value * NUMBER)
    tl.store(out + 2 + at, loaded)
    tl.store(out + 4 + at, (value + NUMBER) * 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_operation_is_worked_out_anew_for_other_numbers_of_the_source_and_other_types(
    dtype: torch.dtype, both: Both
) -> None:
    """Numbers that are equal, but of other types or signs, and an operand on whose value the steps depend."""

    def computed() -> list[Tensor]:
        found = []
        for number in (1, True, 1.0, 0, -0.0, 0.0, 3, 2.5, float("inf")):
            for other in (0, 7):
                out = torch.full((6,), -1.0)
                numbers_kernel[(1,)](
                    out, torch.tensor([-2, 3], dtype=dtype), torch.tensor([other], dtype=dtype), number
                )
                found.append(out)
        return found

    with np.errstate(invalid="ignore"):
        plain, quick = both(computed)
    assert all(same(one, other) for one, other in zip(plain, quick, strict=True))
    assert [x[3].item() for x in quick] == [0, 7] * 9
    assert len({str(x.tolist()) for x in quick[::2]}) >= 5  # 6 where Triton keeps the sign of a zero


@triton.jit
def operands_kernel(out, x):
    at = tl.arange(0, 4)
    one, other = tl.load(x + at), tl.load(x + 4 + at)
    tl.store(out + at, one * one)
    tl.store(out + 4 + at, one * other)
    tl.store(out + 8 + at, tl.where(one > one, one, one) + tl.where(one > other, one, other))


def test_an_operation_that_met_an_operand_twice_takes_two_operands() -> None:
    out, x = torch.zeros(12), torch.tensor([1.0, 2, 3, 4, 4, 3, 2, 1])
    operands_kernel[(1,)](out, x)
    assert out.tolist() == [1, 4, 9, 16, 4, 6, 6, 4, 5, 5, 6, 8]


def test_operations_are_replayed_where_they_can_be(quick: pytest.MonkeyPatch) -> None:
    """Else the suite takes hours: all but a few of a call's operations are known after the first."""
    case = Case("again", (5, 1), (35, 20), lse=False)
    quick.undo()
    quicken(quick)  # which forgets what was recorded
    plans: list[Any] = []
    plain = replayed._recorded

    def recorded(*args: Any) -> Any:
        plan, result = plain(*args)
        plans.append(plan)
        return plan, result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replayed, "_recorded", recorded)
        paged_attn.paged_attention(**build(case))
        assert len(plans) > 100
        assert plans.count(None) <= 2
        plans.clear()
        paged_attn.paged_attention(**build(case))
        assert plans == []


def test_a_function_of_the_builder_that_a_test_replaces_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("a product", (3,), (9,))
    run(case)  # from now on its operations are known
    dot, made = InterpreterBuilder.create_dot, []

    def told(self: Any, *args: Any) -> Any:
        made.append(args)
        return dot(self, *args)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", told)
    run(case)
    assert made
