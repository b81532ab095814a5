"""Users' functions for which portable kernels prefetch no tiles: Triton cannot move loads that depend on scores."""

from __future__ import annotations

import pytest

from paged_attn.kernels.common.score_mod import address_depends_on_first_load
from tests.support.own_process import run

SCRIPT = """
from paged_attn.kernels.common.score_mod import ScoreMod, loads_by_score, type_of
from tests.support.score_mods import MODS
for name, mod in MODS.items():
    if loads_by_score(ScoreMod(mod.triton, tuple(type_of(x) for x in mod.args(4, "cpu")))):
        print(name)
"""


COMPILE = """
from tests.support.cases import Case, build
from tests.machine_code import compile_calls
from tests.support.variants import PREFILL
import paged_attn

CALLS = dict(score_mod="curve"), dict(score_mod="relative", positions="tree", qq_bias=32, tree=True)
for fields in CALLS:
    given = build(Case("called", **PREFILL | fields), filled=False)
    for _, kernel in compile_calls("sm90", [("called", lambda: paged_attn.paged_attention(**given))]):
        print(kernel.name)
"""


def test_prefills_whose_functions_load_by_score_or_by_position_beside_a_bias_compile_for_wgmma() -> None:
    """Up to Triton 3.8 neither would as other loops are compiled."""
    assert run(COMPILE, TRITON_INTERPRET="0", PAGED_ATTN_HOPPER="0") == "attention_kernel\n" * 2


def test_only_a_function_whose_loads_depend_on_the_score_loads_by_it() -> None:
    assert run(SCRIPT, TRITON_INTERPRET="0") == "curve\n"


FIRST = "    %1 = tt.load %0 : tensor<16x!tt.ptr<f32>>\n    %2 = arith.fptosi %1 : tensor<16xf32> to tensor<16xi32>\n"


@pytest.mark.parametrize(
    ("rest", "depends"),
    [
        ("%3 = tt.addptr %arg1, %2 : tensor<16x!tt.ptr<f32>>\n    %4 = tt.load %3 : tensor<16xf32>", True),
        ("%3 = tt.addptr %arg1, %arg2 : tensor<16x!tt.ptr<f32>>\n    %4 = tt.load %3 : tensor<16xf32>", False),
        ("%3 = scf.if %2 -> (tensor<16xf32>) {", True),
        ("tt.store %0, %1 : tensor<16x!tt.ptr<f32>>", False),
    ],
    ids=["an address of it", "an address of another", "a branch on it", "a store of it"],
)
def test_what_depends_on_the_first_load_is_told_by_names(rest: str, depends: bool) -> None:
    assert address_depends_on_first_load(f"{FIRST}    {rest}\n") is depends
