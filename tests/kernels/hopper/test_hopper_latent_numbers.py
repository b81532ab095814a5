"""bfloat16 queries of any magnitude over fp8 latents, whose products are of float16: as columns and as rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import paged_attn
from paged_attn.planning import planner
from tests.support.cases import E4M3, E5M2, Case, build, compare, problem_of
from tests.support.hopper_cases import DEVICE, ragged, sized

pytestmark = [pytest.mark.simulated, pytest.mark.hopper, pytest.mark.usefixtures("on_hopper")]

RANK, WIDTH = 512, 576  # of values, and of keys, which hold them
DECODE = ragged((1, 300), (1, 0), (1, 1000), (1, 1)) | dict(decode_form=True)
LONE = ragged((1, 2500)) | dict(decode_form=True)  # cut over all programs
DRAFTS = ragged((4, 500), (3, 3), (0, 9), (2, 1), (4, 260)) | dict(bounds=True)
FEATURES: dict[str, Any] = dict(window_size=(200, -1), softcap=20.0, sinks=True)
MLA: dict[str, Any] = dict(
    heads=16, kv_heads=1, head_dim=WIDTH, value_dim=RANK, latent=True, cache_dtype=E4M3, scales="float"
)
OF_64: dict[str, Any] = MLA | dict(heads=64)  # so many that they are rows
CASES: dict[str, dict[str, Any]] = {
    "columns": DECODE | MLA,
    "columns, cut, sinks": LONE | MLA | dict(sinks=True),
    "columns, features, e5m2": DECODE | MLA | FEATURES | dict(cache_dtype=E5M2),
    "columns, nothing behind values": DECODE | MLA | dict(head_dim=RANK),
    "columns of 32 heads, values of 256 dims": DECODE | MLA | dict(heads=32, head_dim=320, value_dim=256),
    "columns of several tokens, tree": DRAFTS | MLA | dict(heads=4, qq_bias=4, tree=True),
    "rows": DECODE | OF_64,
    "rows, cut, sinks": LONE | OF_64 | dict(sinks=True),
    "rows, features": DECODE | OF_64 | FEATURES | dict(heads=40),
    "rows, nothing behind values": DECODE | OF_64 | dict(head_dim=RANK),
    "rows of several tokens": DRAFTS | MLA,
    "two blocks of rows": ragged((8, 300), (7, 90)) | MLA | dict(bounds=True),
}
BOTH = ("columns", "rows")


def built(name: str, **changes: Any) -> tuple[Case, dict[str, Any]]:
    """A case and its inputs, of which bfloat16 queries become float16."""
    case = sized(name, **CASES[name] | changes)
    inputs = build(case, DEVICE)
    (launch,) = planner.plan(problem_of(inputs)).launches
    assert launch.pipe is not None
    assert launch.shape.NORMALIZED
    assert (launch.pipe.COLUMNS > 0) == name.startswith("columns")
    return case, inputs


def by_head(exponents: list[int], case: Case) -> torch.Tensor:
    """Powers of two [heads, 1], these in turn."""
    powers = 2.0 ** torch.tensor(exponents, device=DEVICE, dtype=torch.float32)
    return powers.repeat(-(-case.heads // len(exponents)))[: case.heads, None]


@pytest.mark.parametrize("exponent", [60, -60])
@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.quick] * (x in BOTH)) for x in CASES])
def test_queries_of_any_magnitude_have_scores_of_any(name: str, exponent: int) -> None:
    """The scale of scores takes back what is beyond float16: heads' scores are of every ordinary size, some of one key.

    Of some heads the first half of the values is larger than other dims by 2^3, of some the second, of some the rest,
    so that a row's power of two is found in each.
    """
    case, inputs = built(name, softmax_scale=WIDTH**-0.5 * 2.0**-exponent)
    q = inputs["q"].float() * by_head([exponent, exponent - 2, exponent + 1, exponent + 6, exponent - 20], case)
    for part, dims in enumerate((slice(0, 256), slice(256, RANK), slice(RANK, None))):
        q[:, part::4, dims] *= 2.0**3
        q[:, part::4] *= 2.0**-3
    inputs["q"] = q.to(torch.bfloat16)
    out, lse = paged_attn.paged_attention(**inputs)
    compare(case, out, lse, inputs)


@pytest.mark.parametrize("name", BOTH)
def test_scores_of_any_magnitude_over_fp8_latents(name: str) -> None:
    """Heads of one block that differ by 2^100, over keys that are all alike: each weighs the same."""
    case, inputs = built(name)
    keys = inputs["k_cache"].float()
    keys[:] = keys[inputs["page_table"][0, 0], 0]
    inputs["k_cache"] = keys.to(E4M3)
    inputs["v_cache"] = inputs["k_cache"][..., :RANK]
    inputs["q"] *= by_head([40, 17, 13, 3, 0, -14, -30, -60], case).to(torch.bfloat16)
    out, lse = paged_attn.paged_attention(**inputs)
    compare(case, out, lse, inputs)


@pytest.mark.parametrize("dim", [5, RANK + 5])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", BOTH)
def test_a_query_that_is_no_number_gives_none_over_fp8_latents(name: str, poison: float, dim: int) -> None:
    # a small scale, or infinity may come back where scores overflow
    case, inputs = built(name, softmax_scale=1e-3)
    paged_attn.paged_attention(**inputs)
    before = inputs["out"].clone()
    poisoned = torch.zeros(len(before), case.heads, dtype=torch.bool, device=DEVICE)
    poisoned[(0, 2), 1::7] = True
    inputs["q"][..., dim][poisoned] = poison
    paged_attn.paged_attention(**inputs)
    assert inputs["out"][poisoned].isnan().all()
    assert torch.equal(inputs["out"][~poisoned], before[~poisoned])
