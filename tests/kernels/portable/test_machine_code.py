"""What compilers make of each portable kernel: it fits, does not spill, keeps loads in flight.  Needs no GPU."""

from __future__ import annotations

import collections
import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from paged_attn.launching import launch, triton_version
from tests.kernels import digests
from tests.machine_code import ARITHMETIC, MULTIPROCESSORS, SHARED, compiled
from tests.support import variants

PARTS = 3  # processes of sm90: so many that workers share them evenly, so few that imports do not count
# A decode and a prefill that have digests; `make thorough` compiles the others, each for one target.
NAMES = [name for name, _ in variants.calls()]
ALWAYS = ("decode", "prefill")
TARGETS = ("sm90", "sm90", "sm90", "sm80", "sm100", "gfx942")


def targets_of(name: str) -> set[str]:
    """sm90 for variants with digests and half of the others; all targets for writes, which are soon compiled.

    A variant keeps its target when others are added.
    """
    if name.startswith("write"):
        return {*TARGETS}
    return {"sm90" if name in digests.PLAIN["portable"] else TARGETS[zlib.crc32(name.encode()) % len(TARGETS)]}


OF_TARGET = {
    target: [name for name in NAMES if target in targets_of(name) and name not in ALWAYS]
    for target in dict.fromkeys(TARGETS)
}


def slices() -> Iterator[Any]:
    """(target, names of variants), a process each."""
    yield pytest.param("sm90", [*ALWAYS], id="sm90")
    for target, names in OF_TARGET.items():
        parts = PARTS if target == "sm90" else 1
        for part in range(parts):
            yield pytest.param(
                target, names[part::parts], id=f"{target}-thorough-{part}", marks=pytest.mark.thorough
            )  # fmt: skip


# Spilled bytes per thread that a prefill variant may have: none on sm90, the one target that tiles were chosen on, and
# today's worst elsewhere, where operands take registers too.
PREFILL_MAY_SPILL = {"sm80": 472, "sm90": 0, "sm100": 120, "gfx942": 564}
# float32 at 256 dims, which nobody serves: three products of split operands take more than there is.  Shares of large
# blocks, which end in two ways; sm90 leaves them to the Hopper kernels.  A table of pages of 12, at 128 registers.
NAMED_MAY_SPILL = {
    "prefill fp32 head_dim 256": 32, "prefill fp32 packed head_dim 256": 48, "prefill split": 40,
    "decode split e4m3 page 12": 8, "decode split group 71": 8,
    "prefill head_dim 512": 184,  # a state takes half of the registers; with a branch for masks products would wait
    # 64 rows of 512 dims, and the two ways of a share to end: 22 words of these return in the loop over keys.
    "decode split latent": 16, "decode split latent 128 heads": 432, "decode split latent 128 heads e4m3": 192,
    "prefill latent": 128,  # in the loop over tiles that are masked
    "speculate split int4 tree": 8,
    "prefill invariant split": 312,  # 8 of them since `finish` keeps reciprocals of two rows instead of dividing
}  # fmt: skip
# From 3.7 on Triton has ptxas allocate registers otherwise (--regAllocOptLevel=2): bytes more than before.
FROM_3_7_MAY_SPILL = {
    ("sm90", "decode page 128"): 16, ("sm90", "prefill fp32"): 8, ("sm100", "prefill invariant features"): 352,
    ("sm90", "decode invariant mask bias positions"): 344,
}  # fmt: skip
# A prefill of 512 dims spills like other prefills over fp8 on gfx942.  Keys are decoded by hand on sm80.
ONE_TARGET_MAY_SPILL = {
    ("gfx942", "prefill latent e4m3"): 612,
    ("sm80", "decode split latent e4m3"): 48, ("sm80", "decode split latent 128 heads e4m3"): 48,
    ("sm100", "decode split latent 128 heads e4m3"): 232,
    # two ways of a share to end, decoded by hand on sm80; 64 rows of 256 dims
    ("sm80", "speculate split int4 tree"): 72, ("sm100", "speculate split int4 tree"): 16,
    ("gfx942", "prefill int4 head_dim 256"): 592, ("sm100", "decode e4m3 new"): 8,
}  # fmt: skip
OTHERS_MAY_SPILL = {"sm80": 8}  # fp8 decoded by hand
# Pieces of a fixed size are folded into a second state, which waits in memory while a piece is attended to.
INVARIANT_MAY_SPILL = {"sm80": 488, "sm90": 304, "sm100": 336, "gfx942": 108}
# What of that reaches the loop over a piece's keys on sm90, in loads of 4 bytes a tile.
INVARIANT_MAY_RELOAD = 4

