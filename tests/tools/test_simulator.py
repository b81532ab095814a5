"""The simulator: instructions against torch, and what is wrong with a kernel on purpose, which it has to find."""

from __future__ import annotations

import re
import struct

import numpy as np
import pytest
import torch

from tests.simulator import COMPILER, SIMULATES, assembly
from tests.simulator.assembly import LANES
from tests.simulator.machine import Kernel
from tests.support.cases import E4M3, E5M2, Case, run
from tests.support.hopper_cases import ragged, sized

pytestmark = [pytest.mark.simulated, pytest.mark.skipif(COMPILER is None, reason="needs g++")]

# ordinary numbers, halves of the last place, the largest ones, what is beyond them, subnormal ones, none
NUMBERS = np.array(
    [0.0, -0.0, 1.0, -1.5, 3.14159, 1.00390625, 1.01171875, 0.1, 17.0, 19.0, 100.3, 447.0, 449.0, 460.0, 1e3, 57344.0]
    + [6e4, 65504.0, 65519.0, 65520.0, 7e4, 1e20, 1e-3, 1e-5, 6e-5, 3e-6, 2e-8, 1e-39, 0.0019, -np.inf, np.inf, np.nan],
    np.float32,
)  # fmt: skip


def words(text: str, *operands: np.ndarray) -> np.ndarray:
    """$0 after the assembly, whose other operands these are."""
    return assembly.run(text, [None, *operands])[0]


@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_numbers_are_rounded_to_16_bits_as_torch_does(name: str) -> None:
    found = words(f"cvt.rn.{name}x2.f32 $0, $2, $1;", NUMBERS, NUMBERS[::-1].copy())
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[name]
    pairs = torch.from_numpy(np.stack([NUMBERS, NUMBERS[::-1]], 1)).to(dtype).float()
    got = torch.from_numpy(found.view(np.int16)).view(dtype).float().reshape(32, 2)
    np.testing.assert_array_equal(got, pairs)


def test_products_of_halves_are_rounded_as_numpy_does() -> None:
    with np.errstate(all="ignore"):
        x = NUMBERS.astype(np.float16)
        for by in (1 / 16, -3.0):
            text = (
                f"{{ .reg .b16 x, y; cvt.u16.u32 x, $1; mov.b16 y, {np.float16(by).view(np.uint16)}; mul.f16 x, x, y;"
            )
            found = words(text + " cvt.u32.u16 $0, x; }", x.view(np.uint16).astype(np.uint32))
            np.testing.assert_array_equal(found.astype(np.uint16).view(np.float16), x * np.float16(by))


@pytest.mark.parametrize(("name", "dtype"), [("e4m3", E4M3), ("e5m2", E5M2)])
def test_numbers_are_rounded_to_8_bits_as_torch_does_but_for_the_largest(name: str, dtype: torch.dtype) -> None:
    """Which saturate."""
    text = f"{{ .reg .b16 x; cvt.rn.satfinite.{name}x2.f32 x, $2, $1; cvt.u32.u16 $0, x; }}"
    found = words(text, NUMBERS, NUMBERS[::-1].copy())
    most = torch.finfo(dtype).max
    pairs = torch.from_numpy(np.stack([NUMBERS, NUMBERS[::-1]], 1)).clamp(-most, most).to(dtype).float()
    got = torch.from_numpy(found.view(np.uint8)).view(dtype).float().reshape(32, 4)[:, :2]
    np.testing.assert_array_equal(got, pairs)


@pytest.mark.parametrize(("name", "dtype"), [("e4m3", E4M3), ("e5m2", E5M2)])
def test_every_number_of_8_bits_is_widened(name: str, dtype: torch.dtype) -> None:
    for first in range(0, 256, 64):
        pairs = (first + 2 * LANES) | (first + 2 * LANES + 1) << 8
        text = f"{{ .reg .b16 x; cvt.u16.u32 x, $1; cvt.rn.f16x2.{name}x2 $0, x; }}"
        found = words(text, pairs.astype(np.uint32)).view(np.float16).astype(np.float32)
        want = torch.arange(first, first + 64).to(torch.uint8).view(dtype).float().numpy()
        np.testing.assert_array_equal(found, want)


def test_integers_are_as_wide_as_their_type_says() -> None:
    x = np.array([0, 1, 5, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x12345678, 0xDEADBEEF] * 4, np.uint32)
    y, signed = np.roll(x, 3), x.view(np.int32)
    np.testing.assert_array_equal(words("add.s32 $0, $1, $2;", x, y), x + y)
    np.testing.assert_array_equal(words("shr.s32 $0, $1, 31;", x).view(np.int32), signed >> 31)
    np.testing.assert_array_equal(words("shl.b32 $0, $1, 32;", x), 0 * x)
    np.testing.assert_array_equal(words("bfe.s32 $0, $1, 4, 8;", x).view(np.int32), signed << 20 >> 24)
    high = "{ .reg .b64 w; .reg .b32 low; mul.wide.s32 w, $1, $2; mov.b64 {low, $0}, w; }"
    want = signed.astype(np.int64) * y.view(np.int32) >> 32
    np.testing.assert_array_equal(words(high, x, y).view(np.int32), want)
    np.testing.assert_array_equal(words("prmt.b32 $0, $1, $2, 0x5410;", x, y), (x & 0xFFFF) | y << 16)
    halves = lambda z: z.view(np.uint16)  # noqa: E731
    np.testing.assert_array_equal(halves(words("add.s16x2 $0, $1, $2;", x, y)), halves(x) + halves(y))
    np.testing.assert_array_equal(words("lop3.b32 $0, $1, $2, $2, 0x3c;", x, y), x ^ y)


