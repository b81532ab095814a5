"""Complaints about a compiled Hopper kernel, and the limits of its machine code, by variant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.machine_code import SHARED

# Number of loops over keys with 64 rows for each warpgroup: one for each consumer that has a copy of the code.
ROWS = {
    "draft 16": 1, "lone draft": 1, "one decode group 48": 1, "one draft head_dim 256": 1,
    "draft of 12": 1, "invariant 1": 1, "lone mask": 1, "lone windows by head": 1,
    "invariant 32": 2, "invariant 4096": 2, "long": 3, "long fp16": 3, "long alibi": 3,
    "long softcap of 10": 3, "long group 3": 3, "long exact softcap of 10": 2,
    "long gate": 3, "long token scales": 3, "long windows by head": 3,
    "chunk x-packed new": 2,
}  # fmt: skip
OF_MANY_COLUMNS = "draft of 4", "draft of 8"  # 16 and 32 columns
# Number of loops over keys of few rows, beside blocks.
COLUMNS = {"two lists": 1, "two lists group 3": 1, "two lists new": 1, "two lists softcap": 1}
MERGED = {
    "lone draft",
    "lone mask",
    "lone windows by head",
    "draft 16",
    "one decode group 48",
    "one draft head_dim 256",
    "one chunk",
}  # variants whose pieces a merge launch joins
# Limits are those of Triton 3.6 and 3.7.  From 3.7 on, --regAllocOptLevel=2 changes how ptxas allocates registers: with
# code for few rows it spills a few more ("mixed features", "mixed group 12"), and a decode is 0.9 KB larger.
# Bytes that a consumer keeps in memory from one block to the next, for example because scores are kept to be weighed
# again.
HOPPER_MAY_SPILL = {"invariant 32": 216, "mixed features": 144, "draft of 8 int4": 192}
# Limits of machine code in KB, which a launch reads from memory at the first run and after every flush of the L2.
SHARES_CODE, BLOCKS_CODE, MERGE_CODE = 45, 115, 11
# Results in fp8 are quotients rounded to nearest, 3 KB more than an approximate division.
BRIEF = {  # calls so short that they wait for their code
    "decode of 12": 30, "decode split all fp8": 37, "of 512 features": 32, "lone decode": 46,
}  # fmt: skip
MORE_CODE = {
    "draft of 4": 59, "draft 16": 47, "lone draft": 47, "lone mask": 52, "one draft head_dim 256": 60,
    "two lists group 3": 121,
    "speculate 32": 88, "speculate 64": 87, "speculate 32 tree": 110, "two lists": 119, "two lists new": 132,
    "two lists softcap": 127, "mixed e4m3": 95, "mixed e4m3, no lse": 88, "mixed all fp8": 88,
    "mixed all fp8, no lse": 81, "mixed": 116, "mixed softcap": 117, "mixed new": 127, "mixed group 12": 120,
    "mixed group 16, softcap": 127, "mixed head_dim 64": 121, "mixed features": 135,
    "draft of 12": 67, "invariant 1": 82, "invariant 32": 158,
    "prompts": 49, "prompts of 2048": 64,
    "prompts window sinks": 53, "prompts head_dim 64 alibi": 43, "prompts new softcap": 66,
    "long head_dim 64": 46, "long head_dim 64, no window": 43,
    "draft of 8 e4m3": 67, "draft of 8 e4m3 head_dim 256": 74, "draft of 8 all fp8": 64, "draft of 8 x-packed": 73,
    "draft of 8 e4m3 x-packed": 70, "columns of int8 by token": 50, "draft of 8 int8 by token": 76,
    "draft of 8 int4": 79, "columns of int4": 46,
    "prompts x-packed": 50, "prompts x-packed head_dim 64": 44, "chunk x-packed head_dim 256": 56,
    "long gate": 145, "speculate 32 mask": 98, "long chunks": 74, "long spans window": 73, "of 512 gate": 31,
    "long windows by head": 121, "lone windows by head": 54,
}  # fmt: skip
BESIDE_BLOCKS = {  # code of the launch of even shares, which precedes that of blocks
    "mixed e4m3": 51, "mixed e4m3, no lse": 49, "mixed all fp8": 50, "mixed all fp8, no lse": 48,
}  # fmt: skip
# Limits of barriers of all threads in a loop over keys, for warpgroups that share code and for three consumers.  They
# are needed where the cache ends and dead values become zero.  Triton would add one between two of its waits.
MEET = {
    "prefill window sinks": 0, "prefill page 128": 0, "prefill head_dim 64": 0, "prefill head_dim 256": 0,
    "prefill softcap": 2, "prefill new": 10, "prompts": 0, "prompts of 2048": 0,
    "prompts window sinks": 0, "prompts head_dim 64 alibi": 0,
    "prompts new softcap": 10, "prompts group 3": 2, "prompts group 12": 0, "chunk group 7": 2,
    "speculate 32": 2, "speculate 32 tree": 2, "speculate 64": 2,
    "long": 0, "long fp16": 0, "long alibi": 0, "long softcap": 2, "long head_dim 64": 0,
    "long exact softcap": 2, "long group 3": 0, "long softcap of 10": 0,
    "long head_dim 64, no window": 0, "prompts x-packed": 0, "prompts x-packed head_dim 64": 0,
    "chunk x-packed head_dim 256": 0, "chunk x-packed new": 10, "long x-packed": 0,
    "long gate": 0, "long token scales": 0, "long chunks": 0, "long spans window": 0, "speculate 32 mask": 2,
    "long windows by head": 0,
}  # fmt: skip
RESULTS = {
    "prompts head_dim 64 alibi": 8,
    "prompts x-packed head_dim 64": 8,
}  # least exchanges of a thread under a product, 16 for 128 dims of two rows: it exchanges two of every four words
# Special functions for each score with a softcap (tanh and an exponential, or two exponentials and a reciprocal), and
# for a thread's rows.
TANH_FUNCTIONS, EXACT_FUNCTIONS, OF_ROWS = 2, 3, 4
EXACT = {
    "two lists softcap": 64,
    "long exact softcap of 10": 32,
    "mixed softcap": 32,
    "mixed group 16, softcap": 32,
}  # scores of a thread, whose softcap takes exponentials
# Softcaps by a polynomial: (scores of a thread, terms of the polynomial).  Larger scores branch to special functions.
POLYNOMIAL = {
    "prefill softcap": (64, 3), "long softcap": (64, 3), "long exact softcap": (32, 5), "prompts new softcap": (32, 5),
}  # fmt: skip
POLYNOMIAL_MULTIPLIES = {3: 1 + 1, 5: 1 + 3}  # for a score: its square, and its cap if it is weighed again
LINE_FUSED = 64 + 64 + 8  # one for each score, those of results that join others in shared memory, those of rows
ALIBI_FUSED = 3  # for each score: its bias, its weight, and its weight again if maxima rise; 8 more for rows
# Three consumers, and four warpgroups, carry weights in 32-bit words, which no instruction takes apart.
IN_WORDS = (
    "long", "long fp16", "long alibi", "long softcap of 10", "long head_dim 64", "long head_dim 64, no window",
    "long gate", "long token scales", "long windows by head",
)  # fmt: skip
MATRICES = 16  # least LDSM instructions, each of four 8 x 8 matrices: 64 keys and values of 128 dims for each warp
CUT = (  # variants whose pieces are joined by the program that finishes last
    "speculate 32", "speculate 32 tree", "speculate 32 mask", "speculate 64", "speculate 32 head_dim 64",
    "speculate 32 e4m3, no lse",
)  # fmt: skip
# Variants whose two warpgroups send products in turn (ping-pong).  Else they fall into step and take a fifth longer.
IN_TURN = (
    "speculate 32", "speculate 32 tree", "speculate 32 mask", "speculate 32 head_dim 64", "speculate 64", "one chunk",
    "two lists", "two lists new", "two lists softcap", "two lists group 3", "chunk group 7", "prompts group 3",
    "group 3 head_dim 256", "prefill new", "narrow new", "narrow new head_dim 64", "chunk x-packed new",
    "prefill softcap", "prompts new softcap", "long softcap", "long exact softcap",
)  # fmt: skip
SHARED_KEYS = 8  # least barriers of a tile if all warps share a row's keys
LOOPS_IN_TURN = {"chunk x-packed new": 2}
TURNS = 14  # the first named barrier of ping-pong; Triton's have lower numbers
# Limits of registers that a loop over keys stores and loads again.  They are spilled in kernels with code for few rows,
# with one more warpgroup, or with four warpgroups, which have 112 registers each.
HOPPER_MAY_RELOAD = {
    "two lists": 24, "two lists new": 24, "mixed group 12": 6, "mixed group 16, softcap": 6, "mixed head_dim 64": 4,
    "mixed features": 4, "mixed no lse softcap": 2, "prompts head_dim 64 alibi": 6,
    "long head_dim 64": 1,
}  # fmt: skip


def merge_complaints(facts: dict[str, Any]) -> Iterator[str]:
    """Yield complaints about a merge: a multiprocessor has to hold two programs of eight warps, which begin early."""
    if facts["registers"] > 128 or facts["spilled"]:
        yield f"takes {facts['registers']} registers, and spills {facts['spilled']} bytes"
    if facts["code_bytes"] > MERGE_CODE << 10:
        yield f"has {facts['code_bytes'] / 1024:.0f} KB of machine code"
    if facts["operations"].get("ACQBULK") != 1 or set(facts["before_waiting"]) - {"LDG"}:
        yield f"waits for the one before behind {facts['before_waiting']}"


def complaints(facts: dict[str, Any]) -> Iterator[str]:
    variant = facts["variant"]
    if facts["shared"] > SHARED["sm90"]:
        yield f"takes {facts['shared']} bytes of shared memory, there are {SHARED['sm90']}"
    if facts["spilled"] > HOPPER_MAY_SPILL.get(variant, 128):
        yield f"spills {facts['spilled']} bytes"
    code = (MORE_CODE | BRIEF).get(variant, SHARES_CODE if facts["kernel"] == "shares_kernel" else BLOCKS_CODE)
    if facts["kernel"] == "shares_kernel":
        code = BESIDE_BLOCKS.get(variant, code)
    if facts["code_bytes"] > code << 10:
        yield f"has {facts['code_bytes'] / 1024:.0f} KB of machine code"
    if facts["advice"]:
        yield f"is told {facts['advice']}"
    leads, waits = (facts["operations"].get(word, 0) for word in ("PREEXIT", "ACQBULK"))
    first = variant in BESIDE_BLOCKS and facts["kernel"] == "shares_kernel"
    if (leads, waits) != (first or variant in MERGED, 1):
        yield f"lets the next launch begin {leads} times, and waits for the one before {waits} times"
    if (len(facts["before_waiting"]) > 0) != (variant in BESIDE_BLOCKS and not first):
        yield f"waits for the one before behind {facts['before_waiting']}"
    if facts["overtaken_readers"]:
        yield "stores arguments of partitions where a warp may still read something else"
    if facts["reused_barriers"]:
        yield "uses memory of barriers that were not invalidated"
    if facts["unwritten"]:
        yield f"uses {facts['unwritten']} registers that not every way there has written"
    if not facts["operations"].get("UTMALDG"):
        yield "does not use the copy engine"
    if facts["boxes_in_loops_of_their_own"]:
        yield "sends each box in a loop: ptxas doubts that its operands are uniform"
    # rows: each thread has many scores, and results are stored outside
    many = [x for x in facts["innermost"] if products(x) >= 8]
    by_columns = variant.startswith(OF_MANY_COLUMNS)
    rows = [x for x in many if (x.get("MUFU", 0) >= 32 or x.get("QGMMA")) and not (x.get("STG") or by_columns)]
    # columns: each thread has few or some scores, whose maxima and sums go through shared memory
    columns = [x for x in many if x.get("HGMMA") and (x.get("MUFU", 0) < 32 or by_columns) and x.get("BAR", 0) <= 11]
    blocks, mixed = facts["kernel"] != "shares_kernel", facts["kernel"] == "mixed_kernel"
    if mixed:  # there may be 16 columns; only for columns warps wait for each other
        rows = [x for x in many if x.get("BAR", 0) < SHARED_KEYS]
        columns = [x for x in many if SHARED_KEYS <= x.get("BAR", 0) <= 11]
    if len(rows) != ROWS.get(variant, 1 if blocks else 0):
        yield f"has {len(rows)} loops over keys of 64 rows"
    if len(columns) != COLUMNS.get(variant, 0 if (blocks and not mixed) or variant in ROWS else 1):
        yield f"has {len(columns)} loops over keys of few rows"
    for loop in rows + columns:
        if max(loop.get("LDL", 0), loop.get("STL", 0)) > HOPPER_MAY_RELOAD.get(variant, 0):
            yield f"spills in a loop over keys: {loop}"
    if variant.startswith("prompts") and facts["results_under_products"] < RESULTS.get(variant, 16):
        yield f"exchanges {facts['results_under_products']} results under a product"
    words = 32 if "head_dim 64" in variant else 64  # of a state that each thread holds
    if variant in CUT and min(facts["in_fours"].values()) < words // 4:
        yield f"keeps pieces, of which a thread has {words} words, otherwise than in fours: {facts['in_fours']}"
    if facts["loops_in_turn"] != (LOOPS_IN_TURN.get(variant, 1) if mixed or variant in IN_TURN else 0):
        yield f"sends products in turn in {facts['loops_in_turn']} loops"
    if max(facts["named_barriers"], default=0) >= TURNS:
        yield f"waits at barriers {facts['named_barriers']}, by some of which warpgroups take turns"
    yield from _weighing_complaints(variant, len(rows), facts["under_products"])
    for loop in rows:
        if not loop.get("VOTE"):
            yield f"rescales without a vote: {loop}"
        if _weighs_at_once(variant) and loop.get("VOTE", 0) > 1:
            yield f"rescales where maxima stay: {loop}"
        if loop.get("BAR", 0) > MEET.get(variant, 99):
            yield f"has warpgroups wait for each other {loop['BAR']} times a tile"
        if variant in POLYNOMIAL:
            number, terms = POLYNOMIAL[variant]
            if loop["FMUL"] > number * POLYNOMIAL_MULTIPLIES[terms] + 64 + 4:
                yield f"multiplies {loop['FMUL']} times for {number} scores of a thread"
            if loop["FFMA"] > number * (terms + terms // 2) + 8:
                yield f"adds {loop['FFMA']} products for {number} scores of a thread"
        elif "softcap" in variant and loop["FMUL"] > EXACT.get(variant, 32) + 64 + 4:  # powers, results, rows
            yield f"multiplies {loop['FMUL']} times for {EXACT.get(variant, 32)} scores of a thread"
        if variant in IN_WORDS and loop.get("PRMT", 0):
            yield f"permutes words of weights: {loop}"
        # scores of a thread: each takes an exponential, and one more if maxima rise
        scores = 64 if loop.get("MUFU", 0) >= 2 * 64 else 32
        if "alibi" in variant and loop["FFMA"] > ALIBI_FUSED * scores + 8:
            yield f"adds {loop['FFMA']} products for {scores} scores of a thread"
    for loop in columns:
        if "x-packed" in variant and "e4m3" not in variant and loop.get("LDSM", 0) < MATRICES:
            yield f"takes operands apart: {loop}"
    if "fp8" in variant or "e4m3" in variant:
        yield from _fp8_complaints(facts, rows, columns)


def _weighing_complaints(variant: str, loops: int, found: list[dict[str, int]]) -> Iterator[str]:
    """Yield complaints about what loops over keys of 64 rows do while values are multiplied."""
    found = [under for under in found if under["maxima"] >= 32]  # loops with fewer have few rows
    if variant.startswith("mixed group"):  # loops of many columns are found, too
        found = sorted(found, key=lambda under: under["exponentials"])[-loops:]
    if len(found) < loops:
        yield f"waits for results before it looks for maxima: {found}"
    functions = max((under["functions_always"] for under in found), default=0)
    number, _ = POLYNOMIAL.get(variant, (EXACT.get(variant, 32), 0))
    each = 1 if variant in POLYNOMIAL else EXACT_FUNCTIONS if variant in EXACT else TANH_FUNCTIONS
    if "softcap" in variant and functions > each * number + OF_ROWS:
        yield f"takes {functions} special functions for {number} scores of a thread"
    # of rows, and of a coefficient; of columns the largest of two sums is what tells
    limits = 15 if variant.startswith(OF_MANY_COLUMNS) else 4 if variant in POLYNOMIAL else 0
    if _weighs_at_once(variant) and any(
        under["maxima_always"] > limits or under["exponentials"] < number for under in found
    ):
        yield f"looks for maxima before it weighs: {found}"


def _weighs_at_once(variant: str) -> bool:
    return not any(word in variant for word in ("two lists", "fp8", "mixed e4m3", "invariant", "e4m3 head_dim 256"))


def products(loop: dict[str, int]) -> int:
    return loop.get("HGMMA", 0) + loop.get("QGMMA", 0)


def _fp8_complaints(facts: dict[str, Any], rows: list[dict[str, int]], columns: list[dict[str, int]]) -> Iterator[str]:
    """Yield complaints unless fp8 numbers are converted two at a time to float16, or multiplied as they are."""
    variant = facts["variant"]
    if facts["operations"].get("F2F"):
        yield "converts numbers one by one"
    line = "no lse" in variant  # bits of float16 instead of exponentials, two to a word
    for loop in rows if "all fp8" in variant else []:
        if loop.get("HGMMA") or loop.get("PRMT", 0) > 32 * line:
            yield f"does not multiply fp8 as it is: {loop}"
        if line and loop["FFMA"] > LINE_FUSED:
            yield f"adds {loop['FFMA']} products for 64 scores of a thread"
        if line and loop.get("MUFU", 0) > 4:
            yield f"takes {loop['MUFU']} special functions for weights without any"
    # (products of keys, of values): keys in steps of 32 dims, for each part of the queries; values in steps of 16 keys
    steps = (4, 4 if "narrow" in variant else 8) if "head_dim 64" in variant else (8, 4)
    for loop in rows if "e4m3" in variant and line else []:
        if (loop.get("QGMMA"), loop.get("HGMMA")) != steps:
            yield f"does not multiply keys as they are, twice: {loop}"
        if loop.get("FMUL", 0) > 64 + 32 + 4 and _weighs_at_once(variant):
            yield f"rounds products of scores that are not huge: {loop}"
    # a thread loads and converts as many pairs of keys and values as it multiplies; x-packed values are loaded two by
    # two, and again if some are dead
    loads = 5 if "x-packed" in variant else 3
    for loop in columns:
        weights = 8 if variant in BESIDE_BLOCKS else 4  # words, of a tile of 128 keys or of 64
        flags = 1 if "head_dim 64" in variant else 0  # and maxima, beside half as many products
        if variant.startswith(OF_MANY_COLUMNS):  # once more where maxima rise, by other threads' scores
            weights, flags = 16, 8
        if loop["F2FP"] > 4 * loop["HGMMA"] + weights or loop.get("LDS", 0) > loads * loop["HGMMA"] + flags:
            yield f"reads or converts more than it multiplies: {loop}"
