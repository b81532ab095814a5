"""Stall reasons of a kernel's warps: samples of NVIDIA's profiler over one case.

    python -m benchmarks.stalls "prefill b4 x 4096" [--instructions 40] [--csv FILE]

The command needs `ncu` on the path and permission to read the counters.  Instructions that ran equally often form a
group: the loop of a warp partition, or the code that runs once an item.  Samples come from the warps of all
partitions.  A loader that waits at a full ring has samples, too, and this wait is no loss.  The group with the most
samples is usually the consumers' loop; a second table has its kinds of instructions.

With --csv, FILE holds the output of `ncu --page source --csv`.  It is read if it exists, else written.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from rich.console import Console
from rich.table import Table

from benchmarks.suites import SUITES

INSTRUCTION_BYTES = 16
KERNELS = "regex:shares_kernel|blocks_kernel|attention_kernel"
GROUPS, KINDS, REASONS = 8, 12, 4  # shown at most
Key = TypeVar("Key", bound=Hashable)


class Instruction(NamedTuple):
    """One machine instruction, and the profiler's samples of warps at it."""

    address: int  # offset from the first instruction
    text: str
    executed: int  # number of times that warps executed it
    samples: int
    stalls: dict[str, int]  # stall reason, without the prefix "stall_" -> samples


class Group(NamedTuple):
    """Instructions that ran equally often."""

    executed: int
    first: int  # address of the first instruction
    instructions: int
    samples: int
    stalls: Counter[str]


def read(lines: Sequence[str]) -> list[Instruction]:
    """Return the instructions of the kernel in ncu's output, which must have one kernel."""
    rows = list(csv.reader(lines))
    begin = next((i for i, row in enumerate(rows) if row[:2] == ["Address", "Source"]), None)
    if begin is None:
        raise ValueError(f"no table of instructions: {' '.join(lines[-3:])!r}")
    table = [dict(zip(rows[begin], row)) for row in rows[begin + 1 :] if len(row) == len(rows[begin])]
    reasons = [name for name in rows[begin] if name.startswith("stall_") and not name.endswith("(Not Issued)")]
    return [
        Instruction(
            int(row["Address"], 16) - int(table[0]["Address"], 16),
            row["Source"].strip(),
            _number(row["Instructions Executed"]),
            _number(row["# Samples"]),
            {name.removeprefix("stall_"): _number(row[name]) for name in reasons},
        )
        for row in table
    ]


def _number(text: str) -> int:
    return int(text.replace(",", "") or 0)


def groups(instructions: Sequence[Instruction]) -> list[Group]:
    """Return the groups in falling order of samples."""
    return [group for _, group in _grouped(instructions, lambda one: one.executed)]


def kinds(instructions: Sequence[Instruction]) -> list[tuple[str, Group]]:
    """Return (opcode such as FFMA, its instructions), most samples first, in the group with the most samples."""
    executed = groups(instructions)[0].executed
    return _grouped([one for one in instructions if one.executed == executed], _kind)


def _kind(one: Instruction) -> str:
    words = [word for word in one.text.split() if not word.startswith("@")]
    return words[0].split(".")[0]


def _grouped(instructions: Sequence[Instruction], key: Callable[[Instruction], Key]) -> list[tuple[Key, Group]]:
    found: dict[Key, list[Instruction]] = {}
    for one in instructions:
        found.setdefault(key(one), []).append(one)
    made = [
        (
            name,
            Group(
                ones[0].executed,
                ones[0].address,
                len(ones),
                sum(x.samples for x in ones),
                sum((Counter(x.stalls) for x in ones), Counter()),
            ),
        )
        for name, ones in found.items()
    ]
    return sorted(made, key=lambda one: one[1].samples, reverse=True)


def tables(instructions: Sequence[Instruction], many: int) -> Iterator[Table]:
    """Yield tables of the groups, of the first group's opcodes, and of the `many` instructions with the most samples.

    The last table is in program order, and is left out if `many` is 0.
    """
    total = max(1, sum(x.samples for x in instructions))
    rows = _table("times", "from", "KB", "samples", "waiting for")
    for group in groups(instructions)[:GROUPS]:
        size = f"{group.instructions * INSTRUCTION_BYTES / 1024:.1f}"
        share = f"{group.samples / total:.1%}"
        rows.add_row(f"{group.executed}", f"{group.first:#x}", size, share, _reasons(group))
    yield rows
    busiest = groups(instructions)[0]
    average = max(1, busiest.samples) / busiest.instructions
    rows = _table("kind", "number", "samples", "of one", "waiting for")
    for name, group in kinds(instructions)[:KINDS]:
        share = f"{group.samples / max(1, busiest.samples):.1%}"
        rows.add_row(
            name, f"{group.instructions}", share, f"{group.samples / group.instructions / average:.2f}", _reasons(group)
        )
    yield rows
    rows = _table("times", "at", "samples", "waiting for", "instruction")
    first = sorted(sorted(instructions, key=lambda x: x.samples, reverse=True)[:many])
    for one in first:
        reasons = [f"{name} {n / max(1, one.samples):.0%}" for name, n in Counter(one.stalls).most_common(2) if n]
        share = f"{one.samples / total:.1%}"
        rows.add_row(f"{one.executed}", f"{one.address:#x}", share, ", ".join(reasons), one.text[:60])
    if many:
        yield rows


def _reasons(group: Group) -> str:
    found = group.stalls.most_common(REASONS)
    return ", ".join(f"{name} {n / max(1, group.samples):.0%}" for name, n in found if n)


def _table(*columns: str) -> Table:
    rows = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        rows.add_column(column, justify="left" if column in ("waiting for", "instruction", "kind") else "right")
    return rows


def profile(case: str) -> list[str]:
    """Run ncu on the third launch whose kernel matches KERNELS, in calls of a case, and return its output.

    The launch belongs to the third call if each call has one such launch.
    """
    command = ["ncu", "-k", KERNELS, "-s", "2", "-c", "1", "--section", "SourceCounters"]
    command += ["--warp-sampling-interval", "0", "--page", "source", "--csv"]
    program = [sys.executable, "-m", "benchmarks.stalls", case, "--run"]
    done = subprocess.run(command + program, capture_output=True, text=True)
    return (done.stdout + done.stderr).splitlines()  # if it has no table, `read` reports its end


def call_three_times(name: str) -> None:
    """Call a case three times, each time after a flush of the L2."""
    import torch

    from benchmarks.inputs import inputs_of
    from benchmarks.measure import FLUSH_BYTES
    from benchmarks.peers import ours

    case = next(case for cases in SUITES.values() for case in cases if case.name == name)
    call = ours.call(case, inputs_of(case, "cuda"))
    flush = torch.ones(FLUSH_BYTES // 4, device="cuda")
    for _ in range(3):
        flush.sum()
        call()
    torch.cuda.synchronize()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="stalls", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("case", choices=[case.name for cases in SUITES.values() for case in cases], metavar="CASE")
    parser.add_argument("--instructions", type=int, default=0, metavar="N", help="also the N most waited at")
    parser.add_argument("--csv", type=Path, metavar="FILE")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run:
        call_three_times(options.case)
        return
    if options.csv is not None and options.csv.exists():
        lines = options.csv.read_text(encoding="utf-8").splitlines()
    else:
        if shutil.which("ncu") is None:
            parser.error("ncu is not on the path")
        lines = profile(options.case)
        if options.csv is not None:
            options.csv.write_text("\n".join(lines), encoding="utf-8")
    for rows in tables(read(lines), options.instructions):
        Console().print(rows)


if __name__ == "__main__":
    main()
