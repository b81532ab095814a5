"""Values of another width than keys and heads beyond 256 dims, of few rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paged_attn.kernels.hopper.planning.shapes import is_wide
from paged_attn.planning import planner
from tests.support.cases import E4M3, E5M2, Case, build, problem_of, run
from tests.support.hopper_cases import DEVICE, FEATURES, ragged, sized

pytestmark = [pytest.mark.simulated, pytest.mark.hopper, pytest.mark.usefixtures("on_hopper")]


DECODE = ragged((1, 300), (1, 0), (1, 1000), (1, 1)) | dict(decode_form=True)
DRAFTS = ragged((4, 500), (3, 3), (0, 9), (2, 1), (4, 260)) | dict(bounds=True)
# 2 to 11 tiles each, and by a quarter of the multiprocessors some 2 a program
FEW_PIECES = ragged(*[(1, 100 + 50 * i) for i in range(12)]) | dict(decode_form=True)
LONE = ragged((1, 2500)) | dict(decode_form=True)
ROWS: dict[str, Any] = dict(heads=48, kv_heads=4)  # so many that they are 64 rows, not columns

TWO_WIDTHS: dict[str, dict[str, Any]] = {
    "decodes, 192 and 128": DECODE | dict(head_dim=192, value_dim=128),
    "decodes, 192 and 128, HND, page 8, float16": DECODE
    | dict(head_dim=192, value_dim=128, layout="HND", page_size=8, dtype=torch.float16),
    "decodes, 64 and 256, page 64": DECODE | dict(head_dim=64, value_dim=256, page_size=64),
    "decodes, 64 and 128, one buffer": DECODE | dict(head_dim=64, value_dim=128, shared_buffer=True),
    "decodes, 128 and 64": DECODE | dict(head_dim=128, value_dim=64),
    "decodes, 256 and 80": DECODE | dict(head_dim=256, value_dim=80),
    "decodes, 96 and 128, of as wide tiles": DECODE | dict(head_dim=96, value_dim=128),
    "decodes, 40 and 200, features": DECODE | FEATURES | dict(head_dim=40, value_dim=200),
    "drafts, 192 and 128": DRAFTS | dict(head_dim=192, value_dim=128),
    "drafts, 72 and 136, features, page 24": DRAFTS | FEATURES | dict(head_dim=72, value_dim=136, page_size=24),
    "drafts, 128 and 192, trees": DRAFTS | dict(head_dim=128, value_dim=192, qq_bias=4, tree=True),
    "drafts, 192 and 128, new": DRAFTS | dict(head_dim=192, value_dim=128, new=True, sinks=True),
    "drafts, 192 and 128, e4m3 out, gate, ragged table": DRAFTS
    | dict(head_dim=192, value_dim=128, out_dtype=E4M3, gate=True, table="ragged"),
    "rows, 192 and 128": DECODE | ROWS | dict(head_dim=192, value_dim=128),
    "rows, 64 and 128, features": DECODE | ROWS | FEATURES | dict(head_dim=64, value_dim=128),
    "rows, 256 and 64, softcap": DECODE | ROWS | dict(head_dim=256, value_dim=64, softcap=20.0, lse=False),
    "rows, 64 and 256, window to both sides": DECODE
    | ROWS
    | dict(head_dim=64, value_dim=256, causal=False, window_size=(150, 20)),
    "rows, 192 and 128, new": DRAFTS | ROWS | dict(head_dim=192, value_dim=128, new=True),
    "a lone decode, 192 and 128": LONE | dict(head_dim=192, value_dim=128, sinks=True),
    "a lone decode, 128 and 256": LONE | dict(head_dim=128, value_dim=256),
    "lone rows, 192 and 128": LONE | ROWS | dict(head_dim=192, value_dim=128),
}
OF_512: dict[str, Any] = dict(head_dim=512)
FEW: dict[str, Any] = dict(heads=16, kv_heads=4)
WIDE: dict[str, dict[str, Any]] = {
    "decodes, 512": DECODE | FEW | OF_512,
    "decodes, 512, features, float16, page 8": DECODE
    | FEW
    | FEATURES
    | OF_512
    | dict(dtype=torch.float16, page_size=8),
    "decodes, 264, HND, page 64": DECODE | FEW | dict(head_dim=264, layout="HND", page_size=64),
    "decodes, 512 and 128": DECODE | FEW | dict(head_dim=512, value_dim=128),
    "decodes, 512 and 256, window to both sides": DECODE
    | FEW
    | dict(head_dim=512, value_dim=256, causal=False, window_size=(150, 20)),
    "decodes, 128 and 512, features": DECODE | FEW | FEATURES | dict(head_dim=128, value_dim=512),
    "decodes, 320 and 400, one buffer, ragged table": DECODE
    | FEW
    | dict(head_dim=320, value_dim=400, shared_buffer=True, table="ragged"),
    "drafts, 512": DRAFTS | FEW | OF_512,
    "drafts, 512, trees, gate": DRAFTS | FEW | OF_512 | dict(qq_bias=4, tree=True, gate=True),
    "drafts, 512, new": DRAFTS | FEW | OF_512 | dict(new=True, window_size=(200, -1)),
    "drafts, 512, of 8 heads": DRAFTS | OF_512 | dict(heads=32, kv_heads=4),
    "drafts, 512, of 8 heads, new, features": DRAFTS | FEATURES | OF_512 | dict(heads=32, kv_heads=4, new=True),
    "decodes in few pieces, 512": FEW_PIECES | FEW | OF_512,
    "a lone decode, 512": LONE | FEW | OF_512 | dict(sinks=True),
    "a lone decode, 512, of 16 heads": LONE | OF_512 | dict(heads=64, kv_heads=4),
}
MLA: dict[str, Any] = dict(heads=16, kv_heads=1, head_dim=576, value_dim=512, latent=True)
LATENTS: dict[str, dict[str, Any]] = {
    "decodes, latents of 8 heads": DECODE | MLA | dict(heads=8),
    "decodes, latents, page 64": DECODE | MLA | dict(page_size=64),
    "decodes, latents, features, float16, page 8": DECODE | MLA | FEATURES | dict(dtype=torch.float16, page_size=8),
    "decodes, latents of 32 heads, HND": DECODE | MLA | dict(heads=32, layout="HND"),
    "decodes, latents of 12 heads, wider rows": DECODE | MLA | dict(heads=12, shared_buffer=True),
    "decodes, latents of 512": DECODE | MLA | dict(head_dim=512),
    "decodes, latents of 512, of 32 heads, window to both sides": DECODE
    | MLA
    | dict(head_dim=512, heads=32, causal=False, window_size=(150, 20)),
    "decodes, latents of 320 and 256, gate": DECODE | MLA | dict(head_dim=320, value_dim=256, gate=True),
    "decodes, latents of 192 and 128": DECODE | MLA | dict(head_dim=192, value_dim=128),
    "decodes, latents of 560 and 440": DECODE | MLA | dict(head_dim=560, value_dim=440),
    "decodes, latents of 5 KV heads": DECODE | MLA | dict(heads=20, kv_heads=5, head_dim=80, value_dim=64),
    "decodes in few pieces, latents": FEW_PIECES | MLA,
    "decodes in few pieces, latents of 32 heads": FEW_PIECES | MLA | dict(heads=32),
    "decodes in few pieces, latents of 8 heads, features": FEW_PIECES | MLA | FEATURES | dict(heads=8),
    "40 decodes, more than a warp's threads, latents": ragged(*[(1, 5 * i) for i in range(40)])
    | dict(decode_form=True)
    | MLA,
    "drafts, latents of 8 heads": DRAFTS | MLA | dict(heads=8),
    "drafts, latents of 4 heads, trees": DRAFTS | MLA | dict(heads=4, qq_bias=4, tree=True),
    "drafts, latents of 8 heads, new, features": DRAFTS | MLA | FEATURES | dict(heads=8, new=True),
    "drafts, latents of 512, new, ragged table": DRAFTS
    | MLA
    | dict(heads=8, head_dim=512, new=True, table="ragged", window_size=(200, -1)),
    "a lone decode, latents": LONE | MLA | dict(sinks=True),
    "a lone decode, latents of 32 heads": LONE | MLA | dict(heads=32),
    "a lone decode, latents of 512": LONE | MLA | dict(head_dim=512, out_dtype=E4M3),
}
TWO_CONSUMERS: dict[str, dict[str, Any]] = {
    "decodes, latents of 64 heads": DECODE | MLA | dict(heads=64, page_size=64),
    "decodes, latents of 40 heads, features": DECODE | MLA | FEATURES | dict(heads=40),
    "decodes, latents of 512, of 64 heads": DECODE | MLA | dict(heads=64, head_dim=512, gate=True),
    "drafts, latents": DRAFTS | MLA | dict(sinks=True),
    "drafts, latents, new, trees": DRAFTS | MLA | dict(new=True, qq_bias=4, tree=True),
    "drafts, latents of 320 and 256, of 12 heads": DRAFTS | MLA | dict(heads=12, head_dim=320, value_dim=256),
    "decodes, latents of 128 heads": DECODE | MLA | FEATURES | dict(heads=128),
    "drafts, latents of 32 heads": DRAFTS | MLA | dict(heads=32),
    "drafts, latents of 24 heads, new": DRAFTS | MLA | dict(heads=24, new=True, window_size=(200, -1)),
    "drafts of 2, latents of 128 heads": ragged((2, 300), (1, 70), (2, 2))
    | MLA
    | dict(heads=128, bounds=True, padding=3),
    "a lone decode, latents of 128 heads": LONE | MLA | dict(heads=128),
    "a lone decode, latents of 64 heads": LONE | MLA | dict(heads=64),
}
SEVERAL = ragged((40, 300), (1, 200), (70, 70), (0, 9), (9, 130))  # queries in more blocks than one
LATENT_CHUNKS: dict[str, dict[str, Any]] = {
    "chunks, latents": SEVERAL | MLA | dict(sinks=True, padding=2),
    "chunks, latents of 12 heads, features": SEVERAL | MLA | FEATURES | dict(heads=12, page_size=8),
    "chunks, latents of 128 heads, new": ragged((9, 200), (2, 64)) | MLA | dict(heads=128, new=True, gate=True),
}
OF_E4M3: dict[str, Any] = MLA | dict(cache_dtype=E4M3, scales="float")
FP8_LATENTS: dict[str, dict[str, Any]] = {
    "decodes, e4m3 latents, page 64": DECODE | OF_E4M3 | dict(page_size=64),
    "decodes, e4m3 latents of 8 heads, features": DECODE | OF_E4M3 | FEATURES | dict(heads=8),
    "decodes, e4m3 latents of 32 heads, float16, page 8": DECODE
    | OF_E4M3
    | dict(heads=32, dtype=torch.float16, page_size=8),
    "decodes, e4m3 latents of 512, gate": DECODE | OF_E4M3 | dict(head_dim=512, gate=True),
    "decodes, e4m3 latents of 320 and 256, HND": DECODE
    | OF_E4M3
    | dict(head_dim=320, value_dim=256, layout="HND", scales="tensor"),
    "decodes, e4m3 latents of 192 and 128, wider rows": DECODE
    | OF_E4M3
    | dict(head_dim=192, value_dim=128, shared_buffer=True),
    "decodes, e5m2 latents": DECODE | OF_E4M3 | dict(cache_dtype=E5M2),
    "decodes, all e4m3, latents": DECODE | OF_E4M3 | dict(dtype=E4M3, out_dtype=E4M3, scales="tensor"),
    "drafts, e4m3 latents of 8 heads, window": DRAFTS | OF_E4M3 | dict(heads=8, window_size=(200, -1)),
    "drafts, e4m3 latents of 4 heads, trees": DRAFTS | OF_E4M3 | dict(heads=4, qq_bias=4, tree=True, sinks=True),
    "a lone decode, e4m3 latents": LONE | OF_E4M3,
    "decodes in few pieces, e4m3 latents of 32 heads": FEW_PIECES | OF_E4M3 | dict(heads=32),
    "decodes, e4m3 latents of 64 heads": DECODE | OF_E4M3 | dict(heads=64),
    "decodes, e4m3 latents of 64 heads, float16": DECODE | OF_E4M3 | dict(heads=64, dtype=torch.float16),
    "decodes, e4m3 latents of 512, of 40 heads, features": DECODE | OF_E4M3 | FEATURES | dict(heads=40, head_dim=512),
    "drafts, e4m3 latents, ragged table": DRAFTS | OF_E4M3 | dict(table="ragged", window_size=(200, -1)),
    "drafts, e4m3 latents of 32 heads": DRAFTS | OF_E4M3 | dict(heads=32),
    "12 tokens, e4m3 latents, features": ragged((12, 200), (1, 70), (3, 3)) | OF_E4M3 | FEATURES | dict(bounds=True),
    "a lone decode, e4m3 latents of 128 heads": LONE | OF_E4M3 | dict(heads=128),
}
CASES = TWO_WIDTHS | WIDE | LATENTS | TWO_CONSUMERS | LATENT_CHUNKS | FP8_LATENTS
QUICK = ("decodes, 192 and 128", "rows, 64 and 128, features", "drafts, 512", "drafts, latents of 8 heads")


def assert_wide(case: Case) -> None:
    problem = problem_of(build(case, DEVICE))
    assert is_wide(problem)
    launches = planner.plan(problem).launches
    assert all(x.pipe is not None and x.pipe.SHARES for x in launches)


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.quick] * (x in QUICK)) for x in CASES])
def test_few_rows_of_two_widths_or_wide_heads_give_the_results_of_the_reference(name: str) -> None:
    case = sized(name, **CASES[name])
    assert_wide(case)
    run(case, DEVICE)
    run(case, DEVICE)  # with counters as the first run left them
