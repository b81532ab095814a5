"""What is read off machine code, from code of a few lines."""

from __future__ import annotations

from tests.support import sass


def test_code_that_comes_back_from_behind_the_rest_makes_no_loop() -> None:
    code = [
        ".L_x_0:", "HGMMA.64x128x16 R24", "@P0 BRA `(.L_x_2)", ".L_x_1:", "FADD R0, R0, R1", "@P1 BRA `(.L_x_0)",
        "HGMMA.64x64x16 R24", "EXIT", ".L_x_2:", "LDS R0, [R2]", "BRA `(.L_x_1)", ".L_x_3:", "BRA `(.L_x_3)",
    ]  # fmt: skip
    inside = [*code[:6], *code[8:11]]
    assert sass.natural_loops(code) == [inside]
    assert sass.natural_loops([x.replace("@P0 BRA", "BRA.DIV UR4,") for x in code[:-2]])
    assert sass.innermost(code) == [inside]
    # all of it comes around again: another loop, and not the innermost
    whole = [".L_x_4:", *code[:7], "@P2 BRA `(.L_x_4)", "EXIT", *code[8:11]]
    assert [len(loop) for loop in sass.natural_loops(whole)] == [9, 12]
    assert sass.innermost(whole) == [inside]


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
    at_once = sass.under_products([*loop, "@P1 BRA `(.L_x_0)", "EXIT"])
    assert at_once == [dict(maxima=1, maxima_always=0, exponentials=4, functions_always=4)]
    target = loop.index(".L_x_1:")
    rare = [*loop[:target], wait + "0", *loop[target:]]  # in what is mostly skipped
    assert sass.under_products([*rare, "@P1 BRA `(.L_x_0)", "EXIT"]) == at_once
    early = [*loop[:3], wait + "0", *loop[3:]]
    assert sass.under_products([*early, "@P1 BRA `(.L_x_0)", "EXIT"]) == []
    loop[3:3] = look[:1]
    (looking,) = sass.under_products([*loop, "@P1 BRA `(.L_x_0)", "EXIT"])
    assert (looking["maxima"], looking["maxima_always"]) == (2, 1)


def test_loops_that_send_products_in_turn_are_told() -> None:
    take, give = "BAR.SYNC.DEFER_BLOCKING R2, 0x100", "BAR.ARV R0, 0x100"
    products, wait = ["HGMMA.64x128x16 R24, gdesc[UR16], R24"] * 2, "WARPGROUP.DEPBAR.LE gsb0, 0x1"

    def told(*loop: str) -> int:
        return sass.loops_in_turn([".L_x_0:", *loop, "@P1 BRA `(.L_x_0)", "EXIT"])

    assert told(take, *products, "MOV R1, R2", give, wait, "MUFU.EX2 R1, R1", wait) == 1
    assert told(*products, wait, wait) == 0
    assert told(take, *products, wait, give) == 0  # when they are done
    assert told(products[0], take, products[1], give, wait) == 0
    assert told(take, products[0], give, products[1], wait) == 0
    assert told(take, products[0], give, wait, products[1], wait) == 0


def test_what_touches_memory_before_a_kernel_waits_is_told() -> None:
    code = ["S2R R0, SR_TID.X", "@P0 LDG.E.64 R2, [R4]", "UTMALDG.3D [UR8], [UR4]", "LDS R2, [R3]"]
    assert sass.before_waiting([*code, "ACQBULK", "STG.E [R2], R5"]) == ["LDG", "UTMALDG"]
    assert sass.before_waiting([*code[:1], "ACQBULK", *code[1:], "ACQBULK"]) == []
    assert sass.before_waiting(code) == []
    partition = [
        "@P0 BRA `(.L_x_1)",
        "BAR.SYNC 0x1",
        "LDG.E R2, [R4]",
        "EXIT",
        ".L_x_1:",
        "S2R R0, SR_TID.X",
        "ACQBULK",
    ]
    assert sass.before_waiting(partition) == []


def test_a_launch_that_may_begin_before_a_kernel_has_waited_is_told() -> None:
    first = ["@P0 BRA `(.L_x_1)", "PREEXIT", "EXIT", ".L_x_1:", "ACQBULK", "PREEXIT"]
    assert sass.exits_before_waiting(first) == 1
    assert sass.exits_before_waiting([*first[:1], "ACQBULK", *first[1:]]) == 0
    assert sass.exits_before_waiting(["PREEXIT", *first[3:]]) == 1
    assert sass.exits_before_waiting(first[3:]) == 0


def test_barriers_are_told_by_number() -> None:
    code = ["@P0 BAR.SYNC.DEFER_BLOCKING 0x1", "BAR.SYNC.DEFER_BLOCKING 0xb, 0x80", "BAR.SYNC.DEFER_BLOCKING R3, 0x100"]
    assert sass.named_barriers([*code, "@P0 BAR.ARV 0xe, 0x100", "BAR.ARV R0, 0x100"]) == {1, 11}


