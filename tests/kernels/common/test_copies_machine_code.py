"""What compilers make of the kernel that copies keys: wide loads, all under way at once, behind the launch before."""

from __future__ import annotations

import pytest
import triton

from tests.machine_code import compiled

pytestmark = [
    pytest.mark.skipif("nvidia" not in triton.backends.backends, reason="this Triton does not compile for nvidia"),
    pytest.mark.thorough,
]
# Variant -> loads of 16 bytes of a thread; "copied in 16 bits" is copied in 16 bits.
LOADS = {"small pages": 16, "small pages e4m3 hnd ragged table": 16, "copied in 16 bits": 8}


@pytest.mark.long
def test_keys_are_copied_sixteen_bytes_at_a_time_and_read_by_the_kernels_of_whole_pages() -> None:
    found = compiled("sm90", *LOADS, "prefill page 128", "--exactly")
    assert [(x["variant"], x["kernel"]) for x in found if x["variant"] in LOADS] == [
        (name, kernel) for name in LOADS for kernel in ("copy_pages_kernel", "blocks_kernel")
    ]
    for facts in (x for x in found if x["kernel"] == "copy_pages_kernel"):
        loads = LOADS[facts["variant"]]
        assert facts["in_fours"] == {"LDG.E.128": loads, "STG.E.128": 16}, "half of keys, half of values, a thread"
        assert (facts["spilled"], facts["before_waiting"]) == (0, [])
        assert facts["registers"] <= 128, "four programs of four warps on a multiprocessor"
        assert (facts["operations"]["ACQBULK"], facts["exits_before_waiting"]) == (1, 0)
    whole, over_copies = (
        x["sass"] for x in found if x["variant"] in ("prefill page 128", "small pages") and "copy" not in x["kernel"]
    )
    assert whole == over_copies


@pytest.mark.parametrize(("variant", "leads"), [("decodes beside a copy", 1), ("decodes beside copies of few", 0)])
def test_decodes_begin_beside_the_copy_and_blocks_behind_it(variant: str, leads: int) -> None:
    """leads: blocks are the next launch.  Otherwise the portable kernel serves drafts before blocks."""
    found = {x["kernel"]: x for x in compiled("sm90", variant, "--exactly")}
    copy, decodes, blocks = (found[f"{name}_kernel"] for name in ("copy_pages", "shares", "blocks"))
    assert ("attention_kernel" in found) == (not leads)
    assert (copy["before_waiting"], copy["exits_before_waiting"]) == ([], 0)
    assert (decodes["operations"].get("PREEXIT", 0), decodes["operations"]["ACQBULK"]) == (leads, 1)
    assert decodes["exits_before_waiting"] == 0, "blocks may begin before the copy is complete"
    assert "LDG" in decodes["before_waiting"], "loaders wait for the copy"
    assert ("UTMALDG" in blocks["before_waiting"]) == bool(leads)
