"""What compilers make of wide blocks: products of no dims that are zero, and no spills.  Needs no GPU."""

from __future__ import annotations

import pytest
import triton

from tests.machine_code import SHARED, compiled
from tests.support.hopper_complaints import products

pytestmark = [
    pytest.mark.skipif("nvidia" not in triton.backends.backends, reason="this Triton does not compile for nvidia"),
    pytest.mark.thorough,
]
# Products of a tile: of keys in steps of 16 dims, of values in steps of 16 keys.
PRODUCTS = {
    "prompts 192 and 128": 192 // 16 + 128 // 16,
    "prompts new 192 and 128": 192 // 16 + 128 // 16,
    "prompts 192 and 128 e4m3": 256 // 16 + 64 // 16,  # whose queries, widened, are no boxes
    "prompts 128 and 256": 128 // 16 + 64 // 16,
    "prefill head_dim 192": 192 // 16 + 64 // 16,
    "prefill head_dim 512": 512 // 16 + 32 // 16,  # of 32 keys, by each of two launches
}
MAX_SPILLED = 64  # bytes of a thread, outside loops: Triton 3.7 8 to 56, 3.9 40
MAXIMA_FIRST = "prompts 192 and 128 e4m3", "prefill head_dim 512"  # others are weighed at once
MAX_RELOADED = {"prompts new 192 and 128": 2}  # registers of a loop over keys


@pytest.mark.parametrize("variant", PRODUCTS)
def test_wide_blocks_multiply_no_more_than_they_have_to(variant: str) -> None:
    kernels = compiled("sm90", variant, "--exactly")
    assert len(kernels) == 1 + (variant == "prefill head_dim 512")
    for facts in kernels:
        assert facts["kernel"] == "blocks_kernel"
        assert facts["shared"] <= SHARED["sm90"]
        assert facts["spilled"] <= MAX_SPILLED
        assert not facts["advice"]
        for name in ("overtaken_readers", "reused_barriers", "unwritten", "boxes_in_loops_of_their_own"):
            assert not facts[name], name
        (loop,) = [x for x in facts["innermost"] if products(x) >= 8]
        assert loop["HGMMA"] == PRODUCTS[variant]
        assert max(loop.get("LDL", 0), loop.get("STL", 0)) <= MAX_RELOADED.get(variant, 0)
        if variant not in MAXIMA_FIRST:
            assert all(under["maxima_always"] == 0 for under in facts["under_products"])
