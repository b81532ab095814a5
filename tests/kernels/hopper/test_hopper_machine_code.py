"""What compilers make of the Hopper kernels: their loops do what was meant, and no more.  Needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import triton

from tests.kernels import digests
from tests.machine_code import ARITHMETIC, SHARED, compiled
from tests.support import variants
from tests.support.hopper_complaints import (
    CUT,
    EXACT,
    IN_TURN,
    IN_WORDS,
    MEET,
    MERGED,
    POLYNOMIAL,
    RESULTS,
    complaints,
    merge_complaints,
    products,
)

FOR_NVIDIA = pytest.mark.skipif(
    "nvidia" not in triton.backends.backends, reason="this Triton does not compile for nvidia"
)

THOROUGH_PARTS = 8  # processes of less than a minute each, for workers to share
# Variants of the Hopper dialect: every shape of pipe, and every feature.
HOPPER = (
    "prefill window sinks", "prefill page 128", "prefill head_dim 64", "prefill head_dim 256", "two lists",
    "speculate 32", "speculate 64", "speculate 32 head_dim 64", "speculate 32 e4m3, no lse",
    "lone decode", "lone decode e4m3", "lone draft", "draft of 4", "one decode group 48", "one draft head_dim 256",
    "draft 16", "of 512 features", "of 512 head_dim 64", "of 512 head_dim 192",
    "decode split all fp8", "of 512 e4m3 head_dim 64", "of 512 e4m3 head_dim 256", "x-packed", "prefill new",
    "prefill softcap",
    "decode of 12", "draft of 12",
    "long", "long head_dim 64", "long head_dim 64, no window", "long fp16", "long alibi",
    "long softcap", "long exact softcap", "long softcap of 10", "long exact softcap of 10", "one chunk",
    "prompts", "prompts of 2048", "prompts window sinks", "prompts head_dim 64 alibi", "prompts new softcap",
    "prefills e4m3, no lse", "prefills e4m3 head_dim 64", "prefills e4m3 head_dim 64, no lse", "mixed e4m3, no lse",
    "prompts x-packed", "prompts x-packed head_dim 64", "chunk x-packed head_dim 256", "chunk x-packed new",
    "long x-packed",
    "narrow", "narrow head_dim 64", "narrow e4m3", "narrow e4m3 head_dim 64, no lse", "narrow new",
    "narrow new head_dim 64", "wide",
    "draft of 8 e4m3", "draft of 8 e4m3 head_dim 256", "draft of 8 all fp8", "draft of 8 x-packed",
    "draft of 8 e4m3 x-packed", "chunk e4m3 head_dim 256",
    "prompts group 3", "prompts group 12", "chunk group 7", "two lists group 3", "long group 3",
    "group 3 head_dim 64", "group 3 head_dim 256", "group 3 all fp8", "two lists new", "two lists softcap", "mixed",
    "long gate", "long token scales", "long chunks", "long spans window", "speculate 32 mask", "lone mask",
    "long windows by head", "lone windows by head",
    "of 512 gate",
    "columns of int8 by token", "columns of int4", "columns of int4 head_dim 64", "draft of 8 int8 by token",
    "draft of 8 int4",
)  # fmt: skip

INVARIANT = ("invariant 32", "invariant 4096", "invariant 1")  # which are compiled once for two tests' claims
# Users' functions have loops of their own, test_score_mod_machine_code.py, and two widths are not served so by default,
# test_wide_blocks_machine_code.py.
NAMES = [name for name, _ in variants.calls(HOPPER) if " user " not in name and " and " not in name]
NAMES = [name for name in NAMES if name not in INVARIANT]
# A decode and a prefill that have digests.  `make thorough` compiles the others.
ALWAYS = ("lone decode", "prompts of 2048")
THOROUGH = [name for name in NAMES if name not in ALWAYS]


def slices() -> Iterator[Any]:
    """Names of variants, a process for each list."""
    yield pytest.param([*ALWAYS], id="plain")
    for part in range(THOROUGH_PARTS):
        yield pytest.param(THOROUGH[part::THOROUGH_PARTS], id=f"thorough-{part}", marks=pytest.mark.thorough)


def test_every_variant_is_compiled_once() -> None:
    assert {*ALWAYS} <= {*digests.PLAIN["hopper"]}
    assert sorted(name for x in slices() for name in x.values[0]) == sorted(NAMES)


@FOR_NVIDIA
@pytest.mark.long
@pytest.mark.parametrize("names", list(slices()))
def test_hopper_kernels_keep_their_loops_lean(names: list[str]) -> None:
    found = compiled("sm90", *names, "--exactly")
    merging = [x for x in found if x["kernel"] == "merge_blocks_kernel"]
    found = [x for x in found if x not in merging]
    assert {x["kernel"] for x in found} <= {"blocks_kernel", "shares_kernel", "mixed_kernel"}
    assert {x["variant"] for x in found} == set(names)
    assert {x["variant"] for x in merging} == MERGED & {x["variant"] for x in found}
    wrong = [f"{x['variant']}: {text}" for x in found for text in complaints(x)]
    wrong += [f"{x['variant']}: {text}" for x in merging for text in merge_complaints(x)]
    assert not wrong, "\n".join(wrong)
    assert digests.changed("hopper", [*found, *merging]) == []


@FOR_NVIDIA
@pytest.mark.thorough
def test_hopper_kernels_of_invariant_calls_do_the_same_arithmetic() -> None:
    """Decodes and prefills, in shares of one consumer and of two, and in whole blocks."""
    kernels = compiled("sm90", *INVARIANT, "--exactly")
    assert {x["kernel"] for x in kernels} <= {"blocks_kernel", "shares_kernel"}
    assert [f"{x['variant']}: {text}" for x in kernels for text in complaints(x)] == []
    assert digests.changed("hopper", kernels) == []
    found = {
        facts["variant"]: [
            {name: loop.get(name, 0) for name in ARITHMETIC}
            for loop in facts["innermost"]
            if products(loop) >= 8 and loop.get("MUFU", 0) >= 32
        ]
        for facts in kernels
    }
    assert {name: len(loops) for name, loops in found.items()} == {
        "invariant 32": 2,
        "invariant 4096": 2,
        "invariant 1": 1,
    }
    loop = found["invariant 32"][0]
    # of the two rows of a thread, one has no query in a decode, and nobody wants its sum
    found["invariant 1"][0]["FADD"] += 32
    found["invariant 1"][0]["FMUL"] += 1
    assert all(loop == other for loops in found.values() for other in loops), found


@FOR_NVIDIA
@pytest.mark.thorough  # test_hopper_plan.py counts the same bytes
def test_hopper_kernels_fit_with_the_largest_heads_and_boxes() -> None:
    found = compiled("sm90", "large boxes", "--no-sass")
    shared = {x["variant"]: x["shared"] for x in found if x["kernel"] == "shares_kernel"}
    assert len(shared) == 3
    assert max(shared.values()) <= SHARED["sm90"], shared


@FOR_NVIDIA
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("variant", "ahead", "waits"),
    [
        ("few keys before blocks", "attention_kernel", None),  # portable kernels follow as any kernel does
        ("many heads before blocks", "attention_kernel", None),
        ("parts behind decodes", "shares_kernel", 1),
    ],
)
def test_blocks_begin_beside_a_launch_before_them_and_end_behind_it(
    variant: str, ahead: str, waits: int | None
) -> None:
    found = {x["kernel"]: x for x in compiled("sm90", variant)}
    if "merge_blocks_kernel" in found:
        assert not list(merge_complaints(found["merge_blocks_kernel"]))
    assert not any(x["spilled"] for x in found.values())
    first, blocks = (found[name]["operations"] for name in (ahead, "blocks_kernel"))
    assert (first.get("PREEXIT"), first.get("ACQBULK")) == (1, waits)
    assert (blocks.get("PREEXIT"), blocks.get("ACQBULK")) == (None, 1)
    assert "UTMALDG" in found["blocks_kernel"]["before_waiting"]


def test_a_hopper_kernel_that_lacks_everything_is_complained_about() -> None:
    loop = dict(HGMMA=16, MUFU=64, LDL=3)
    facts = dict(
        variant="prefill all fp8", kernel="blocks_kernel", shared=232449, spilled=129, advice=["serialised"],
        overtaken_readers=1, reused_barriers=1, unwritten=1, boxes_in_loops_of_their_own=1,
        operations={"F2F": 1, "PREEXIT": 1}, before_waiting=["LDG"], innermost=[loop], under_products=[],
        code_bytes=116 << 10, loops_in_turn=0, named_barriers=[0, 14],
    )  # fmt: skip
    found = " ".join(text.split()[0] for text in complaints(facts))
    assert (
        found == "takes spills has is lets waits stores uses uses does sends spills waits waits rescales converts does"
    )
    divided = facts | dict(
        variant="long exact softcap of 10", innermost=[dict(HGMMA=12, MUFU=133, FMUL=196, VOTE=1, BAR=1)]
    )
    under = dict(maxima=38, maxima_always=38, exponentials=2, functions_always=101)
    found = " ".join(complaints(divided | dict(under_products=[under])))
    assert "looks for maxima before it weighs" in found
    assert "takes 101 special functions for 32 scores of a thread" in found
    assert "multiplies 196 times for 32 scores of a thread" in found
    loop = dict(HGMMA=16, MUFU=198, FMUL=197, FFMA=265, VOTE=1, BAR=3)
    capped = facts | dict(variant="prefill softcap", innermost=[loop])
    under = dict(maxima=72, maxima_always=5, exponentials=132, functions_always=69)
    found = " ".join(complaints(capped | dict(under_products=[under])))
    assert "looks for maxima before it weighs" in found
    assert "takes 69 special functions for 64 scores of a thread" in found
    assert "multiplies 197 times for 64 scores of a thread" in found
    assert "adds 265 products for 64 scores of a thread" in found
    assert "has warpgroups wait for each other 3 times a tile" in found
    biased = facts | dict(variant="long alibi", innermost=[dict(HGMMA=12, MUFU=66, FFMA=132, FMUL=64, VOTE=1)] * 3)
    assert "adds 132 products for 32 scores of a thread" in " ".join(complaints(biased))
    twice = facts | dict(variant="long alibi", innermost=[dict(HGMMA=12, MUFU=66, FFMA=68, FMUL=64, VOTE=2)] * 3)
    assert "rescales where maxima stay" in " ".join(complaints(twice))
    late = facts | dict(variant="prompts", results_under_products=15)
    assert "exchanges 15 results under a product" in " ".join(complaints(late))
    coarse = facts | dict(innermost=[dict(QGMMA=12, MUFU=2, FFMA=196, FMUL=64, VOTE=1)] * 2)
    coarse |= dict(variant="mixed all fp8, no lse")
    assert "adds 196 products for 64 scores of a thread" in " ".join(complaints(coarse))
    apart = dict(variant="speculate 64", in_fours={"LDG.E.128": 16, "STG.E.128": 15})
    assert "in fours: {'LDG.E.128': 16, 'STG.E.128': 15}" in " ".join(complaints(facts | apart))
    halves = dict(variant="speculate 32 head_dim 64", in_fours={"LDG.E.128": 8, "STG.E.128": 8})
    assert "in fours" not in " ".join(complaints(facts | halves))
    facts = facts | dict(in_fours={"LDG.E.128": 16, "STG.E.128": 16})
    assert "sends products in turn in 0 loops" in " ".join(complaints(facts | dict(variant="speculate 64")))
    named = {
        *EXACT,
        *POLYNOMIAL,
        *IN_WORDS,
        *IN_TURN,
        *CUT,
        *(x["variant"] for x in (biased, late, coarse)),
        *MEET,
        *RESULTS,
    }
    assert named <= set(variants.HOPPER | variants.ATTENTION)