def test_lanes_that_divide_come_together_again() -> None:
    """Each does what is on its way, also where that lies behind the vote which waits for all."""
    text = """{ .reg .pred p; .reg .pred any; setp.lt.u32 p, $1, 7; mov.u32 $0, 1; @p bra FEW; add.u32 $0, $0, 10;
    ALL: vote.sync.any.pred any, p, 0xffffffff; @any add.u32 $0, $0, 1000; bra.uni END;
    FEW: add.u32 $0, $0, 100; bra.uni ALL; END: mov.u32 $0, $0; }"""
    np.testing.assert_array_equal(words(text, LANES.astype(np.uint32)), np.where(LANES < 7, 1101, 1011))


def kernel(text: str, threads: int = 64, shared: int = 1024) -> Kernel:
    """One of a single parameter, an address."""
    return Kernel(
        f"""// file
.visible .entry test(
.param .u64 test_param_0
)
.reqntid {threads}
{{
.reg .pred %p<9>;
.reg .b32 %r<9>;
.reg .b64 %rd<9>;
ld.param.b64 %rd1, [test_param_0];
.loc 1 7 0 // some.py:7
{text}
ret;
}}
""",
        shared,
    )


def test_what_the_next_program_may_look_for_is_not_left_behind() -> None:
    text = "mov.b64 %rd2, 77; st.shared.b64 [global_smem+8], %rd2;"
    one = kernel(text)
    launch(one, np.zeros(64, np.uint32))
    one.traces = np.array([5, 77], np.uint64)
    with pytest.raises(RuntimeError, match="leaves in shared memory what the next one there may look for"):
        launch(one, np.zeros(64, np.uint32))
    wiped = kernel(text + "mov.b64 %rd2, 0; bar.sync 0; st.shared.b64 [global_smem+8], %rd2;")
    wiped.traces = one.traces
    launch(wiped, np.zeros(64, np.uint32))


