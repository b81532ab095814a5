"""What compilers make of each kernel that ships: it fits, does not spill, keeps loads in flight.  Needs no GPU."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from paged_attn import launch
from tests import machine_code, variants
from tests.machine_code import MULTIPROCESSORS as TARGETS

PARTS = 4  # processes per target: so many that workers share them evenly, so few that imports do not count
# All variants for sm90, half of them for each of the others, so that every variant has one or two more targets.
HALVES = {"sm80": (0, 2), "sm100": (1, 3), "gfx942": (0, 3)}
SLICES = [(target, i) for target in TARGETS for i in HALVES.get(target, range(PARTS))]

# Bytes of shared memory that one program may have.
SHARED = {"sm80": 166912, "sm90": 232448, "sm100": 232448, "gfx942": 65536}

# Spilled bytes per thread that a prefill variant may have: none on sm90, the one target that tiles were chosen on, and
# today's worst elsewhere, where operands take registers too.
PREFILL_MAY_SPILL = {"sm80": 472, "sm90": 0, "sm100": 120, "gfx942": 564}
# float32 at 256 dims, which nobody serves: three products of split operands take more than there is.  Shares of large
# blocks, which end in two ways; sm90 leaves them to the Hopper kernels.  A table of pages of 12, at 128 registers.
NAMED_MAY_SPILL = {
    "prefill fp32 head_dim 256": 32, "prefill split": 40, "decode split e4m3 page 12": 8,
    "prefill invariant split": 312,  # 8 of them since `finish` keeps reciprocals of two rows instead of dividing
}  # fmt: skip
OTHERS_MAY_SPILL = {"sm80": 8}  # fp8 decoded by hand
# Pieces of a fixed size are folded into a second state, which waits in memory while a piece is attended to.
INVARIANT_MAY_SPILL = {"sm80": 488, "sm90": 304, "sm100": 336, "gfx942": 108}
# What of that reaches the loop over a piece's keys on sm90, in loads of 4 bytes a tile.
INVARIANT_MAY_RELOAD = 4

# Variants with a decode kernel of as many rows as a warp group's product takes, 64.
WIDE_DECODE = {"decode group 64"} | {name for name in variants.ATTENTION if name.startswith("decode invariant")}

# A branch between the two products serialises them; the query-query bias is such a branch, and only few tiles take it.
# The other has one for its window.
MAY_SERIALISE = {"prefill features", "prefill invariant features"}

# What decides a row's bits in the loop over keys: a decode's kernel must do exactly what a prefill's does.
ARITHMETIC = ("FADD", "FMUL", "FFMA", "MUFU", "FMNMX", "SHFL", "F2FP", "HGMMA", "HMMA")


def complaints(target: str, facts: dict[str, Any]) -> Iterator[str]:
    """What a compiled kernel lacks."""
    prefill = facts["variant"].startswith("prefill")
    if facts["shared"] > SHARED[target]:
        yield f"takes {facts['shared']} bytes of shared memory, there are {SHARED[target]}"
    allowed = PREFILL_MAY_SPILL[target] if prefill else OTHERS_MAY_SPILL.get(target, 0)
    allowed = max(allowed, NAMED_MAY_SPILL.get(facts["variant"], 0))
    if "invariant" in facts["variant"]:
        allowed = max(allowed, INVARIANT_MAY_SPILL[target])
    if facts["spilled"] > allowed:
        yield f"spills {facts['spilled']} bytes at {facts['registers']} registers, allowed are {allowed}"
    if target == "sm90" and not facts["kernel"].startswith(("merge", "write")):
        yield from _loop_complaints(facts, prefill)


def _loop_complaints(facts: dict[str, Any], prefill: bool) -> Iterator[str]:
    """What the loops over keys lack on sm90."""
    product = "HGMMA" if prefill or facts["variant"] in WIDE_DECODE else "HMMA"
    if "fp32" in facts["variant"]:
        product = "HMMA"  # three TF32 products of few rows
    if facts["variant"] not in MAY_SERIALISE:
        yield from facts["advice"]
    if not facts["loops"] or not facts["pipelines"]:
        yield "has no loop with a matrix product"
    for loop in facts["loops"]:
        if not loop.get(product):
            yield f"has a loop without {product}"
        if not loop.get("LDGSTS") and not loop.get("UTMALDG"):
            yield "has a loop without LDGSTS or UTMALDG"
    for buffers in facts["pipelines"]:
        if not prefill and sum(tiles >= 2 for tiles, *_ in buffers) < 2:
            yield f"has a loop without two K and two V tiles in flight, but {buffers}"


def compiled(target: str, *args: str, **environment: str) -> list[dict[str, Any]]:
    """The reports of tests.machine_code, from a process in which kernels are compiled."""
    command = [sys.executable, "-m", "tests.machine_code", target, *args]
    environment = os.environ | {"TRITON_INTERPRET": "0"} | environment
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stderr[-4000:]}"
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(("target", "part"), SLICES)
def test_variants_fit_and_do_not_spill_and_keep_loads_in_flight(target: str, part: int) -> None:
    needs = "nvidia" if target.startswith("sm") else "amd"
    if needs not in triton.backends.backends:
        pytest.skip(f"this Triton does not compile for {needs}")
    sass = [] if target == "sm90" else ["--no-sass"]
    found = compiled(target, "--part", str(part), str(PARTS), *sass, PAGED_ATTN_HOPPER="0")
    assert {x["variant"] for x in found} == {name for name, _ in variants.calls()[part::PARTS]}
    wrong = [f"{x['variant']}: {x['kernel']} {text}" for x in found for text in complaints(target, x)]
    assert not wrong, f"{target}:\n" + "\n".join(dict.fromkeys(wrong))


# Of the Hopper dialect: every shape of pipe, and every feature.
HOPPER = (
    "prefill window sinks", "prefill page 128", "prefill head_dim 64", "prefill head_dim 256", "mixed",
    "speculate 32", "speculate 64", "draft 16", "decode features", "decode head_dim 192",
    "decode split all fp8", "decode e4m3 head_dim 256", "prefill new", "prefill softcap",
    "invariant 32", "invariant 4096", "invariant 1", "decode of 12", "draft of 12",
)  # fmt: skip
# Loops over keys of 64 rows, two where two consumers have one each, and of few rows.
ROWS = {
    "draft 16": 1, "speculate 32": 1, "speculate 32 tree": 1, "speculate 64": 2, "draft of 12": 1, "invariant 1": 1,
    "invariant 32": 2,
}  # fmt: skip
COLUMNS = {"mixed": 1, "mixed new": 1, "mixed softcap": 1}
# Bytes that a consumer keeps in memory from one block to the next, as beside scores that are kept to weigh them again.
HOPPER_MAY_SPILL = {"mixed": 160, "mixed new": 160, "mixed e4m3": 184, "speculate 64": 232, "invariant 32": 288}
# Of machine code, in KB: what a launch reads from memory before the first run, and after every flush of the L2.
SHARES_CODE, BLOCKS_CODE = 44, 170
MORE_CODE = {
    "draft 16": 64, "speculate 32": 80, "speculate 32 tree": 104, "speculate 64": 148, "mixed": 176, "mixed new": 196,
    "mixed softcap": 168, "draft of 12": 68, "invariant 1": 86, "invariant 32": 162,
}  # fmt: skip
SOFTCAP_FUNCTIONS = 3 * 32 + 4  # two exponentials and a reciprocal a score, and what rows need
SOFTCAP_MULTIPLIES = 32 + 64 + 4  # the power of a score, and results; a division or what saves one multiplies, too
# Registers that a loop over keys stores and loads again: beside code for few rows, with a warpgroup more, or beside the
# results of 256 dims and the scores of a tile.
HOPPER_MAY_RELOAD = {"mixed": 24, "mixed new": 24, "mixed e4m3": 10, "speculate 64": 2, "prefill head_dim 256": 1}


@pytest.mark.skipif("nvidia" not in triton.backends.backends, reason="this Triton does not compile for nvidia")
@pytest.mark.parametrize("part", range(2))
def test_hopper_kernels_keep_their_loops_lean(part: int) -> None:
    words = HOPPER[part::2]
    found = compiled("sm90", *words)
    assert {x["kernel"] for x in found} <= {"blocks_kernel", "shares_kernel"}
    assert {x["variant"] for x in found} >= set(words)
    wrong = [f"{x['variant']}: {text}" for x in found for text in _hopper_complaints(x)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.skipif("nvidia" not in triton.backends.backends, reason="this Triton does not compile for nvidia")
def test_hopper_kernels_of_invariant_calls_do_the_same_arithmetic() -> None:
    """Decodes and prefills, in shares of one consumer and of two, and in whole blocks."""
    found = [
        {name: loop.get(name, 0) for name in ARITHMETIC}
        for facts in compiled("sm90", "invariant 32", "invariant 4096", "invariant 1")
        for loop in facts["innermost"]
        if _products(loop) >= 8 and loop.get("MUFU", 0) >= 32
    ]
    assert len(found) == 5
    assert all(loop == found[0] for loop in found), found


def _hopper_complaints(facts: dict[str, Any]) -> Iterator[str]:
    variant = facts["variant"]
    if facts["shared"] > SHARED["sm90"]:
        yield f"takes {facts['shared']} bytes of shared memory, there are {SHARED['sm90']}"
    if facts["spilled"] > HOPPER_MAY_SPILL.get(variant, 128):
        yield f"spills {facts['spilled']} bytes"
    code = MORE_CODE.get(variant, SHARES_CODE if facts["kernel"] == "shares_kernel" else BLOCKS_CODE)
    if facts["code_bytes"] > code << 10:
        yield f"has {facts['code_bytes'] / 1024:.0f} KB of machine code"
    if facts["advice"]:
        yield f"is told {facts['advice']}"
    if facts["overtaken_readers"]:
        yield "stores arguments of partitions where a warp may still read something else"
    if facts["reused_barriers"]:
        yield "uses memory of barriers that were not invalidated"
    if not facts["operations"].get("UTMALDG"):
        yield "does not use the copy engine"
    if facts["boxes_in_loops_of_their_own"]:
        yield "sends each box in a loop: ptxas doubts that its operands are uniform"
    # rows: each thread has many scores, and results are stored outside
    many = [x for x in facts["innermost"] if _products(x) >= 8]
    rows = [x for x in many if (x.get("MUFU", 0) >= 32 or x.get("QGMMA")) and not x.get("STG")]
    # columns: few scores each, whose maxima and sums go through shared memory
    columns = [x for x in many if x.get("HGMMA") and x.get("MUFU", 0) < 16 and x.get("BAR", 0) <= 9]
    blocks = facts["kernel"] == "blocks_kernel"
    if len(rows) != ROWS.get(variant, 2 if blocks else 0):
        yield f"has {len(rows)} loops over keys of 64 rows"
    if len(columns) != COLUMNS.get(variant, 0 if blocks or variant in ROWS else 1):
        yield f"has {len(columns)} loops over keys of few rows"
    for loop in rows + columns:
        if max(loop.get("LDL", 0), loop.get("STL", 0)) > HOPPER_MAY_RELOAD.get(variant, 0):
            yield f"spills in a loop over keys: {loop}"
    yield from _weighing_complaints(variant, len(rows), facts["under_products"])
    for loop in rows:
        if not loop.get("VOTE") and "head_dim 256" not in variant:
            yield f"rescales without a vote: {loop}"
        if "softcap" in variant and loop["FMUL"] > SOFTCAP_MULTIPLIES:
            yield f"multiplies {loop['FMUL']} times for 32 scores of a thread"
    if "fp8" in variant or "e4m3" in variant:
        yield from _fp8_complaints(facts, rows, columns)


def _weighing_complaints(variant: str, loops: int, found: list[dict[str, int]]) -> Iterator[str]:
    """What loops over keys of 64 rows do while values are multiplied."""
    found = [under for under in found if under["maxima"] >= 32]  # no others are of many rows
    if len(found) < loops:
        yield f"waits for results before it looks for maxima: {found}"
    functions = max((under["functions_always"] for under in found), default=0)
    if "softcap" in variant and functions > SOFTCAP_FUNCTIONS:
        yield f"takes {functions} special functions for 32 scores of a thread"
    at_once = not any(word in variant for word in ("mixed", "fp8", "e4m3", "invariant"))
    if at_once and any(under["maxima_always"] or under["exponentials"] < 32 for under in found):
        yield f"looks for maxima before it weighs: {found}"


def _products(loop: dict[str, int]) -> int:
    return loop.get("HGMMA", 0) + loop.get("QGMMA", 0)


def _fp8_complaints(facts: dict[str, Any], rows: list[dict[str, int]], columns: list[dict[str, int]]) -> Iterator[str]:
    """What should have become of fp8 numbers: two at a time in float16, or operands as they are."""
    if facts["operations"].get("F2F"):
        yield "converts numbers one by one"
    line = "no lse" in facts["variant"]  # bits of float16 instead of exponentials, two to a word
    for loop in rows if "all fp8" in facts["variant"] else []:
        if loop.get("HGMMA") or loop.get("PRMT", 0) > 32 * line:
            yield f"does not multiply fp8 as it is: {loop}"
        if line and loop.get("MUFU", 0) > 4:
            yield f"takes {loop['MUFU']} special functions for weights without any"
    for loop in columns:  # of 64 keys a thread has as many pairs of keys and values as it multiplies
        if loop["F2FP"] > 4 * loop["HGMMA"] + 4 or loop.get("LDS", 0) > 3 * loop["HGMMA"]:
            yield f"reads or converts more than it multiplies: {loop}"


@pytest.mark.skipif("nvidia" not in triton.backends.backends, reason="this Triton does not compile for nvidia")
def test_hopper_kernels_fit_with_the_largest_heads_and_boxes() -> None:
    found = compiled("sm90", "large boxes", "--no-sass")
    shared = {x["variant"]: x["shared"] for x in found if x["kernel"] == "shares_kernel"}
    assert len(shared) == 3
    assert max(shared.values()) <= SHARED["sm90"], shared


def test_code_that_comes_back_from_behind_the_rest_makes_no_loop() -> None:
    code = [
        ".L_x_0:", "HGMMA.64x128x16 R24", "@P0 BRA `(.L_x_2)", ".L_x_1:", "FADD R0, R0, R1", "@P1 BRA `(.L_x_0)",
        "HGMMA.64x64x16 R24", "EXIT", ".L_x_2:", "LDS R0, [R2]", "BRA `(.L_x_1)", ".L_x_3:", "BRA `(.L_x_3)",
    ]  # fmt: skip
    inside = [*code[:6], *code[8:11]]
    assert machine_code.natural_loops(code) == [inside]
    assert machine_code.natural_loops([x.replace("@P0 BRA", "BRA.DIV UR4,") for x in code[:-2]])
    assert machine_code.innermost(code) == [inside]
    # all of it comes around again: another loop, and not the innermost
    whole = [".L_x_4:", *code[:7], "@P2 BRA `(.L_x_4)", "EXIT", *code[8:11]]
    assert [len(loop) for loop in machine_code.natural_loops(whole)] == [9, 12]
    assert machine_code.innermost(whole) == [inside]


def test_what_loops_do_under_products_is_told() -> None:
    weigh, look = ["MUFU.EX2 R1, R1"] * 3, ["FMNMX R2, R2, R3", "MUFU.EX2 R4, R4"]
    vote, wait = ["VOTE.ANY P0, P0", "@!P0 BRA `(.L_x_1)"], "WARPGROUP.DEPBAR.LE gsb0, 0x"
    loop = [
        ".L_x_0:",
        "HGMMA.64x128x16 R24",
        wait + "1",
        *weigh,
        *vote,
        *look,
        ".L_x_1:",
        wait + "0",
        "MUFU.RCP R5, R5",
    ]
    at_once = machine_code.under_products([*loop, "@P1 BRA `(.L_x_0)", "EXIT"])
    assert at_once == [dict(maxima=1, maxima_always=0, exponentials=4, functions_always=4)]
    loop[3:3] = look[:1]
    (looking,) = machine_code.under_products([*loop, "@P1 BRA `(.L_x_0)", "EXIT"])
    assert (looking["maxima"], looking["maxima_always"]) == (2, 1)


def test_partitions_that_start_before_everybody_has_read_are_found() -> None:
    start = ["STS [R4], R5", "BAR.SYNC.DEFER_BLOCKING 0x1"]
    assert machine_code.overtaken_readers(["BAR.SYNC.DEFER_BLOCKING 0x0, 0x80", "LDS R0, [R2]", *start]) == 1
    assert machine_code.overtaken_readers(["LDS R0, [R2]", "BAR.SYNC.DEFER_BLOCKING 0x0, 0x80", *start]) == 0
    # a consumer's own barrier starts nobody
    assert machine_code.overtaken_readers(["LDS R0, [R2]", "STS [R2], R0", "BAR.SYNC.DEFER_BLOCKING 0x2, 0x80"]) == 0


def test_memory_of_barriers_that_is_used_again_is_found() -> None:
    made = ["SYNCS.EXCH.64 URZ, [UR21+0x18000], UR4", "SYNCS.EXCH.64 URZ, [UR21+0x19c00], UR4"]
    used = ["STS [R91+0x18000], R8", "LDS.128 R12, [R9+0x400]", "SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR48+0x19c00], R8"]
    assert machine_code.reused_barriers(made + used) == 1
    assert machine_code.reused_barriers([*made, "@!P4 SYNCS.CCTL.IV [UR5+0x18000]", *used]) == 0
    assert machine_code.reused_barriers(made + used[1:]) == 0


@pytest.mark.skipif("nvidia" not in triton.backends.backends, reason="this Triton does not compile for nvidia")
def test_a_hopper_kernel_that_lacks_everything_is_complained_about() -> None:
    loop = dict(HGMMA=16, MUFU=64, LDL=3)
    facts = dict(
        variant="prefill all fp8", kernel="blocks_kernel", shared=232449, spilled=129, advice=["serialised"],
        overtaken_readers=1, reused_barriers=1, boxes_in_loops_of_their_own=1, operations={"F2F": 1}, innermost=[loop],
        under_products=[], code_bytes=171 << 10,
    )  # fmt: skip
    found = " ".join(text.split()[0] for text in _hopper_complaints(facts))
    assert found == "takes spills has is stores uses does sends has spills waits rescales converts does"
    divided = facts | dict(variant="prefill softcap", innermost=[dict(HGMMA=12, MUFU=133, FMUL=196, VOTE=1)] * 2)
    under = dict(maxima=38, maxima_always=38, exponentials=2, functions_always=101)
    found = " ".join(_hopper_complaints(divided | dict(under_products=[under] * 2)))
    assert "looks for maxima before it weighs" in found
    assert "takes 101 special functions for 32 scores of a thread" in found
    assert "multiplies 196 times for 32 scores of a thread" in found


@pytest.mark.skipif("nvidia" not in triton.backends.backends, reason="this Triton does not compile for nvidia")
def test_fp8_decode_converts_pairs_at_nearly_the_work_of_16_bits() -> None:
    """Of a tile of 64 keys of 128 dims a thread has 64 pairs, of which a conversion takes two numbers at a time."""
    words = ("decode split", "decode split e4m3", "decode split e5m2", "decode split all fp8")
    facts = compiled("sm90", *words, PAGED_ATTN_HOPPER="0")
    found = {x["variant"]: x for x in facts if x["kernel"] == "attention_kernel"}
    loops = {name: found[name]["loops"][0] for name in words}
    plain = sum(loops["decode split"].values())
    for name in words[1:]:
        loop = loops[name]
        assert found[name]["registers"] <= 128, f"{name}: four programs do not fit a multiprocessor"
        assert found[name]["pipelines"] == [[[2, 64, 64], [2, 64, 64]]], name
        assert sum(loop.values()) < 1.2 * plain, f"{name}: {loop}"
        assert loop["LDSM"] >= loops["decode split"]["LDSM"] // 2, f"{name} does not read matrices: {loop}"
        assert not loop.get("F2F"), f"{name} converts numbers one by one: {loop}"
    packed = 4  # of weights, for the second product
    assert loops["decode split e4m3"]["F2FP"] == loops["decode split all fp8"]["F2FP"] == 64 + packed
    assert loops["decode split e5m2"]["F2FP"] == packed
    assert loops["decode split e5m2"]["PRMT"] == 64


@pytest.mark.skipif("nvidia" not in triton.backends.backends, reason="this Triton does not compile for nvidia")
def test_kernels_of_invariant_calls_do_the_same_arithmetic() -> None:
    """Whether they decode or prefill, in shares or a program per block."""
    found: dict[str, list[dict[str, int]]] = {}
    words = [f"{kind} invariant {more}" for kind in ("decode", "prefill") for more in ("features", "e4m3", "packed")]
    for facts in compiled("sm90", *words):
        if facts["loops"]:
            inner = facts["loops"][0]
            assert inner.get("LDL", 0) <= INVARIANT_MAY_RELOAD, facts["variant"]
            kind = facts["variant"].split("invariant")[1].replace(" split", "")
            found.setdefault(kind, []).append({name: inner.get(name, 0) for name in ARITHMETIC})
    assert all(len(kernels) >= 2 for kernels in found.values()), found
    for kind, kernels in found.items():
        assert all(kernel == kernels[0] for kernel in kernels), (kind, kernels)


@triton.jit
def crowded_kernel(x, n):
    """Two accumulators of 128 registers per thread each."""
    rows, cols = tl.arange(0, 64)[:, None], tl.arange(0, 256)
    a = tl.load(x + rows * 64 + tl.arange(0, 64))
    first = tl.zeros([64, 256], tl.float32)
    second = tl.zeros([64, 256], tl.float32)
    for i in tl.range(0, n, num_stages=3):
        first = tl.dot(a, tl.load(x + i * 4096 + rows * 256 + cols), first)
        second = tl.dot(a, tl.load(x + i * 8192 + rows * 256 + cols), second)
    tl.store(x + rows * 256 + cols, (first * second).to(tl.bfloat16))


@triton.jit
def plain_kernel(x, n, ROWS: tl.constexpr, STAGES: tl.constexpr):
    """A loop of two products, pipelined or not."""
    cols = tl.arange(0, 64)
    at = tl.arange(0, ROWS)[:, None] * 64 + cols
    tile = cols[:, None] * 64 + cols
    a = tl.load(x + at)
    acc = tl.zeros([ROWS, 64], tl.float32)
    for i in tl.range(0, n, num_stages=STAGES):
        scores = tl.dot(a, tl.load(x + i * 4096 + tile))
        acc = tl.dot(scores.to(tl.bfloat16), tl.load(x + i * 8192 + tile), acc)
    tl.store(x + at, acc.to(tl.bfloat16))


def _launch(kernel: Any, *args: Any) -> None:
    launch.run(kernel, (1,), torch.zeros(4096, dtype=torch.bfloat16), 7, *args)


def calls(wanted: Sequence[str] = ()) -> list[tuple[str, Callable[[], None]]]:
    """Kernels that are checked as if they were variants of the library."""
    call = functools.partial
    return [
        ("prefill crowded", call(_launch, crowded_kernel)),
        ("prefill of 16 rows", call(_launch, plain_kernel, 16, 3)),
        ("prefill pipelined", call(_launch, plain_kernel, 64, 3)),
        ("decode unpipelined", call(_launch, plain_kernel, 16, 1)),
        ("decode of two stages", call(_launch, plain_kernel, 16, 2)),
        ("decode pipelined", call(_launch, plain_kernel, 16, 3)),
    ]


@pytest.mark.skipif("nvidia" not in triton.backends.backends, reason="this Triton does not compile for nvidia")
def test_poor_kernels_are_complained_about_and_good_ones_are_not() -> None:
    found = {x["variant"]: list(complaints("sm90", x)) for x in compiled("sm90", "--calls", __name__)}
    spilled, serialised = sorted(found.pop("prefill crowded"), reverse=True)
    assert spilled.startswith("spills ")
    assert "wgmma.mma_async instructions are serialized" in serialised
    tiles = "has a loop without two K and two V tiles in flight, but "
    assert found == {
        "prefill of 16 rows": ["has a loop without HGMMA"],
        "prefill pipelined": [],
        "decode unpipelined": ["has a loop without LDGSTS or UTMALDG", tiles + "[]"],
        "decode of two stages": [tiles + "[[1, 64, 64], [1, 64, 64]]"],
        "decode pipelined": [],
    }


def test_a_kernel_that_does_not_fit_is_complained_about() -> None:
    facts = {"variant": "write", "kernel": "write_kv_kernel", "registers": 255, "spilled": 4, "shared": 65540}
    assert [x.split()[0] for x in complaints("gfx942", facts)] == ["takes", "spills"]
    assert list(complaints("sm80", facts | {"spilled": 0})) == []
