"""What compilers make of blocks of two widths: products of no dims that are zero, and no spills.  Needs no GPU."""

from __future__ import annotations

import pytest
import triton

from tests.hopper_complaints import products
from tests.machine_code import SHARED, compiled

pytestmark = pytest.mark.skipif(
    "nvidia" not in triton.backends.backends, reason="this Triton does not compile for nvidia"
)
# Products of a tile: of keys in steps of 16 dims, of values in steps of 16 keys.
PRODUCTS = {"prefill 192 and 128": 192 // 16 + 128 // 16, "prefill head_dim 192": 192 // 16 + 64 // 16}
MAX_SPILLED = 16  # bytes of a thread, outside loops


@pytest.mark.parametrize("variant", PRODUCTS)
def test_keys_of_192_dims_are_multiplied_as_no_more(variant: str) -> None:
    (facts,) = compiled("sm90", variant, "--exactly", PAGED_ATTN_WIDE="1")
    assert facts["kernel"] == "blocks_kernel"
    assert facts["shared"] <= SHARED["sm90"]
    assert facts["spilled"] <= MAX_SPILLED
    assert not facts["advice"]
    for name in ("overtaken_readers", "reused_barriers", "unwritten", "boxes_in_loops_of_their_own"):
        assert not facts[name], name
    (loop,) = [x for x in facts["innermost"] if products(x) >= 8]
    assert loop["HGMMA"] == PRODUCTS[variant]
    assert not {"LDL", "STL", "BAR"} & loop.keys()
    assert all(under["maxima_always"] == 0 for under in facts["under_products"])