def launch(kernel: Kernel, memory: np.ndarray) -> None:
    at = memory.ctypes.data
    kernel.run(1, [struct.pack("Q", at)], [(at, at + memory.nbytes)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("st.global.b32 [%rd1+256], 1;", r"no tensor of this launch has 4 bytes .* st.global.b32 \(some.py:7\)"),
        ("ld.global.b32 %r1, [%rd1+-4];", "no tensor of this launch has 4 bytes"),
        ("st.shared.b32 [global_smem+1024], 1;", "shared memory has no byte 1027"),
        ("bar.sync 1, 96;", "all wait for ever:\n  2 warps at"),
        ("mbarrier.arrive.shared.b64 _, [global_smem];", "no barrier has been made there"),
        ("add.s77 %r1, %r1, %r1;", "not known: add.s77"),
        ("trap;", "trap"),
        (
            "mov.u32 %r1, %laneid; setp.lt.u32 %p1, %r1, 9; @%p1 bra $L1; shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;"
            "$L1: shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;",
            "lanes of a warp wait for each other at different places",
        ),
        (
            "mov.u32 %r1, %tid.x; setp.eq.u32 %p1, %r1, 0; @%p1 mbarrier.init.shared.b64 [global_smem], 2; bar.sync 0;"
            "@%p1 mbarrier.arrive.shared.b64 _, [global_smem]; $L1:"
            "mbarrier.try_wait.parity.shared.b64 %p2, [global_smem], 0; @!%p2 bra $L1;",
            "all wait for ever",
        ),
    ],
)
def test_what_is_wrong_is_said_with_the_line_of_the_source(text: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        launch(kernel(text), np.zeros(64, np.uint32))


def test_threads_meet_at_barriers() -> None:
    """One warp writes what the other reads."""
    memory = np.zeros(32, np.uint32)
    text = """mov.u32 %r1, %tid.x; setp.ge.u32 %p1, %r1, 32; and.b32 %r2, %r1, 31; shl.b32 %r3, %r2, 2;
    mov.u32 %r4, global_smem; add.u32 %r4, %r4, %r3; @%p1 st.shared.b32 [%r4], %r1; bar.sync 0;
    ld.shared.b32 %r5, [%r4]; mul.wide.u32 %rd2, %r2, 4; add.s64 %rd1, %rd1, %rd2; @!%p1 st.global.b32 [%rd1], %r5;"""
    launch(kernel(text), memory)
    np.testing.assert_array_equal(memory, np.arange(32, 64))


def test_who_arrives_at_a_barrier_does_not_wait_there() -> None:
    """One warp gives, the other takes what was written before."""
    memory = np.zeros(32, np.uint32)
    text = """mov.u32 %r1, %tid.x; setp.ge.u32 %p1, %r1, 32; and.b32 %r2, %r1, 31; shl.b32 %r3, %r2, 2;
    mov.u32 %r4, global_smem; add.u32 %r4, %r4, %r3; mov.u32 %r6, 3; @%p1 bra $L1;
    bar.sync %r6, 64; ld.shared.b32 %r5, [%r4]; mul.wide.u32 %rd2, %r2, 4; add.s64 %rd1, %rd1, %rd2;
    st.global.b32 [%rd1], %r5; bar.sync 4, 64; bra.uni $L2;
    $L1: st.shared.b32 [%r4], %r1; bar.arrive %r6, 64; bar.sync 4, 64; $L2:"""
    launch(kernel(text), memory)
    np.testing.assert_array_equal(memory, np.arange(32, 64))


COPIES = """mov.u32 %r1, %laneid; shl.b32 %r3, %r1, 4; mov.u32 %r4, global_smem; add.u32 %r4, %r4, %r3;
mul.wide.u32 %rd2, %r1, 16; add.s64 %rd3, %rd1, %rd2; setp.lt.u32 %p3, %r1, 20; selp.b32 %r5, 16, 0, %p3;
setp.eq.u32 %p1, %r1, 0; @%p1 mbarrier.init.shared.b64 [global_smem+512], 32; bar.sync 0;
cp.async.cg.shared.global [%r4], [%rd3], 16, %r5; cp.async.mbarrier.arrive.noinc.shared.b64 [global_smem+512];
$L1: mbarrier.try_wait.parity.shared.b64 %p2, [global_smem+512], 0; @!%p2 bra $L1;
ld.shared.b32 %r6, [%r4]; st.global.b32 [%rd3+512], %r6;"""


def test_what_threads_copy_is_there_for_who_waits_and_zeros_are_where_nothing_was_asked_for() -> None:
    memory = np.arange(256, dtype=np.uint32)
    launch(kernel(COPIES, threads=32), memory)
    np.testing.assert_array_equal(memory[128::4], np.where(LANES < 20, 4 * LANES, 0))
    with pytest.raises(RuntimeError, match="ended before what it copies was there"):
        launch(kernel(COPIES.replace("@!%p2 bra $L1;", ""), threads=32), memory)


# A kernel's text otherwise, and what is to be said of it.
EDITS: dict[str, tuple[str, str, str]] = {
    "consumers do not wait for tiles": (r"@!p bra WAIT;", "", "more arrive at a barrier than it expects"),
    "loaders do not wait for room, or for letters": (
        r"@!complete bra\.uni waitLoop;",
        "",
        "more arrive at a barrier than it expects|no tensor of this launch",
    ),
    "boxes larger than expected": (r"(expect_tx\S+ _, \[\S+\], )16384", r"\g<1>8192", "all wait for ever"),
    "zeros without a fence": (r"fence\.proxy\.async\.shared::cta;", "", "without a fence since"),
    "products that nobody waits for": (r"wgmma\.wait_group\.sync\.aligned \d;", "", "is nan"),
    "tiles left before their products are done": (
        r"(?s)(wgmma\.wait_group\.sync\.aligned \d;)(.*?)(mbarrier\.arrive\.shared::cta\.b64 _, \[%r\d+\];[^\n]*\n)",
        r"\2\3\1\n",
        "is nan",
    ),
    "a counter that the last program does not set back": (
        r"(mov\.b32\s+(%r\d+), 0;\s*\.loc.*\s*// begin inline asm\s*)@%p\d+ st\.global\.b32 \[[^]]+\], \{ \2 \};",
        r"\1",
        "left counters that are not zero",
    ),
    "turns that are not given": (r"(sub\.u32 t, 15, t;) bar\.arrive t, 256;", r"\1", "all wait for ever"),
    "a barrier of one warp too many": (r"(bar\.sync\s+0, )256", r"\g<1>288", "all wait for ever"),
}


def run_often(case: Case) -> None:
    """What is wrong now and then shows in some of these."""
    for _ in range(4):
        run(case)


@pytest.mark.hopper
@pytest.mark.quick
@pytest.mark.skipif(not SIMULATES, reason="is about simulated kernels")
@pytest.mark.parametrize("name", EDITS)
def test_defects_of_a_kernel_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.simulator import machine, process

    pattern, other, message = EDITS[name]
    edits = []

    def edit(ptx: str) -> str:
        found, count = re.subn(pattern, other, ptx)
        edits.append(count)
        return found

    monkeypatch.setattr(process, "edit", edit)
    monkeypatch.setattr(machine, "MOST", 20_000_000)
    case = sized("defects", **ragged((400, 1000)), sinks=True)
    with pytest.raises((AssertionError, RuntimeError), match=message):
        run_often(case)
    assert all(edits)