def test_partitions_that_start_before_everybody_has_read_are_found() -> None:
    start = ["STS [R4], R5", "BAR.SYNC.DEFER_BLOCKING 0x1"]
    assert sass.overtaken_readers(["BAR.SYNC.DEFER_BLOCKING 0x0, 0x80", "LDS R0, [R2]", *start]) == 1
    assert sass.overtaken_readers(["LDS R0, [R2]", "BAR.SYNC.DEFER_BLOCKING 0x0, 0x80", *start]) == 0
    # under Triton 3.8, the code of a waiting warp lies behind the code of the warps that start it
    waits = ["BAR.SYNC.DEFER_BLOCKING 0x1", "LDS.U8 R0, [R2]", "@P0 BAR.SYNC.DEFER_BLOCKING 0x1"]
    assert sass.overtaken_readers([*start, *waits]) == 0
    # a consumer's own barrier starts nobody
    assert sass.overtaken_readers(["LDS R0, [R2]", "STS [R2], R0", "BAR.SYNC.DEFER_BLOCKING 0x2, 0x80"]) == 0


def test_memory_of_barriers_that_is_used_again_is_found() -> None:
    made = ["SYNCS.EXCH.64 URZ, [UR21+0x18000], UR4", "SYNCS.EXCH.64 URZ, [UR21+0x19c00], UR4"]
    used = ["STS [R91+0x18000], R8", "LDS.128 R12, [R9+0x400]", "SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR48+0x19c00], R8"]
    assert sass.reused_barriers(made + used) == 1
    assert sass.reused_barriers([*made, "@!P4 SYNCS.CCTL.IV [UR5+0x18000]", *used]) == 0
    assert sass.reused_barriers(made + used[1:]) == 0


def test_conversions_of_what_nobody_wrote_are_found() -> None:
    convert = "F2FP.F16.E4M3.UNPACK_B R3, R2"
    written = ["LDS.128 R0, [R9]", "IMAD.WIDE R1, R4, R5, R6", "@!P1 SHFL.BFLY PT, R2, R5, 0x1, 0x1f"]
    assert sass.unwritten([convert]) == 1
    assert sass.unwritten(["LDS.64 R0, [R9]", "STS [R2], R2", "FADD R1, R2, R2", convert]) == 1
    assert all(sass.unwritten([x, convert]) == 0 for x in written)
    words = ["ULDC.64 UR4, c[0x0][0x218]", "UIMAD.WIDE.U32 UR6, UR5, UR4, URZ"]
    assert sass.unwritten([*words, "HGMMA.64x8x16.F32 R0, gdesc[UR4], R0", convert]) == 0
    # on one of two ways, and in a loop only behind it
    branch = ["@P0 BRA `(.L_x_0)", "MOV R2, R5", ".L_x_0:", convert, "EXIT"]
    assert sass.unwritten(branch) == 1
    assert sass.unwritten(["MOV R2, R4", *branch]) == 0
    assert sass.unwritten([".L_x_1:", convert, "MOV R2, R5", "@P0 BRA `(.L_x_1)", "EXIT"]) == 1


def test_uses_of_uniform_registers_that_nobody_wrote_are_found() -> None:
    """A product of keys of 128 dims read such a register, from the third 16 dims on."""
    made = ["R2UR UR4, R7", "@P0 S2UR UR7, SR_CTAID.X", "UMOV UR5, 0x40000040", "UIADD3 UR6, UP1, UR7, 0x80010, URZ"]
    product, of_registers = "HGMMA.64x64x16 R8, gdesc[UR4], R8", "HGMMA.64x64x16 R8, R40, gdesc[UR4], R8"
    assert sass.unwritten([*made, product]) == 0
    assert sass.unwritten([*made[:1], *made[2:], product]) == 2
    assert sass.unwritten([*made[1:], product]) == 1
    assert sass.unwritten([*made[1:2], *made[3:], of_registers]) == 0
    copy, over = "UMOV UR6, UR51", "UIADD3 UR6, UR7, 0x80, URZ"  # of a pair of which one half was wanted
    assert sass.unwritten([*made, copy, product]) == 1
    assert sass.unwritten([*made, copy, over, product]) == 0
    # a copy on one of two ways, used behind them
    ways = ["@P0 BRA `(.L_x_0)", copy, ".L_x_0:"]
    assert sass.unwritten([*made, *ways, product, "EXIT"]) == 1
    assert sass.unwritten([*made, *ways, over, product, "EXIT"]) == 0
    high = "UIADD3.X UR7, UR9, 0x80080, URZ, UP0, !UPT"
    assert sass.unwritten([*made, high, product]) == 1
    assert sass.unwritten([*made, "UIADD3.64 UR8, UR4, 0x400, URZ", high, product]) == 0
    assert sass.unwritten([*made, "UISETP.GE.AND UP0, UPT, UR4, UR9, UPT"]) == 1
    assert sass.unwritten([*made, "UTMALDG.4D [UR4], [UR8]", "SYNCS.PHASECHK.TRANS64 P1, [UR10+0x8], R1"]) == 2
