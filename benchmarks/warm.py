"""First calls in many processes at once: the one that times afterwards finds what they compiled on disk.

`python -m benchmarks.warm PART PARTS SUITE...` is one of these processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import cliffs
from benchmarks.inputs import inputs_of
from benchmarks.suites import SUITES
from benchmarks.work import traffic
from tests.support.cases import Case

ROOM = 8e9  # bytes of the GPU for each process: its context, and inputs
LARGEST = 2.5e9  # bytes of a case that is called; larger ones mostly share kernels with it
CEILINGS = {"bytes_per_second": 4.4e12, "operations_per_second": 800e12}  # for a map's cells, about


def processes() -> int:
    """As many as there are cores, and room on the GPU for."""
    if not torch.cuda.is_available():
        return 1
    return min(os.cpu_count() or 1, int(torch.cuda.mem_get_info()[0] // ROOM))


def warm(suites: Sequence[str], number: int) -> None:
    """Compile what suites and cliffs need; a case that fails will do so again, where it is timed."""
    root = Path(__file__).parents[1]
    command = [sys.executable, "-m", "benchmarks.warm"]
    started = [
        subprocess.Popen([*command, str(part), str(number), *suites], cwd=root, stderr=subprocess.DEVNULL)
        for part in range(number)
    ]
    for process in started:
        process.wait()


def work(suites: Sequence[str], part: int, parts: int) -> tuple[list[Case], list[cliffs.Cell]]:
    """(cases, cells of the map) of one process: every so many of them, and no case twice."""
    cases = {case.name: case for suite in suites for case in SUITES.get(suite, ()) if traffic(case) < LARGEST}
    cells = cliffs.grid(cliffs.AXES, CEILINGS) if "cliffs" in suites else []
    return list(cases.values())[part::parts], cells[part::parts]


def main(arguments: Sequence[str]) -> None:
    """The calls of one process."""
    import paged_attn

    cases, cells = work(arguments[2:], *map(int, arguments[:2]))
    for case in cases:
        try:
            paged_attn.paged_attention(**inputs_of(case, "cuda"))
        except Exception as error:  # whatever it is: the case fails again where it is timed, and is told there
            print(f"{case.name}: {error!r}", file=sys.stderr)
        torch.cuda.empty_cache()
    if cells:
        call_of = cliffs.shared(cells)
        for cell in cells:
            call_of(cell)()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1:])
