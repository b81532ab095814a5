"""A cache of the other kv_layout: an error says so or, where sizes happen to fit, a warning; legal calls get none."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch

import paged_attn
from paged_attn.checks.swapped import looks_swapped
from tests.support.bad_input import accept

AXES = {"NHD": "[pages, page_size, kv_heads, head_dim]", "HND": "[pages, kv_heads, page_size, head_dim]"}
OTHER = {"NHD": "HND", "HND": "NHD"}


def call(layout: str, heads: int, kv_heads: int, page_size: int, keys: int, seqs: int = 2, **options: Any) -> Any:
    """A decode over a cache of this layout, with a page table as wide as its keys need."""
    pages = -(-keys // page_size)
    shape = (page_size, kv_heads) if layout == "NHD" else (kv_heads, page_size)
    cache = torch.zeros(seqs * pages, *shape, 16)
    return dict(
        q=torch.zeros(seqs, heads, 16), k_cache=cache, v_cache=cache.clone(), kv_layout=layout,
        page_table=torch.arange(seqs * pages, dtype=torch.int32).view(seqs, pages),
        seq_lens=torch.full((seqs,), keys, dtype=torch.int32), max_seqlen_k=keys, causal=True, softmax_scale=None,
        window_size=(-1, -1), softcap=0.0, max_seqlen_q=None, return_lse=False, only=None, batch_invariant=False,
        out=None, sinks=None, gate=None,
    ) | options  # fmt: skip


def refused(inputs: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as raised:
        accept(inputs)
    return str(raised.value)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_heads_that_do_not_fit_name_the_layout_that_would(layout: str) -> None:
    """Calls with 24 heads on 8 KV heads and pages of 16 tokens."""
    given = call(layout, 24, 8, 16, 100)
    text = refused(given | dict(kv_layout=OTHER[layout]))
    assert f"k_cache was read as {OTHER[layout]}: {AXES[OTHER[layout]]} = {list(given['k_cache'].shape)}" in text
    assert text.endswith(f", and would fit as kv_layout={layout!r}")
    accept(given)


def test_heads_that_fit_in_neither_layout_are_told_how_the_cache_was_read() -> None:
    text = refused(call("NHD", 10, 4, 16, 100))
    assert text.startswith("q must have heads a positive multiple of kv_heads = 4, got heads = 10: k_cache was read as")
    assert "would fit" not in text


def test_new_keys_of_as_many_heads_as_pages_have_slots_name_the_layout() -> None:
    """16 heads on 8 would be taken for 16 on 16."""
    new = torch.zeros(2, 8, 16)
    given = call("HND", 16, 8, 16, 100, k_new=new, v_new=new.clone())
    text = refused(given | dict(kv_layout="NHD"))
    assert text.startswith("k_new must be [tokens, kv_heads, head_dim] with kv_heads = 16 from k_cache, got [2, 8, 16]")
    assert text.endswith("and would fit as kv_layout='HND'")
    other = refused(given | dict(k_new=torch.zeros(2, 4, 16), v_new=torch.zeros(2, 4, 16)))
    assert "would fit" not in other


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_write_into_the_other_layout_names_it(layout: str) -> None:
    shape = (16, 8) if layout == "NHD" else (8, 16)
    cache, k = torch.zeros(3, *shape, 32), torch.zeros(1, 8, 32)
    slots = torch.tensor([3])
    with pytest.raises(ValueError) as raised:
        paged_attn.write_kv(k, k.clone(), cache, cache.clone(), slots, kv_layout=OTHER[layout])
    assert str(raised.value).endswith(
        f"with kv_heads = 8 from k, got {list(cache.shape)}: k_cache was read as {OTHER[layout]}: "
        f"{AXES[OTHER[layout]]} = {list(cache.shape)}, and would fit as kv_layout={layout!r}"
    )


def test_a_write_that_fits_in_neither_layout_does_not_guess() -> None:
    cache = torch.zeros(3, 16, 4, 32)
    with pytest.raises(ValueError, match=r"with kv_heads = 8 from k, got \[3, 16, 4, 32\]$"):
        paged_attn.write_kv(torch.zeros(1, 8, 32), torch.zeros(1, 8, 32), cache, cache.clone(), torch.tensor([3]))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("heads, kv_heads, page_size", [(32, 8, 16), (64, 4, 64), (32, 2, 16), (128, 8, 128)])
def test_sizes_that_happen_to_fit_are_warned_of_once_per_shape(
    layout: str, heads: int, kv_heads: int, page_size: int
) -> None:
    inputs = call(layout, heads, kv_heads, page_size, 500) | dict(kv_layout=OTHER[layout])
    with pytest.warns(UserWarning, match=f"k_cache was read as {OTHER[layout]}.*as kv_layout='{layout}'") as caught:
        accept(inputs)
    assert len(caught) == 1


def test_the_warning_points_at_the_call_and_kept_calls_say_nothing() -> None:
    inputs = call("HND", 32, 8, 16, 100) | dict(kv_layout="NHD")
    inputs["seq_lens"].fill_(40)  # what the pages hold as they are read
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            paged_attn.paged_attention(**inputs)
    assert [x.filename for x in caught] == [__file__]


# Models as they are: heads and KV heads of one device; Llama 2, Llama 3, Gemma, Phi, Falcon, StarCoder, Qwen.
MODELS = [(32, 32), (32, 8), (64, 8), (16, 16), (32, 16), (40, 10), (71, 1), (48, 1), (28, 4), (64, 64), (8, 1)]
PAGES = [1, 16, 32, 48, 64, 128, 544]


@pytest.mark.parametrize("page_size", PAGES)
def test_calls_as_engines_make_them_are_not_warned_of(page_size: int) -> None:
    """No model gets a warning, with any bound and any width of the page table, also a bound beyond the table."""
    for (heads, kv_heads), width, bound in itertools.product(MODELS, range(1, 70), (*range(1, 3000, 7), 2**17)):
        assert not looks_swapped(heads, kv_heads, page_size, width, bound)


@pytest.mark.parametrize("page_size", range(1, 16))
def test_small_pages_are_not_warned_of_where_the_table_holds_the_bound(page_size: int) -> None:
    """A bound that the table holds is how a bound is meant."""
    for (heads, kv_heads), width in itertools.product(MODELS, range(1, 200)):
        for bound in (1, page_size * (width - 1) + 1, page_size * width):
            assert not looks_swapped(heads, kv_heads, page_size, width, bound)


def test_without_a_bound_nothing_is_guessed() -> None:
    accept(call("HND", 32, 8, 16, 100) | dict(kv_layout="NHD", max_seqlen_k=None))


def test_a_checked_call_without_a_bound_finds_keys_that_pages_do_not_hold() -> None:
    inputs = call("HND", 32, 8, 16, 100) | dict(kv_layout="NHD", max_seqlen_k=None, check=True)
    with pytest.raises(ValueError, match=r"max_pages = 7 pages of 8, or of 16 in the other kv_layout$"):
        paged_attn.paged_attention(**inputs)
