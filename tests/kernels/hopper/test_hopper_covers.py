"""Calls that the Hopper kernels take, and the TMA boxes of their tensors; needs no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paged_attn.kernels.hopper.planning import coverage as hopper
from paged_attn.records import layout
from tests.kernels.hopper.planned import CALL, H200, PACKED
from tests.support.cases import Case, build, problem_of

# what makes boxes impossible, or needs what only the portable kernels do
LEFT: list[dict[str, Any]] = [
    dict(compute=torch.float32, query=torch.float32, cache=torch.float32),
    dict(max_seqlen_q=16, max_seqlen_k=256),
    dict(ragged=False, window_left=176),
    dict(only="decode", window_left=176),
    dict(ragged=False, max_seqlen_k=128, head_dim=192),
    dict(query=torch.float8_e4m3fn),
    dict(rows_per_page=0),
    dict(page_size=12),
    dict(head_dim=20),
    dict(head_dim=32),
    dict(heads=65, kv_heads=1, tokens=1000),
    dict(heads=65, kv_heads=1, ragged=False),
    dict(heads=65, kv_heads=1, only="decode"),
    dict(heads=65, kv_heads=1, batch_invariant=True),
    dict(heads=260, kv_heads=4),  # 260 parts are more than multiprocessors
    dict(heads=256, kv_heads=256),
    dict(new=True),
    dict(batch_invariant=True, head_dim=192),
    dict(ragged=False, heads=16, kv_heads=1, head_dim=576, value_dim=512, latent=True, head_windows=True),
    dict(batch_invariant=True, cache=torch.float8_e4m3fn, compute=torch.float16),
]
# of x-packed caches
LEFT_OF_PACKED: list[dict[str, Any]] = [
    dict(rows_per_page=0),
    dict(compute=torch.float32, query=torch.float32, cache=torch.float32, rows_per_page=0),
    dict(cache=torch.float8_e4m3fn, compute=torch.float16, max_seqlen_q=17),
    dict(page_size=24, max_seqlen_q=17),
    dict(page_size=24, head_dim=192, max_seqlen_q=3),
    dict(page_size=8, new=True, new_box=True),
    dict(new=True, new_box=True, ragged=False),
    dict(batch_invariant=True),
]


@pytest.mark.parametrize("change", LEFT, ids=str)
def test_calls_that_are_left_to_the_portable_kernels(change: dict[str, Any]) -> None:
    assert not hopper.uncovered(CALL)
    assert hopper.uncovered(CALL._replace(**change))
    assert len(hopper.uncovered(CALL._replace(**change))) == 1, "a reason is told once"


@pytest.mark.parametrize(
    "change",
    [
        dict(max_seqlen_q=17, max_seqlen_k=256),  # 68 rows
        dict(max_seqlen_q=16, max_seqlen_k=257),
        dict(ragged=False, window_left=177),
        dict(window_left=1),  # 2048 queries
        dict(only="prefill", window_left=1),
        dict(ragged=False, max_seqlen_k=129, head_dim=192),
        dict(ragged=False, max_seqlen_k=64, packed=True, rows_per_page=1, boxable=False),
        dict(max_seqlen_q=1, max_seqlen_k=64, qq_bias=True),
        dict(max_seqlen_q=1, max_seqlen_k=64, batch_invariant=True),
        dict(heads=65, kv_heads=1),  # of 512 queries each on average
        dict(heads=65, kv_heads=1, only="prefill"),
    ],
    ids=str,
)
def test_few_keys_of_many_rows_and_other_kinds_are_not(change: dict[str, Any]) -> None:
    assert not hopper.uncovered(CALL._replace(**change))


@pytest.mark.parametrize("change", LEFT_OF_PACKED, ids=str)
def test_calls_over_x_packed_caches_that_are_left_to_the_portable_kernels(change: dict[str, Any]) -> None:
    assert not hopper.uncovered(PACKED)
    assert hopper.uncovered(PACKED._replace(**change))
    assert len(hopper.uncovered(PACKED._replace(**change))) == 1, "a reason is told once"


@pytest.mark.parametrize(
    ("change", "columns"),
    [
        (dict(max_seqlen_q=8), 32),
        (dict(max_seqlen_q=64, only="decode"), 8),
        (dict(max_seqlen_q=64, ragged=False), 8),
        (dict(head_dim=256), 8),
        (dict(cache=torch.float8_e4m3fn, compute=torch.float16, max_seqlen_q=4), 16),
    ],
    ids=str,
)
def test_few_rows_over_x_packed_caches_are_columns_of_products(change: dict[str, Any], columns: int) -> None:
    (launch,) = hopper.launches(PACKED._replace(**change))
    assert launch.pipe.PACKED
    assert columns == launch.pipe.COLUMNS


@pytest.mark.parametrize(
    ("change", "boxes"),
    [
        (dict(), True),
        (dict(page_size=544), True),
        (dict(dtype=torch.float16), True),
        (dict(x=4), False),
        (dict(page_size=12), False),
        (dict(dtype=torch.float32), False),
        (dict(cache_dtype=torch.float8_e4m3fn), True),
    ],
    ids=str,
)
def test_boxes_of_x_packed_caches_want_16_bytes_side_by_side_and_steps_of_them(
    change: dict[str, Any], boxes: bool
) -> None:
    sizes: dict[str, Any] = dict(query_lens=(1,), seq_lens=(80,), heads=4, kv_heads=2, head_dim=64, layout="x")
    inputs = build(Case("x", **(sizes | dict(dtype=torch.bfloat16) | change)))
    assert problem_of(inputs, H200).rows_per_page == boxes


def test_slots_of_x_packed_keys_that_lie_apart_make_no_boxes() -> None:
    values = torch.empty(3, 2, 64, 16, dtype=torch.bfloat16)
    wide = torch.empty(3, 2, 8, 16, 16, dtype=torch.bfloat16)
    assert layout.rows_per_page(wide[..., :8].contiguous(), values, "NHD") == 1
    assert layout.rows_per_page(wide[..., :8], values, "NHD") == 0
    assert layout.rows_per_page(wide[..., :8].contiguous(), values.transpose(2, 3), "NHD") == 0


@pytest.mark.parametrize(
    ("change", "adjacent"),
    [
        (dict(), True),
        (dict(page_size=128, dtype=torch.float16), True),
        (dict(shared_buffer=True), False),  # a head's keys and values side by side
        (dict(layout="HND"), False),
        (dict(layout="x"), False),
    ],
    ids=str,
)
def test_heads_lie_side_by_side_where_nothing_is_between_them(change: dict[str, Any], adjacent: bool) -> None:
    sizes: dict[str, Any] = dict(query_lens=(1,), seq_lens=(80,), heads=4, kv_heads=2, head_dim=64)
    inputs = build(Case("heads", **(sizes | dict(dtype=torch.bfloat16) | change)))
    assert problem_of(inputs, H200).adjacent == adjacent


@pytest.mark.parametrize(("page_size", "boxes"), [(8, 0), (16, 1), (24, 0), (32, 1)])
def test_boxes_of_x_packed_fp8_values_want_pages_of_16_slots(page_size: int, boxes: int) -> None:
    """Also of pages that are parts of larger ones, whose strides are right."""
    keys = torch.empty(3, 2, 8, 48, 16, dtype=torch.float8_e4m3fn)[:, :, :, :page_size]
    values = torch.empty(3, 2, 128, 48, dtype=torch.float8_e4m3fn)[..., :page_size]
    assert layout.rows_per_page(keys, values, "NHD") == boxes


def test_new_keys_have_tiles_of_their_own_where_boxes_of_them_can_be_cut_out() -> None:
    new = CALL._replace(new=True, new_box=True)
    for max_seqlen_q in (1, 8, 2048):
        (launch,) = hopper.launches(new._replace(max_seqlen_q=max_seqlen_q))
        (other,) = hopper.launches(CALL._replace(max_seqlen_q=max_seqlen_q))
        assert not hopper.uncovered(new)
        assert launch == other._replace(shape=other.shape._replace(APART=True))


@pytest.mark.parametrize(
    ("change", "boxes"),
    [
        (dict(), True),
        (dict(layout="HND"), True),
        (dict(strided=True), True),
        (dict(decode_form=True), True),
        (dict(head_dim=68), False),
        (dict(cache_dtype=torch.float8_e4m3fn), False),
        (dict(query_lens=(0,)), False),
        (dict(new=False), False),
    ],
    ids=str,
)
def test_boxes_of_new_keys_want_the_type_of_the_cache_and_steps_of_16_bytes(
    change: dict[str, Any], boxes: bool
) -> None:
    sizes: dict[str, Any] = dict(query_lens=(1,), seq_lens=(80,), heads=4, kv_heads=2, head_dim=64, new=True)
    inputs = build(Case("new", **(sizes | dict(dtype=torch.bfloat16) | change)))
    assert problem_of(inputs, H200).new_box == boxes
    if boxes:
        one_element_on = torch.empty(inputs["v_new"].numel() + 1, dtype=torch.bfloat16)[1:].view(inputs["v_new"].shape)
        assert not problem_of(inputs | dict(v_new=one_element_on), H200).new_box