# Variants with a decode kernel of as many rows as a warp group's product takes, 64, or more.
WIDE_DECODE = {"decode group 64", "decode split group 71", "decode split latent 128 heads"} | {
    name for name in variants.ATTENTION | variants.IN_INT4 if name.startswith("decode invariant")
}

# A branch between the two products serialises them; the query-query bias is such a branch, and only few tiles take it.
# The other has one for its window.
MAY_SERIALISE = {"prefill features", "prefill invariant features", "decode invariant mask bias positions"}


def complaints(target: str, facts: dict[str, Any]) -> Iterator[str]:
    """What a compiled kernel lacks."""
    prefill = facts["variant"].startswith("prefill")
    if facts["shared"] > SHARED[target]:
        yield f"takes {facts['shared']} bytes of shared memory, there are {SHARED[target]}"
    allowed = PREFILL_MAY_SPILL[target] if prefill else OTHERS_MAY_SPILL.get(target, 0)
    allowed = max(allowed, NAMED_MAY_SPILL.get(facts["variant"], 0))
    allowed = max(allowed, ONE_TARGET_MAY_SPILL.get((target, facts["variant"]), 0))
    if "invariant" in facts["variant"]:
        allowed = max(allowed, INVARIANT_MAY_SPILL[target])
    if triton_version.number(triton.__version__) >= (3, 7):
        allowed = max(allowed, FROM_3_7_MAY_SPILL.get((target, facts["variant"]), 0))
    if facts["spilled"] > allowed:
        yield f"spills {facts['spilled']} bytes at {facts['registers']} registers, allowed are {allowed}"
    if target == "sm90" and not facts["kernel"].startswith(("merge", "write", "move", "gather")):
        yield from _loop_complaints(facts, prefill)


def _loop_complaints(facts: dict[str, Any], prefill: bool) -> Iterator[str]:
    """What the loops over keys lack on sm90."""
    product = "HGMMA" if prefill or facts["variant"] in WIDE_DECODE else "HMMA"
    if "fp32" in facts["variant"] or facts["variant"] == "prefill latent e4m3":
        product = "HMMA"  # three TF32 products of few rows; rows that leave registers for keys to be decoded in
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
        wanted = 1 if "latent" in facts["variant"] else 2  # which hold their values
        if not prefill and sum(tiles >= 2 for tiles, *_ in buffers) < wanted:
            yield f"has a loop without two K and two V tiles in flight, but {buffers}"


@pytest.mark.long
@pytest.mark.parametrize(("target", "names"), list(slices()))
def test_variants_fit_and_do_not_spill_and_keep_loads_in_flight(target: str, names: list[str]) -> None:
    needs = "nvidia" if target.startswith("sm") else "amd"
    if needs not in triton.backends.backends:
        pytest.skip(f"this Triton does not compile for {needs}")
    sass = [] if target == "sm90" else ["--no-sass"]
    found = compiled(target, *names, "--exactly", *sass, PAGED_ATTN_HOPPER="0")
    assert {x["variant"] for x in found} == set(names)
    wrong = [f"{x['variant']}: {x['kernel']} {text}" for x in found for text in complaints(target, x)]
    assert not wrong, f"{target}:\n" + "\n".join(dict.fromkeys(wrong))
    if target == "sm90":
        assert digests.changed("portable", found) == []


@pytest.mark.skipif("nvidia" not in triton.backends.backends, reason="this Triton does not compile for nvidia")
@pytest.mark.thorough
def test_float32_values_that_are_turned_fit_where_shared_memory_is_smaller() -> None:
    facts = compiled("sm80", "prefill fp32 packed head_dim 256", "--exactly", "--no-sass", PAGED_ATTN_HOPPER="0")
    assert [x["shared"] for x in facts if x["shared"] > SHARED["sm80"]] == []
    assert facts


