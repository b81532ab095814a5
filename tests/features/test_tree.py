"""Trees of drafts, each sequence's own: bits of each query, made of parents; a bias of each sequence."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import paged_attn
from paged_attn import reference
from tests.explain.asked import ask
from tests.support.cases import BAD_PAGE, E4M3, Case, build, compare, run
from tests.support.one_sequence import attend, random_qkv
from tests.support.trees import assert_branches, bias_of, depths, path_to, random_tree

FP16, BF16 = torch.float16, torch.bfloat16
Cut = Callable[..., None]
# decodes, drafts, more queries than bits, a prefill; sequences that are empty or shorter than their queries
LENGTHS: dict[str, Any] = dict(
    query_lens=(1, 5, 0, 40, 3, 20), seq_lens=(70, 33, 9, 90, -2, 20), heads=4, kv_heads=2, qq_mask=1
)
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding, strided": {"padding": 3, "strided": True},
    "two words": {"qq_mask": 2},
    "not causal": {"causal": False},
    "window, sinks": {"window_size": (9, -1), "sinks": True},
    "window both ways": {"window_size": (5, 3), "causal": False},
    "depths, window, alibi": {"window_size": (9, -1), "alibi": True, "positions": "tree"},
    "chunk": {"chunk": 16},
    "spans": {"spans": 2},
    "a prefix behind a window": {"prefix": 6, "window_size": (9, -1)},
    "causal by sequence": {"causal_by_seq": True},
    "softcap, alibi, gate": {"softcap": 3.0, "alibi": True, "gate": True},
    "a bias besides": {"qq_bias": 16},
    "a user's function": {"score_mod": "relative"},
    "scales of tokens": {"token_scales": True},
    "new": {"new": True},
    "new, x, two words": {"new": True, "layout": "x", "qq_mask": 2},
    "hnd, page 24": {"layout": "HND", "page_size": 24},
    "float16": {"dtype": FP16},
    "fp8 cache": {"dtype": FP16, "cache_dtype": E4M3, "scales": "per_head"},
    "fp8": {"dtype": E4M3, "scales": "tensor", "out_dtype": E4M3},
    "invariant": {"batch_invariant": True, "sinks": True},
    "a latent cache": {"latent": True, "value_dim": 16, "kv_heads": 1},
    "prefills only": {"only": "prefill", "padding": 2},
    "no lse": {"lse": False},
    "a bias of each sequence": {"qq_mask": 0, "qq_bias": 16, "tree": True, "bias_of_seqs": True},
    "a bias of each sequence, window, new": {
        "qq_mask": 0, "qq_bias": 30, "tree": True, "bias_of_seqs": True, "window_size": (9, -1), "new": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FEATURES)
def test_features(name: str, device: str, cut: Cut) -> None:
    for segments in (1, 3):
        cut(segments)
        run(Case(name, **LENGTHS | FEATURES[name]), device)


def test_plans_as_they_are_take_masks_and_a_bias_of_each_sequence(device: str) -> None:
    run(Case("masks", **LENGTHS), device)
    run(Case("biases", **LENGTHS | FEATURES["a bias of each sequence"]), device)


# ---- what it means ---------------------------------------------------------------------------------


def test_the_reference_shows_a_query_the_keys_of_its_bits() -> None:
    q, k, v = random_qkv(3, 40, 2)
    mask = torch.tensor([[0b001], [0b010], [0b101]], dtype=torch.int32)
    want = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 0, 1]], dtype=torch.bool)
    bias = torch.zeros(3, 3, dtype=q.dtype).masked_fill(~want, -torch.inf)
    torch.testing.assert_close(attend(q, k, v, qq_mask=mask), attend(q, k, v, qq_bias=bias))


def test_the_last_bit_of_a_word_is_one_like_others(device: str) -> None:
    """Of 32 bits in an int32 it is the sign."""
    case = Case("sign", (34,), (50,), heads=4, kv_heads=2, causal=False)
    inputs = build(case, device)
    for bit in (30, 31, 32, 33):
        mask = torch.zeros(34, 2, dtype=torch.int32, device=device)
        mask[:, bit // 32] = -(2**31) if bit == 31 else 1 << bit % 32
        given = inputs | {"qq_mask": mask}
        compare(case, *paged_attn.paged_attention(**given), given)
        bias = torch.full((34, 34), -torch.inf, device=device)
        bias[:, bit] = 0
        wanted, _ = reference.paged_attention(**inputs | {"out": None, "qq_bias": bias})
        got, _ = reference.paged_attention(**given | {"out": None})
        assert torch.equal(got, wanted)


def test_keys_behind_the_bits_are_seen_as_without_them(device: str) -> None:
    """All bits set, or none of them: nothing changes, and nothing but the first 32 keys of the call is hidden."""
    case = Case("behind", (100,), (130,), heads=4, kv_heads=2)
    inputs = build(case, device)
    ones = torch.full((100, 1), -1, dtype=torch.int32, device=device)
    got = [x.clone() for x in paged_attn.paged_attention(**inputs, qq_mask=ones)]
    torch.testing.assert_close(got, list(paged_attn.paged_attention(**inputs)))
    given = inputs | {"qq_mask": ones * 0}
    compare(case, *paged_attn.paged_attention(**given), given)


@pytest.mark.parametrize("words", [1, 2])
def test_a_query_that_sees_nothing_gives_zeros(words: int, device: str, cut: Cut) -> None:
    for segments in (1, 3):
        cut(segments)
        case = Case("blind", (9,), (9,), heads=4, kv_heads=2, lse=False)
        given = build(case, device) | {"qq_mask": torch.zeros(9, words, dtype=torch.int32, device=device)}
        assert (paged_attn.paged_attention(**given) == 0).all()


# ---- trees -----------------------------------------------------------------------------------------


def of_parents(trees: list[list[int]], padding: int = 0) -> torch.Tensor:
    return torch.tensor([x for tree in trees for x in tree] + [BAD_PAGE] * padding, dtype=torch.int32)


@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
@pytest.mark.parametrize("nodes", [1, 7, 32, 33, 64, 100])
def test_a_tree_shows_ancestors_and_stands_at_depths(nodes: int, integers: torch.dtype, device: str) -> None:
    rng = random.Random(nodes)
    sizes = [nodes, 0, 1, max(1, nodes // 2), nodes]
    trees = [list(random_tree(rng, n)) for n in sizes]
    trees[-1] = list(range(-1, nodes - 1))  # as deep as can be
    starts = torch.tensor([0, *sizes]).cumsum(0).to(device, integers)
    lens = torch.tensor([n + 10 * i for i, n in enumerate(sizes)], device=device, dtype=integers)
    got = paged_attn.tree(of_parents(trees, 3).to(device, integers), lens, starts, nodes=nodes)
    assert (got.qq_mask.dtype, got.query_positions.dtype) == (torch.int32, torch.int32)
    assert got.qq_mask.shape == (sum(sizes) + 3, -(-nodes // 32))
    token = 0
    for seq, parents in enumerate(trees):
        for node in range(len(parents)):
            row = got.qq_mask[token].tolist()
            seen = [j for j in range(32 * len(row)) if row[j // 32] >> j % 32 & 1]
            assert seen == path_to(parents, node)
            assert got.query_positions[token] == 10 * seq + depths(parents)[node]
            token += 1


def test_sequences_of_more_queries_than_nodes_are_plain(device: str) -> None:
    starts, lens = torch.tensor([0, 40, 44], device=device), torch.tensor([60, 30], device=device)
    parents = torch.cat([torch.full((40,), BAD_PAGE), torch.tensor([-1, 0, 0, 1])]).to(device)
    got = paged_attn.tree(parents, lens, starts, nodes=8)
    assert (got.qq_mask[:40] == -1).all()
    assert got.query_positions[:40].tolist() == list(range(20, 60))
    assert got.qq_mask[40:].flatten().tolist() == [0b1, 0b11, 0b101, 0b1011]
    assert got.query_positions[40:].tolist() == [26, 27, 27, 28]


@pytest.mark.parametrize("alibi", [False, True], ids=["", "alibi"])
@pytest.mark.parametrize("window", [(-1, -1), (11, -1), (3, -1)], ids=str)
def test_every_branch_is_a_plain_sequence(window: tuple[int, int], alibi: bool, device: str, cut: Cut) -> None:
    for seed in range(2):
        cut(segments=1 + 2 * seed)
        parents = list(random_tree(random.Random(f"{window} {seed}"), 9))
        case = Case("tree", (9, 5, 9), (40, 30, 9), heads=4, kv_heads=2, window_size=window, alibi=alibi, seed=seed)
        inputs = build(case, device)
        drafts = of_parents([parents, parents[:5], parents]).to(device)
        tree = paged_attn.tree(drafts, inputs["seq_lens"], inputs["cu_seqlens_q"], nodes=9)
        out, _ = paged_attn.paged_attention(**inputs, **tree._asdict(), check=True)
        assert_branches(out, inputs, parents)


def test_trees_of_their_own_are_those_of_a_bias_of_each_sequence(device: str, cut: Cut) -> None:
    cut(3)
    rng = random.Random(5)
    sizes = (12, 7, 1, 12)
    trees = [list(random_tree(rng, n)) for n in sizes]
    case = Case("own", sizes, (40, 60, 33, 12), heads=4, kv_heads=2)
    inputs = build(case, device)
    tree = paged_attn.tree(of_parents(trees).to(device), inputs["seq_lens"], inputs["cu_seqlens_q"])
    bias = torch.zeros(4, 12, 12)
    for seq, parents in enumerate(trees):
        bias[seq, : len(parents), : len(parents)] = bias_of(parents)
    by_mask = [x.clone() for x in paged_attn.paged_attention(**inputs, qq_mask=tree.qq_mask)]
    by_bias = paged_attn.paged_attention(**inputs, qq_bias=bias.to(device))
    for got, wanted in zip(by_mask, by_bias):
        # float32: beside a bias scores are scaled by themselves, beside bits together with their exponents
        torch.testing.assert_close(got, wanted, atol=2e-6, rtol=2e-6)


def test_a_tree_has_the_same_bits_alone_and_in_a_batch(device: str) -> None:
    case = Case("batch", **LENGTHS, batch_invariant=True, window_size=(6, -1))
    inputs = build(case, device)
    out, _ = paged_attn.paged_attention(**inputs)
    token = 0
    for seq, queries in enumerate(case.query_lens):
        rows = slice(token, token + queries)
        one = {name: inputs[name][rows] for name in ("q", "qq_mask")}
        one |= {name: inputs[name][seq : seq + 1] for name in ("seq_lens", "page_table")}
        one |= {"cu_seqlens_q": torch.tensor([0, queries], dtype=torch.int32, device=device), "out": None}
        alone, _ = paged_attn.paged_attention(**inputs | one)
        assert torch.equal(alone, out[rows])
        token += queries


def test_a_call_again_takes_another_mask(device: str) -> None:
    case = Case("again", **LENGTHS, lse=False)
    inputs = build(case, device)
    for seed in range(4):
        mask = build(replace(case, seed=seed), device)["qq_mask"]
        given = inputs | {"qq_mask": mask if seed < 3 else None}
        compare(case, paged_attn.paged_attention(**given), None, given)


def test_the_operator_takes_a_mask(device: str) -> None:
    case = Case("operator", **LENGTHS, lse=False)
    inputs = {name: x for name, x in build(case, device).items() if name != "return_lse"}
    torch.ops.paged_attn.attention(**inputs)
    compare(case, inputs["out"], None, inputs)


def test_no_plan_depends_on_a_mask() -> None:
    options = dict(queries="8", keys="4096", batch=4)
    assert ask(**options, qq_mask=2).problem == ask(**options).problem


@pytest.mark.parametrize("given, text", [
    (dict(nodes=0), "nodes must be an int >= 1 and < 2^31, got 0"),
    (dict(nodes=1025), "nodes must be at most 1024, got 1025: sequences of more queries are prefills"),
    (dict(parents=torch.zeros(3, 1, dtype=torch.int32)), "parents must be [tokens], got [3, 1]: parents.squeeze(1)"),
    *[
        (dict(parents=torch.tensor(parents)), f"parents[{i}] = {parents[i]} (sequence 0, query {i}) must be -1 or the "
         "number of a query before its own")
        for parents, i in (
            ([-1, 1, 0], 1), ([0, 0, 1], 0), ([-1, 0, 2**40], 2), ([-1, -2, 0], 1), ([-1, 2, 0], 1),
            ([-1, 0, 2**63 - 1], 2),
        )
    ],
    (dict(cu_seqlens_q=torch.tensor([1, 3])), "cu_seqlens_q[0] = 1, but it must be 0"),
    (dict(cu_seqlens_q=torch.tensor([0, 4])), "cu_seqlens_q[1] = 4, but q has tokens = 3"),
    (dict(parents=torch.tensor([-1, 0, 1]), seq_lens=torch.tensor([0])),
     "seq_lens[0] = 0, but sequence 0 has 3 query tokens, which count too"),
])  # fmt: skip
def test_what_is_no_tree_is_refused(given: dict[str, Any], text: str) -> None:
    call: dict[str, Any] = dict(
        parents=torch.zeros(3, dtype=torch.int32), seq_lens=torch.tensor([3]), cu_seqlens_q=torch.tensor([0, 3])
    )
    with pytest.raises(ValueError) as raised:
        paged_attn.tree(**call | given)
    assert str(raised.value) == text


def test_parents_that_nobody_looks_at_may_be_anything() -> None:
    """Those of padding, and of sequences of more queries than nodes."""
    parents = torch.tensor([-1, 0, 7, 9, 2**40, 5, 5])
    lens, starts = torch.tensor([5, 4]), torch.tensor([0, 2, 6])
    made = paged_attn.tree(parents, lens, starts, nodes=2)
    assert made.qq_mask.flatten().tolist() == [1, 3, -1, -1, -1, -1, -1]
    assert made.query_positions.tolist()[:6] == [3, 4, 0, 1, 2, 3]
