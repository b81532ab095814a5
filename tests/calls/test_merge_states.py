"""merge_states: joins partial results over disjoint keys; empty parts, order and grouping do not matter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paged_attn import merge_states, reference
from tests.support.cases import TOLERANCES

INF = torch.inf
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def parts(
    n: int, device: str, dtype: torch.dtype = torch.float32, dim: int = 24, empty: float = 0.3
) -> tuple[Tensor, Tensor]:
    """n results of 5 tokens x 3 heads; about a share `empty` of them saw no key, and hold NaN."""
    rng = torch.Generator().manual_seed(n)
    outs = torch.randn(n, 5, 3, dim, generator=rng)
    lses = 3 * torch.randn(n, 5, 3, generator=rng)
    gone = torch.rand(n, 5, 3, generator=rng) < empty
    outs[gone], lses[gone] = torch.nan, -INF
    return outs.to(device, dtype), lses.to(device)


def check_close(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], dtype: torch.dtype = torch.float32) -> None:
    """out to the rounding of its type (a mean of numbers below 5), lse to that of float32."""
    compute, store = TOLERANCES[dtype]
    torch.testing.assert_close(got[0].double(), want[0].double(), rtol=compute + store, atol=5 * store)
    torch.testing.assert_close(got[1].double(), want[1].double(), rtol=1e-6, atol=1e-6)


# 1: nothing to merge; 8: what the kernel loads at once; 9: one more; 40: many times that
@pytest.mark.parametrize("n", [1, 2, 8, 9, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merging_is_the_reference(n: int, dtype: torch.dtype, device: str) -> None:
    outs, lses = parts(n, device, dtype)
    out, lse = merge_states(outs, lses)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    check_close((out, lse), reference.merge_states(outs, lses), dtype)


@pytest.mark.parametrize("dim", [1, 16, 80, 256])
def test_every_head_dim(dim: int, device: str) -> None:
    outs, lses = parts(3, device, dim=dim)
    check_close(merge_states(outs, lses), reference.merge_states(outs, lses))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_part_is_itself(dtype: torch.dtype, device: str) -> None:
    outs, lses = parts(1, device, dtype, empty=0)
    out, lse = merge_states(outs, lses)
    assert torch.equal(out, outs[0])
    torch.testing.assert_close(lse, lses[0], rtol=1e-6, atol=1e-6)


def test_grouping_does_not_matter(device: str) -> None:
    outs, lses = parts(6, device)

    def of(*states: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return merge_states(torch.stack([out for out, _ in states]), torch.stack([lse for _, lse in states]))

    s = list(zip(outs, lses, strict=True))
    whole = merge_states(outs, lses)
    check_close(of(of(s[0], s[1], s[2]), of(s[3], s[4], s[5])), whole)
    check_close(of(s[0], of(s[1], of(s[2], of(s[3], of(s[4], s[5]))))), whole)


def test_order_does_not_matter(device: str) -> None:
    outs, lses = parts(6, device)
    check_close(merge_states(outs.flip(0), lses.flip(0)), merge_states(outs, lses))


def test_an_empty_part_changes_nothing(device: str) -> None:
    outs, lses = parts(2, device, empty=0)
    want = merge_states(outs, lses)
    nothing = torch.full_like(outs[:1], torch.nan), torch.full_like(lses[:1], -INF)
    for at in range(3):
        some_outs = torch.cat([outs[:at], nothing[0], outs[at:]])
        some_lses = torch.cat([lses[:at], nothing[1], lses[at:]])
        out, lse = merge_states(some_outs, some_lses)
        assert torch.equal(out, want[0])
        assert torch.equal(lse, want[1])


@pytest.mark.parametrize("garbage", [torch.nan, INF, -INF, 3.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_empty_part_may_hold_anything(dtype: torch.dtype, garbage: float, device: str) -> None:
    outs, lses = parts(3, device, dtype, empty=0)
    lses[1] = -INF
    outs[1] = garbage
    check_close(merge_states(outs, lses), reference.merge_states(outs[::2], lses[::2]), dtype)


@pytest.mark.parametrize("n", [1, 2, 20])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_empty_parts_alone_give_zero_and_minus_infinity(dtype: torch.dtype, n: int, device: str) -> None:
    outs = torch.full((n, 2, 3, 32), torch.nan, dtype=dtype, device=device)
    out, lse = merge_states(outs, torch.full((n, 2, 3), -INF, device=device))
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -INF))


@pytest.mark.parametrize("n", [1, 3, 20])
def test_a_sink_of_infinity_takes_all_weight(n: int, device: str) -> None:
    """One part or more has the sink; heads without a sink are as before."""
    outs, lses = parts(n, device)
    before = merge_states(outs, lses)
    outs[n // 2, :, 1::2], lses[n // 2, :, 1::2] = 0, INF
    outs[-1, :, 1::4], lses[-1, :, 1::4] = 0, INF
    out, lse = merge_states(outs, lses)
    check_close((out, lse), reference.merge_states(outs, lses))
    assert not out[:, 1::2].any()
    assert (lse[:, 1::2] == INF).all()
    assert torch.equal(out[:, ::2], before[0][:, ::2])


def test_equal_parts_share_equally(device: str) -> None:
    outs = torch.tensor([1.0, 3.0, 8.0], device=device)[:, None, None, None].expand(3, 1, 1, 16)
    out, lse = merge_states(outs, torch.full((3, 1, 1), 5.0, device=device))
    torch.testing.assert_close(out, torch.full_like(out, 4.0))
    torch.testing.assert_close(lse, torch.full_like(lse, 5.0) + torch.tensor(3.0).log().item())


# scores of hundreds: exp of either overflows or vanishes in float32, only their difference counts
@pytest.mark.parametrize("base", [-1000.0, 1000.0])
def test_large_scores_do_not_overflow(base: float, device: str) -> None:
    outs = torch.tensor([1.0, -1.0], device=device)[:, None, None, None].expand(2, 1, 1, 16)
    lses = torch.tensor([base, base + 2.0], device=device)[:, None, None]
    out, lse = merge_states(outs, lses)
    torch.testing.assert_close(out, torch.full_like(out, -torch.tensor(1.0).tanh().item()), rtol=1e-3, atol=0)
    torch.testing.assert_close(lse, torch.full_like(lse, base + 2.126928), rtol=1e-6, atol=0)


def test_a_far_greater_part_wins(device: str) -> None:
    outs, lses = parts(2, device, empty=0)
    lses[1] = lses[0] + 200
    out, lse = merge_states(outs, lses)
    torch.testing.assert_close(out, outs[1], rtol=3e-7, atol=0)  # a GPU's float32 division is good to 2 ulp
    torch.testing.assert_close(lse, lses[1], rtol=1e-6, atol=1e-6)


def test_parts_may_have_any_strides(device: str) -> None:
    outs, lses = parts(4, device)
    want = merge_states(outs, lses)
    tokens_first = outs.transpose(0, 1).contiguous().transpose(0, 1), lses.transpose(0, 2).contiguous().transpose(0, 2)
    for got, expected in zip(merge_states(*tokens_first), want, strict=True):
        assert torch.equal(got, expected)


def test_no_tokens(device: str) -> None:
    out, lse = merge_states(torch.empty(2, 0, 3, 16, device=device), torch.empty(2, 0, 3, device=device))
    assert (out.shape, lse.shape) == ((0, 3, 16), (0, 3))


def test_the_parts_stay_as_they_were(device: str) -> None:
    outs, lses = parts(3, device, empty=0)
    before = outs.clone(), lses.clone()
    merge_states(outs, lses)
    assert torch.equal(outs, before[0])
    assert torch.equal(lses, before[1])


@pytest.mark.parametrize("base", [0.0, 3e4, -3e4, 1e6, 1e30, -1e30, 3e38, -3e38])
def test_weights_are_those_of_the_differences_however_large_log_sum_exps_are(base: float, device: str) -> None:
    """One third and two thirds, where the numbers can differ by ln 2; otherwise a half each."""
    lses = torch.tensor([base, base + 0.693147181], device=device)
    share = torch.softmax(lses.double(), 0)[1].item()
    outs = torch.tensor([0.0, 3.0], device=device)[:, None, None, None].expand(2, 1, 1, 16)
    out, lse = merge_states(outs, lses[:, None, None])
    torch.testing.assert_close(out, torch.full_like(out, 3 * share), rtol=1e-6, atol=0)
    torch.testing.assert_close(lse.item(), torch.logsumexp(lses.double(), 0).item(), rtol=2e-7, atol=2e-7)


@pytest.mark.parametrize("base", [3e4, -3e4, 1e6])
def test_merging_large_log_sum_exps_is_the_reference(base: float, device: str) -> None:
    outs, lses = parts(9, device)
    check_close(merge_states(outs, lses + base), reference.merge_states(outs, lses + base))