@pytest.mark.skipif("nvidia" not in triton.backends.backends, reason="this Triton does not compile for nvidia")
@pytest.mark.thorough
def test_fp8_decode_converts_pairs_at_nearly_the_work_of_16_bits() -> None:
    """A thread has 64 pairs of a tile of 64 keys and 128 dims; a conversion takes a pair."""
    words = ("decode split", "decode split e4m3", "decode split e5m2", "decode split all fp8")
    facts = compiled("sm90", *words, "--exactly", PAGED_ATTN_HOPPER="0")
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
@pytest.mark.thorough
def test_writing_keys_may_begin_before_the_launch_ahead_has_ended_and_waits_for_it() -> None:
    found = {x["variant"]: x for x in compiled("sm90", "write")}
    for facts in found.values():
        assert (facts["operations"].get("ACQBULK"), facts["operations"].get("PREEXIT")) == (1, 1)
        assert (facts["before_waiting"], facts["exits_before_waiting"]) == ([], 0)
    for facts in (found["write qkv"], found["write qkv of many"]):
        # a thread holds both dims of a pair, and their weights and angles
        assert (facts["operations"].get("BAR"), facts["shared"], facts["spilled"]) == (None, 0, 0)
    many = found["write qkv of many"]
    assert many["in_fours"]["STG.E.128"] == many["operations"]["STG"] == 8


@pytest.mark.skipif("nvidia" not in triton.backends.backends, reason="this Triton does not compile for nvidia")
def test_pages_and_their_rows_are_copied_sixteen_bytes_at_a_time() -> None:
    wanted = {"moved pages": 4, "moved rows": 4, "gathered": 4, "gathered packed": 4, "gathered e4m3": 2}
    found = compiled("sm90", *wanted, "--exactly")
    assert {x["variant"]: x["in_fours"]["LDG.E.128"] for x in found} == wanted
    assert all(x["in_fours"]["STG.E.128"] >= 2 and x["spilled"] == 0 for x in found)
    assert all(x["registers"] <= 64 for x in found), "eight programs of four warps on a multiprocessor"


@pytest.mark.skipif("nvidia" not in triton.backends.backends, reason="this Triton does not compile for nvidia")
@pytest.mark.thorough
@pytest.mark.parametrize("more", ["features", "e4m3", "packed"])
def test_kernels_of_invariant_calls_do_the_same_arithmetic(more: str) -> None:
    """Whether they decode or prefill, in shares or a program per block."""
    found: dict[str, list[dict[str, int]]] = {}
    for facts in compiled("sm90", f"decode invariant {more}", f"prefill invariant {more}"):
        if facts["loops"]:
            inner = facts["loops"][0]
            assert inner.get("LDL", 0) <= INVARIANT_MAY_RELOAD, facts["variant"]
            kind = facts["variant"].split("invariant")[1].replace(" split", "")
            if facts["kernel"] == "shares_kernel":  # of a decode: nobody wants the sums of the rows without a query
                inner = inner | dict(FADD=inner["FADD"] + 16, FMUL=inner["FMUL"] + 1)
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
@pytest.mark.thorough
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


def test_every_variant_is_compiled_for_one_target_writes_for_all_and_those_with_digests_for_sm90() -> None:
    found = [(x.values[0], name) for x in slices() for name in x.values[1]]
    assert {target for target, _ in found} == {*MULTIPROCESSORS}
    counts = collections.Counter(name for _, name in found)
    assert counts == {name: len(MULTIPROCESSORS) if name.startswith("write") else 1 for name in NAMES}
    assert len({*found}) == len(found)
    assert {*ALWAYS} <= {*digests.PLAIN["portable"]} <= {name for target, name in found if target == "sm90"}


def test_a_kernel_that_does_not_fit_is_complained_about() -> None:
    facts = {"variant": "write", "kernel": "write_kv_kernel", "registers": 255, "spilled": 4, "shared": 65540}
    assert [x.split()[0] for x in complaints("gfx942", facts)] == ["takes", "spills"]
    assert list(complaints("sm80", facts | {"spilled": 0})) == []
