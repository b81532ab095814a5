"""Calls over copies in whole pages, by the plan alone: calls with enough scores to be worth a copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paged_attn.kernels.hopper.planning.whole_pages import MAX_BYTES_OF_COPIES
from paged_attn.planning import planner
from paged_attn.planning.planner import in_whole_pages
from paged_attn.preparation.model import Lengths, Model, problem_of
from tests.planning.problems import H200
from tests.preparation.models import LLAMA
from tests.support.cases import E4M3, INT4, INT8
from tests.support.portable_plans import portable

SMALL: dict[str, Any] = LLAMA | dict(page_size=4)


def planned(lengths: Lengths, batch_invariant: bool = False, only: str | None = None, **changes: Any) -> Any:
    return planner.plan(
        problem_of(Model(**SMALL | changes), lengths, H200, batch_invariant=batch_invariant, only=only)
    )  # fmt: skip


PREFILLS = Lengths(True, 2, 4096, 2048, 2048)


@pytest.mark.parametrize("page_size", [1, 2, 4, 7, 12, 9])
@pytest.mark.parametrize(
    "changes",
    [
        dict(), dict(cache_dtype=E4M3), dict(new=True), dict(kv_layout="HND"), dict(window_size=(1023, -1)),
        dict(head_dim=80), dict(head_dim=256), dict(softcap=30.0, alibi=True), dict(qq_bias=8), dict(chunk=1024),
        dict(query_positions=True), dict(page_indices=torch.int32), dict(spans=2), dict(heads=96),
        dict(head_dim=192, value_dim=128), dict(head_dim=512, value_dim=512, kv_heads=4, heads=16),
    ],
    ids=str,
)  # fmt: skip
def test_long_prefills_over_small_pages_are_planned_as_over_whole_ones(page_size: int, changes: dict[str, Any]) -> None:
    made = planned(PREFILLS, page_size=page_size, **changes)
    assert made.copies is not None
    whole = planned(PREFILLS, page_size=128, **changes | dict(kv_layout="NHD"))
    assert made.launches == tuple([x._replace(copied=True) for x in whole.launches])
    assert all(x.dialect == "hopper" for x in made.launches)


@pytest.mark.parametrize(
    "lengths",
    [
        Lengths(True, 1, 512, 512, 512),
        Lengths(True, 8, 2048, 256, 256),
        Lengths(True, 4, 512, 128, 8192),
        Lengths(True, 16, 16384, 1024, 1024),
        Lengths(True, 4, 1024, 256, 16384),
        Lengths(True, 2, 3000, 2048, 2048),
        Lengths(True, 5, 4100, 4096, 4096),
    ],
)
def test_scores_that_are_many_for_each_key_are_worth_a_copy(lengths: Lengths) -> None:
    assert planned(lengths).copies is not None


@pytest.mark.parametrize(
    "lengths",
    [
        Lengths(False, 64, 64, 1, 4096),
        Lengths(True, 64, 64, 1, 4096),
        Lengths(True, 16, 128, 8, 8192),
        Lengths(True, 4, 256, 64, 16384),
        Lengths(True, 1, 256, 256, 256),
        Lengths(True, 64, 2111, 2048, 4096),
    ],
)
def test_decodes_and_drafts_few_keys_and_mostly_decodes_are_not(lengths: Lengths) -> None:
    made = planned(lengths)
    assert made.copies is None
    assert all(x.dialect == "portable" for x in made.launches)


@pytest.mark.parametrize(
    "changes",
    [
        dict(kv_layout="x"), dict(batch_invariant=True), dict(heads=16, kv_heads=1, head_dim=576, value_dim=512,
        latent=True), dict(page_size=16), dict(page_size=8), dict(window_size=(1023, -1), prefix_lens=True),
        dict(dtype=torch.float32, cache_dtype=torch.float32, out_dtype=torch.float32), dict(head_dim=20),
        dict(head_windows=True),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_read_as_it_is_and_what_no_kernel_takes_then_is_not_copied(changes: dict[str, Any]) -> None:
    assert planned(PREFILLS, **changes).copies is None


def test_other_devices_copy_nothing() -> None:
    problem = problem_of(Model(**SMALL), PREFILLS, H200)
    assert in_whole_pages(problem)[1] is not None
    for arch in ("sm80", "sm100", "gfx942"):
        assert in_whole_pages(problem._replace(device=H200._replace(arch=arch))) == (
            problem._replace(device=H200._replace(arch=arch)),
            None,
        )


def test_portable_plans_copy_nothing() -> None:
    assert planned(PREFILLS).copies is not None
    with portable():
        made = planned(PREFILLS)
    assert made.copies is None
    assert [x.dialect for x in made.launches] == ["portable"]


def test_copies_are_no_larger_than_their_bound() -> None:
    """With bounds that are far above the lengths, too, which is all that the host knows."""
    most = MAX_BYTES_OF_COPIES // (2 * 2 * 8 * 128)  # keys
    for seqs in (1, 2, 8):
        keys = most // seqs
        within, beyond = (planned(Lengths(True, seqs, 2048 * seqs, 2048, x)) for x in (keys, keys + 1))
        assert within.copies is not None
        assert within.copies.bytes == MAX_BYTES_OF_COPIES
        assert beyond.copies is None
    assert sum(x.nbytes for x in within.copies.tensors()[:2]) == within.copies.bytes


def test_sequences_that_only_leaves_out_are_not_copied() -> None:
    lengths = Lengths(True, 5, 4100, 4096, 4096)
    assert planned(lengths).copies.shortest == 1
    assert planned(lengths, only="prefill").copies.shortest == 2
    assert planned(lengths, only="decode").copies is None


@pytest.mark.parametrize(
    "changes",
    [
        dict(cache_dtype=E4M3, scales="number"), dict(cache_dtype=E4M3, scales="per_token"),
        dict(cache_dtype=INT8, scales="per_head"), dict(cache_dtype=INT4, scales="per_token"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("only", [None, "prefill"])
def test_uneven_prefills_over_small_pages_of_bytes_are_copied_whole_in_16_bits(
    changes: dict[str, Any], only: str | None
) -> None:
    made = planned(Lengths(True, 16, 32768, 4096, 4096), only=only, **changes)
    assert made.copies is not None
    assert (made.copies.dtype, made.copies.shortest) == (torch.bfloat16, 1 if only is None else 2)
    assert all(x.dialect == "hopper" and x.copied for x in made.launches)
    assert planned(Lengths(True, 64, 2111, 2048, 4096), only=only, **changes).copies is None, "decodes are not worth it"


def test_copies_too_large_in_16_bits_keep_their_8_bits() -> None:
    made = planned(Lengths(True, 64, 100000, 8192, 8192), cache_dtype=E4M3, scales="number")
    assert made.copies is not None
    assert made.copies.dtype == E4M3
    assert all(x.dialect == "hopper" and x.copied and x.pipe.CONVERT for x in made.launches)
    blocks = planned(Lengths(True, 64, 100000, 8192, 8192), cache_dtype=E4M3, scales="number", page_size=16)
    assert blocks.copies is None
    assert all(x.dialect == "hopper" and not x.copied for x in blocks.launches)
