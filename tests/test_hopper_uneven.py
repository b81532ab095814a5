"""Uneven queries on Hopper: in two lists, as blocks alone or in two launches, by what a batch waits for."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from paged_attn.hopper import plan as hopper
from tests.test_hopper_plan import MIXED, even

E4M3_CACHE: dict[str, Any] = dict(cache=torch.float8_e4m3fn, compute=torch.float16)
ALL_E4M3: dict[str, Any] = dict(query=torch.float8_e4m3fn, cache=torch.float8_e4m3fn)
UNEVEN = {
    "decodes beside a prefill": (MIXED, "mixed"),
    "mostly long ones, of as many queries as keys": (MIXED._replace(tokens=64 * 128, max_seqlen_q=4096), "blocks"),
    "of half as many": (MIXED._replace(tokens=64 * 256), "blocks"),
    "one token less": (MIXED._replace(tokens=64 * 256 - 1), "mixed"),
    "one long among decodes of more keys": (
        MIXED._replace(tokens=8255, max_seqlen_q=8192, max_seqlen_k=32768),
        "mixed",
    ),
    "little to read": (MIXED._replace(max_seqlen_k=500), "blocks"),
    "as little in fp8": (MIXED._replace(max_seqlen_k=1000, **E4M3_CACHE), "blocks"),
    "small heads": (MIXED._replace(head_dim=64), "mixed"),
    "large heads": (MIXED._replace(head_dim=256), "blocks"),
    "a token of 16 rows": (MIXED._replace(heads=128), "blocks"),
    "over e4m3, which is converted": (MIXED._replace(**E4M3_CACHE), "3.. 0..2"),
    "over e4m3, a token of 16 rows": (MIXED._replace(heads=128, **E4M3_CACHE), "2.. 0..1"),
    "over e4m3, no decodes": (MIXED._replace(only="prefill", **E4M3_CACHE), "3.. 2..2"),
    "over e4m3, no decodes, a token of 8 rows": (MIXED._replace(only="prefill", heads=64, **E4M3_CACHE), "blocks"),
    "over e4m3, small heads": (MIXED._replace(head_dim=64, **E4M3_CACHE), "3.. 0..2"),
    "over e4m3, mostly long ones": (MIXED._replace(tokens=9000, max_seqlen_q=9000, **E4M3_CACHE), "blocks"),
    "all of e4m3": (MIXED._replace(**ALL_E4M3), "mixed"),
    "all of e4m3, small heads": (MIXED._replace(head_dim=64, **ALL_E4M3), "mixed"),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_queries_are_two_lists_or_one_or_two_launches(name: str) -> None:
    """Whichever list or launch serves a sequence, one does."""
    call, expected = UNEVEN[name]
    launches = hopper.launches(call)
    served = sorted((x.shortest, x.longest) for x in launches)
    assert served[0][0] == (2 if call.only == "prefill" else 0)
    assert served[-1][1] == hopper.UNBOUNDED
    assert all(before[1] + 1 == after[0] for before, after in itertools.pairwise(served))
    blocks, *shares = launches
    assert [x.pipe.SHARES for x in launches] == [False] + [True] * len(shares)
    assert (call.only is None) == blocks.shape.CLEAR
    assert not any(x.shape.CLEAR for x in shares), "once is enough"
    if shares:
        assert f"{blocks.shortest}.. {shares[0].shortest}..{shares[0].longest}" == expected
        assert shares[0].longest * call.heads // call.kv_heads <= shares[0].pipe.COLUMNS
    else:
        assert ("mixed" if blocks.pipe.MIXED else "blocks") == expected


def test_long_sequences_of_uneven_batches_may_be_cut() -> None:
    """One that decodes may have as many keys as all others, and no other blocks."""
    for keys, may in ((4096, False), (5000, True)):
        call = MIXED._replace(tokens=64 * 1000, max_seqlen_q=5000, max_seqlen_k=keys)
        (launch,) = hopper.launches(call)
        assert may == launch.shape.SPLIT
        (launch,) = hopper.launches(call._replace(alibi=True))
        assert (1 if may else 3) == launch.pipe.CONSUMERS, "three would be too much code with what is cut"
    (launch,) = hopper.launches(even(64, 200, 5000))
    assert not launch.shape.SPLIT


def test_what_the_host_does_not_know_is_taken_for_likely() -> None:
    """Without bounds one sequence may have all queries; on average they have not."""
    call = even(64, 12800, 2048)._replace(tokens=12800)
    (launch,) = hopper.launches(call)
    assert (launch.pipe.CONSUMERS, launch.pipe.ROWS) == (1, 128), "no copies for queries of 200 tokens"
    (launch,) = hopper.launches(call._replace(head_dim=64, tokens=64 * 40, max_seqlen_q=64 * 40, max_seqlen_k=500))
    assert launch.pipe.ROWS == 128, "blocks of four warpgroups would be half empty"
    assert hopper.few(MIXED._replace(heads=512, seqs=4, **E4M3_CACHE), 0, 1).least == 4, (
        "a sequence has one block of few"
    )
