"""Ragged page tables, (indptr, indices): what they mean, what of them is read, and that they cost nothing else."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import paged_attn
from paged_attn import reference
from paged_attn.arguments import table_parts
from paged_attn.calls import attend, call_cache
from paged_attn.launching.platform import Device
from tests.support.cases import BAD_PAGE, E4M3, Case, build, problem_of, run

RAGGED = [
    Case("decode", (1, 1, 1), (40, 3, 17), heads=4, kv_heads=2, page_size=8, table="ragged", decode_form=True),
    Case("mixed", (1, 20, 0, 7), (33, 20, 9, 30), heads=4, kv_heads=2, table="ragged", padding=2),
    Case("pages of one token", (1, 9), (40, 30), page_size=1, table="ragged"),
    Case("pages of 544", (3, 1), (700, 30), page_size=544, table="ragged"),
    Case("spare entries", (1, 20, 7), (33, 20, 30), page_size=4, table="gaps"),
    Case("views of other integers", (1, 20, 7), (33, 20, 30), page_size=4, table="views"),
    Case("views, int64 lengths", (1, 20, 7), (33, 20, 30), page_size=4, table="views", integers=torch.int64),
    Case("window", (1, 20), (90, 60), page_size=4, table="ragged", window_size=(9, -1), sinks=True),
    Case("new keys", (2, 20), (40, 60), page_size=8, table="gaps", new=True),
    Case("x-packed, fp8", (2, 20), (40, 60), page_size=8, table="ragged", layout="x", cache_dtype=E4M3),
    Case("nothing and less", (1, 0, 2), (0, 0, -7), page_size=8, table="ragged"),
    Case("invariant", (1, 70), (1500, 1100), page_size=16, table="views", batch_invariant=True),
    Case("checked", (1, 20, 0, 7), (33, 20, 9, 30), page_size=4, table="gaps", check=True, window_size=(8, -1)),
]


@pytest.mark.parametrize("case", RAGGED, ids=str)
def test_a_ragged_page_table_gives_what_the_reference_gives(case: Case, device: str) -> None:
    run(case, device)


@pytest.mark.parametrize("case", RAGGED[:8], ids=str)
def test_both_kinds_of_a_page_table_give_the_same_bits(case: Case, device: str) -> None:
    """Under one bound, by which calls are planned."""
    bounded = dataclasses.replace(case, bounds=True)
    ragged = paged_attn.paged_attention(**build(bounded, device))
    dense = paged_attn.paged_attention(**build(dataclasses.replace(bounded, table=""), device))
    for one, other in zip(ragged, dense, strict=True):
        assert torch.equal(one, other)


def test_rows_of_the_reference_are_slices_of_indices() -> None:
    cache = torch.arange(5.0).view(5, 1, 1, 1)
    table = (torch.tensor([1, 3, 4]), torch.tensor([BAD_PAGE, 4, 2, 3, BAD_PAGE]))
    out = reference.paged_attention(torch.zeros(2, 1, 1), cache, cache, table, torch.tensor([2, 1]))
    assert out.flatten().tolist() == [3.0, 3.0]  # the mean of 4 and 2; 3


def test_rows_may_be_in_any_order_and_share_pages(device: str) -> None:
    """indptr of some rows of a larger batch is a view, and a prefix that two rows share is where they lie."""
    case = Case("three", (1, 1, 1), (40, 24, 17), page_size=8, table="ragged", decode_form=True)
    inputs = build(case, device)
    indptr, indices = inputs["page_table"]
    rest = {
        name: x[1:] if isinstance(x, torch.Tensor) and len(x) == 3 else x
        for name, x in inputs.items()
        if name != "page_table"
    }
    out, _ = paged_attn.paged_attention(**rest, page_table=(indptr[1:], indices))
    whole = reference.paged_attention(**inputs | {"out": None, "return_lse": False})
    torch.testing.assert_close(out, whole[1:].float(), atol=2e-5, rtol=2e-5)


def test_a_list_is_as_good_as_a_tuple(device: str) -> None:
    inputs = build(RAGGED[0], device)
    one, _ = paged_attn.paged_attention(**inputs)
    other, _ = paged_attn.paged_attention(**inputs | {"page_table": list(inputs["page_table"]), "out": None})
    assert torch.equal(one, other)


def test_a_sequence_is_taken_to_have_no_more_keys_than_all_pages_hold() -> None:
    inputs = build(dataclasses.replace(RAGGED[0], bounds=False))
    indices = inputs["page_table"][1]
    card = Device("sm90", 132)
    assert problem_of(inputs, card).max_seqlen_k == len(indices) * 8
    assert problem_of(inputs | {"max_seqlen_k": 40}, card).max_seqlen_k == 40
    dense = build(dataclasses.replace(RAGGED[0], table=""))
    bounded = {"max_seqlen_k": 40}
    assert problem_of(inputs | bounded, card) == problem_of(dense | bounded, card)


@pytest.mark.parametrize("given", [None, (), (torch.zeros(2),), (None, torch.zeros(2)), torch.zeros(2)])
def test_what_is_no_pair_stays_as_it_is(given: Any) -> None:
    assert table_parts(given) == (given, None)


def test_another_kind_of_table_is_another_call(device: str) -> None:
    """Calls that differ in nothing else, one after the other and again."""
    case = dataclasses.replace(RAGGED[0], bounds=True)
    both = [build(dataclasses.replace(case, table=table), device) for table in ("ragged", "", "views")]
    wanted = reference.paged_attention(**both[1] | {"out": None, "return_lse": False})
    for _ in range(3):
        for inputs in both:
            out, _ = paged_attn.paged_attention(**inputs)
            torch.testing.assert_close(out, wanted.float(), atol=2e-5, rtol=2e-5)


def test_a_kept_call_is_found_by_the_facts_of_both_tensors(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many sequences and pages again are no new call, and more pages are one."""
    inputs = build(RAGGED[0], device)
    paged_attn.paged_attention(**inputs)
    new: list[bool] = []
    attend_new = attend._attend_new
    monkeypatch.setattr(attend, "_attend_new", lambda *args: new.append(True) or attend_new(*args))
    indptr, indices = inputs["page_table"]
    again = inputs | {"page_table": (indptr.clone(), indices.clone())}
    for _ in range(2):
        paged_attn.paged_attention(**again)
    assert not new
    longer = torch.cat([indices, indices])
    out, _ = paged_attn.paged_attention(**inputs | {"page_table": (indptr, longer)})
    assert new == [True]
    wanted = reference.paged_attention(**inputs | {"out": None, "return_lse": False})
    torch.testing.assert_close(out, wanted.float(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("part", [0, 1])
def test_an_out_in_the_memory_of_a_ragged_page_table_is_refused(part: int) -> None:
    call_cache.clear()  # kept calls do not look where tensors lie
    inputs = build(RAGGED[0])
    out = inputs["out"]
    table = list(inputs["page_table"])
    memory = out.flatten().view(torch.int32)[: len(table[part])]
    table[part] = memory.copy_(table[part])
    name = ("indptr of page_table", "page_table")[part]
    with pytest.raises(ValueError, match=f"^out must share no memory with {name}$"):
        paged_attn.paged_attention(**inputs | {"page_table": tuple(table)})


@pytest.mark.gpu
def test_a_graph_keeps_the_addresses_of_both_tensors(device: str) -> None:
    """A captured call follows what they hold when it is replayed, at other lengths."""
    case = Case("replayed", (1, 1), (400, 90), heads=8, kv_heads=2, head_dim=128, dtype=torch.bfloat16, table="gaps")
    one, other = (build(dataclasses.replace(case, seq_lens=lens), device) for lens in ((400, 90), (30, 333)))
    indptr, indices = (x.clone() for x in one["page_table"])
    indices = torch.cat([indices, indices.new_full((40,), BAD_PAGE)])
    fixed = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in one.items()}
    fixed |= {"page_table": (indptr, indices), "max_seqlen_k": 400}
    pages = max(len(one["k_cache"]), len(other["k_cache"]))
    for name in ("k_cache", "v_cache"):
        fixed[name] = one[name].new_full((pages, *one[name].shape[1:]), torch.nan)
        fixed[name][: len(one[name])] = one[name]
    paged_attn.paged_attention(**fixed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = paged_attn.paged_attention(**fixed)
    for inputs in (one, other):
        for name in ("q", "seq_lens", "cu_seqlens_q"):
            fixed[name].copy_(inputs[name])
        for name in ("k_cache", "v_cache"):
            fixed[name][: len(inputs[name])] = inputs[name]
        indptr.copy_(inputs["page_table"][0])
        indices[: len(inputs["page_table"][1])] = inputs["page_table"][1]
        graph.replay()
        wanted = reference.paged_attention(**inputs | {"out": None, "return_lse": False})
        torch.testing.assert_close(out.double(), wanted, atol=2e-2, rtol=2e-2)
