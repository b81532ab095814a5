"""The reference of writes and of merges: what is written is read back, and parts make the whole."""

from __future__ import annotations

import math

import pytest
import torch

from paged_attn import reference
from tests.support.cases import E4M3, E5M2
from tests.support.one_sequence import attend, paged, random_qkv


@pytest.mark.parametrize("layout", ["NHD", "HND", "x"])
def test_written_keys_are_read_back(layout: str) -> None:
    q, k, v = random_qkv(5, 13)
    pages = paged(torch.zeros_like(k), torch.zeros_like(v), layout=layout)
    pos = torch.arange(13)
    slots = pages["page_table"][0, pos // 4].long() * 4 + pos % 4
    order = torch.randperm(13)
    reference.write_kv(
        k[order], v[order], pages["k_cache"], pages["v_cache"], slots[order], kv_layout=pages["kv_layout"]
    )
    got = reference.paged_attention(q, **pages, seq_lens=torch.tensor([13]), cu_seqlens_q=torch.tensor([0, 5]))
    torch.testing.assert_close(got, attend(q, k, v))


def test_negative_slots_write_nothing() -> None:
    k_cache, v_cache = torch.zeros(2, 3, 2, 1, 4)  # 3 pages of 2 slots
    reference.write_kv(torch.ones(2, 1, 4), torch.ones(2, 1, 4), k_cache, v_cache, torch.tensor([-1, 3]))
    for cache in (k_cache, v_cache):
        assert cache[1, 1].tolist() == [[1, 1, 1, 1]]
        assert cache.sum() == 4


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_fp8_caches_hold_clamped_rounded_quotients(dtype: torch.dtype) -> None:
    k = torch.tensor([[[1.0, 3.1], [1e6, -1e6]]])  # [1 token, 2 heads, 2]
    cache = torch.zeros(2, 1, 1, 2, 2).to(dtype)
    reference.write_kv(k, k, cache[0], cache[1], torch.tensor([0]), k_scale=torch.tensor([2.0, 4.0]), v_scale=0.5)
    limit = torch.finfo(dtype).max
    rounded = {E4M3: (1.5, 6.0), E5M2: (1.5, 6.0)}[dtype]  # 1.55 and 6.2 to 4 or 3 significant bits
    assert cache[0].float().flatten().tolist() == [0.5, rounded[0], limit, -limit]
    assert cache[1].float().flatten().tolist() == [2.0, rounded[1], limit, -limit]


def test_merged_parts_equal_the_whole() -> None:
    q, k, v = random_qkv(1, 12)
    parts = [attend(q, k[a:b], v[a:b], causal=False, return_lse=True) for a, b in ((0, 5), (5, 6), (6, 12))]
    outs, lses = torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])
    torch.testing.assert_close(reference.merge_states(outs, lses), attend(q, k, v, return_lse=True))
    first = reference.merge_states(outs[:2], lses[:2])
    both = torch.stack([first[0], outs[2]]), torch.stack([first[1], lses[2]])
    torch.testing.assert_close(reference.merge_states(*both), reference.merge_states(outs, lses))


def test_empty_parts_count_for_nothing() -> None:
    outs = torch.tensor([torch.nan, 3.0, 0.0]).reshape(3, 1, 1, 1).expand(3, 1, 1, 2)
    lses = torch.tensor([-torch.inf, 1.0, -torch.inf]).reshape(3, 1, 1)
    out, lse = reference.merge_states(outs, lses)
    assert out.tolist() == [[[3.0, 3.0]]]
    assert lse.item() == 1.0
    out, lse = reference.merge_states(outs[::2], lses[::2])
    assert out.tolist() == [[[0.0, 0.0]]]
    assert lse.item() == -math.inf


@pytest.mark.parametrize("base", [0.0, -1e30, 1e30, -1e300, 3e38])
def test_states_of_equal_and_extreme_log_sum_exps_are_the_mean(base: float) -> None:
    outs = torch.tensor([1.0, 5.0], dtype=torch.float64)[:, None, None, None]
    out, lse = reference.merge_states(outs, torch.full((2, 1, 1), base, dtype=torch.float64))
    assert out.item() == 3.0
    assert lse.item() == base + math.log(2)


@pytest.mark.parametrize(
    ("lses", "weights", "lse"),
    [
        ((0.0, math.log(3)), (0.25, 0.75), math.log(4)),
        ((-math.inf, -1e30), (0.0, 1.0), -1e30),
        ((-math.inf, -math.inf), (0.0, 0.0), -math.inf),
        ((math.inf, 7.0), (0.0, 0.0), math.inf),
        ((math.inf, math.inf), (0.0, 0.0), math.inf),
        ((1e30, 0.0), (1.0, 0.0), 1e30),
    ],
)
def test_states_at_their_ends(lses: tuple[float, float], weights: tuple[float, float], lse: float) -> None:
    outs = torch.eye(2, dtype=torch.float64)[:, None, None]
    got, got_lse = reference.merge_states(outs, torch.tensor(lses, dtype=torch.float64)[:, None, None])
    torch.testing.assert_close(got.flatten(), torch.tensor(weights, dtype=torch.float64))
    assert got_lse.item() == pytest.approx(lse, rel=1e-15)
