"""What compilers make of few rows of two widths, of wide heads and of latents: what fits, and no more products than
needed.  Needs no GPU."""

from __future__ import annotations

import pytest
import triton

from tests.machine_code import SHARED, compiled
from tests.support.hopper_complaints import merge_complaints, products

pytestmark = [
    pytest.mark.skipif("nvidia" not in triton.backends.backends, reason="this Triton does not compile for nvidia"),
    pytest.mark.thorough,
]


def of_columns(dim: int, value_dim: int) -> int:
    """Products of a tile of 64 keys: of these in steps of 16 dims, of 64 dims of values in steps of 16 keys."""
    return dim // 16 + value_dim // 64 * 64 // 16


PRODUCTS = {
    "decode 192 and 128": of_columns(256, 128),
    "decode 64 and 256": of_columns(64, 256),
    "decode 192 and 128 group 16": 256 // 16 + 64 // 16,  # as rows
    "decode 512": of_columns(512, 512),
    "draft 512": of_columns(512, 512),
    "decode 512 and 256": of_columns(512, 256),
    "decode split latent": of_columns(576, 512),
    "decode latent 32 heads": of_columns(576, 512),
    "decode latent of 512": of_columns(512, 512),
    "decode latent of 320": of_columns(320, 256),
    "decode latent 64 heads": 576 // 16 + 64 // 16,  # as rows, of each consumer
    "decode e4m3 latent": of_columns(576, 512),
    "decode e4m3 latent 8 heads features": of_columns(576, 512),
    "decode e4m3 latent 32 heads": of_columns(576, 512),
    "decode e4m3 latent of 512": of_columns(512, 512),
    "decode e4m3 latent 64 heads": 576 // 16 + 2 * 64 // 16,  # the same, of values 128 dims at a time
}
MAX_SPILLED, MAX_SPILLED_OF_LATENTS = 192, 16  # bytes of a thread
MAX_SPILLED_BESIDE_CONVERTER = 80  # of two consumers, outside of loops: the converter has registers of theirs
MAX_RELOADED, MAX_RELOADED_OF_LATENTS = 16, 0  # registers of a loop over keys
MAX_MADE_UNIFORM = 8  # registers of a loop over latents: addresses of operands are made where they are uniform


MERGED = {"decode split latent", "decode latent 64 heads"}  # of these, pieces are joined by a launch of its own


@pytest.mark.parametrize("variant", PRODUCTS)
def test_few_rows_multiply_no_more_than_they_have_to(variant: str) -> None:
    kernels = compiled("sm90", variant, "--exactly", "--calls", "tests.support.wide_variants")
    merges = [x for x in kernels if x["kernel"] == "merge_blocks_kernel"]
    assert merges or variant not in MERGED
    assert not [text for x in merges for text in merge_complaints(x)]
    (facts,) = [x for x in kernels if x["kernel"] == "shares_kernel"]
    assert facts["shared"] <= SHARED["sm90"]
    latent = "latent" in variant
    most = MAX_SPILLED_OF_LATENTS if latent else MAX_SPILLED
    assert facts["spilled"] <= (MAX_SPILLED_BESIDE_CONVERTER if variant == "decode e4m3 latent 64 heads" else most)
    assert not facts["advice"]
    for name in ("overtaken_readers", "reused_barriers", "unwritten", "boxes_in_loops_of_their_own", "before_waiting"):
        assert not facts[name], name
    loops = [x for x in facts["innermost"] if products(x)]
    assert len(loops) == 1 + ("64 heads" in variant)
    for loop in loops:
        assert loop["HGMMA"] == PRODUCTS[variant]
        reloaded = max(loop.get("LDL", 0), loop.get("STL", 0))
        assert reloaded <= (MAX_RELOADED_OF_LATENTS if latent else MAX_RELOADED)
        assert not latent or loop.get("R2UR", 0) <= MAX_MADE_UNIFORM
