"""What compilers make of the kernel that copies keys: wide loads, all under way at once, behind the launch before."""

from __future__ import annotations

import pytest
import triton

from tests.machine_code import compiled

pytestmark = [
    pytest.mark.skipif("nvidia" not in triton.backends.backends, reason="this Triton does not compile for nvidia"),
    pytest.mark.thorough,
]
NAMES = ("small pages", "small pages e4m3 hnd ragged table")


@pytest.mark.long
def test_keys_are_copied_sixteen_bytes_at_a_time_and_read_by_the_kernels_of_whole_pages() -> None:
    found = compiled("sm90", *NAMES, "prefill page 128", "--exactly")
    assert [(x["variant"], x["kernel"]) for x in found if x["variant"] in NAMES] == [
        (name, kernel) for name in NAMES for kernel in ("copy_pages_kernel", "blocks_kernel")
    ]
    for facts in (x for x in found if x["kernel"] == "copy_pages_kernel"):
        assert facts["in_fours"] == {"LDG.E.128": 16, "STG.E.128": 16}, "eight of keys, and of values, a thread"
        assert (facts["spilled"], facts["before_waiting"]) == (0, [])
        assert facts["registers"] <= 128, "four programs of four warps on a multiprocessor"
        assert facts["operations"]["ACQBULK"] == 1
    whole, over_copies = (
        x["sass"] for x in found if x["variant"] in ("prefill page 128", "small pages") and "copy" not in x["kernel"]
    )
    assert whole == over_copies
