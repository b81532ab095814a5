"""The profiler's samples, read from what it prints."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import stalls

# columns as ncu prints them, and some that nobody asks for
COLUMNS = (
    "Address", "Source", "# Samples", "Instructions Executed", "Divergent Branches", "stall_barrier", "stall_no_inst",
    "stall_wait", "stall_wait (Not Issued)",
)  # fmt: skip
PRINTED = f"""\
==PROF== Connected to process 451 (/usr/bin/python3)
"Kernel Name","blocks_kernel",""
{",".join(f'"{column}"' for column in COLUMNS)}
"0x7f00","      MOV R1, c[0x0][0x28]","1","8","0","0","0","1","1"
"0x7f10","      HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24","30","1,024","0","20","0","10","5"
"0x7f20","      FADD R2, R2, R3","60","1,024","0","0","50","10","0"
"0x7f30","      EXIT","9","8","0","0","9","","0"
"""


def test_instructions_that_ran_equally_often_are_told_together() -> None:
    instructions = stalls.read(PRINTED.splitlines())
    assert [x.address for x in instructions] == [0, 16, 32, 48]
    assert instructions[1].text == "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24"
    loop, once = stalls.groups(instructions)
    assert (loop.executed, loop.first, loop.instructions, loop.samples) == (1024, 16, 2, 90)
    assert loop.stalls == {"barrier": 20, "no_inst": 50, "wait": 20}
    assert (once.executed, once.samples, once.stalls["no_inst"]) == (8, 10, 9)


def test_what_each_kind_of_instruction_takes_of_the_busiest_is_told() -> None:
    found = stalls.kinds(stalls.read(PRINTED.splitlines()))
    assert [(name, group.instructions, group.samples) for name, group in found] == [("FADD", 1, 60), ("HGMMA", 1, 30)]
    guarded = stalls.Instruction(0, "@!P0 BRA 0x10", 1, 5, {})
    assert [name for name, _ in stalls.kinds([guarded])] == ["BRA"]


def test_the_command_tells_what_a_file_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ncu.csv"
    file.write_text(PRINTED, encoding="utf-8")
    stalls.main(["prefill b4 x 4096", "--csv", str(file), "--instructions", "1"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["1024", "0x10", "0.0", "90.0%", "no_inst", "56%,", "barrier", "22%,", "wait", "22%"]
    assert lines[4] == ["FADD", "1", "66.7%", "1.33", "no_inst", "83%,", "wait", "17%"]
    assert lines[7][:3] == ["1024", "0x20", "60.0%"]


def test_a_case_is_profiled_in_a_process_of_its_own_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(stdout=PRINTED, stderr="")

    monkeypatch.setattr(stalls.subprocess, "run", run)
    monkeypatch.setattr(stalls.shutil, "which", lambda name: name)
    file = tmp_path / "ncu.csv"
    stalls.main(["prefill b4 x 4096", "--csv", str(file)])
    assert file.read_text(encoding="utf-8").splitlines() == PRINTED.splitlines()
    (command,) = asked
    assert command[0] == "ncu"
    assert command[-5:] == [sys.executable, "-m", "benchmarks.stalls", "prefill b4 x 4096", "--run"]


def test_a_machine_without_ncu_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(stalls.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit):
        stalls.main(["prefill b4 x 4096"])
    assert "ncu is not on the path" in capsys.readouterr().err


def test_what_is_no_table_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no table of instructions: .*ERR_NVGPUCTRPERM"):
        stalls.read(["==ERROR== ERR_NVGPUCTRPERM"])
