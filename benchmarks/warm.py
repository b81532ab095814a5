"""First calls in parallel processes, which compile kernels; the process that times calls then finds them on disk.

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

ROOM = 8e9  # bytes of GPU memory for each process: its context and inputs
LARGEST = 2.5e9  # cases of more bytes of traffic are not called: most share kernels with smaller cases
CEILINGS = {"bytes_per_second": 4.4e12, "operations_per_second": 800e12}  # approximate, to choose cells of the map


def processes() -> int:
    """Return the number of processes: one for each core, but no more than fit into GPU memory; 1 without a GPU."""
    if not torch.cuda.is_available():
        return 1
    return min(os.cpu_count() or 1, int(torch.cuda.mem_get_info()[0] // ROOM))


def warm(suites: Sequence[str], number: int) -> None:
    """Compile the kernels of suites and cliffs.  A case that fails here fails again when it is timed."""
    root = Path(__file__).parents[1]
    command = [sys.executable, "-m", "benchmarks.warm"]
    started = [
        subprocess.Popen([*command, str(part), str(number), *suites], cwd=root, stderr=subprocess.DEVNULL)
        for part in range(number)
    ]
    for process in started:
        process.wait()


def work(suites: Sequence[str], part: int, parts: int) -> tuple[list[Case], list[cliffs.Cell]]:
    """Return (cases, cells of the cliff map) of process `part`: every `parts`-th, without repeated cases."""
    cases = {case.name: case for suite in suites for case in SUITES.get(suite, ()) if traffic(case) < LARGEST}
    cells = cliffs.grid(cliffs.AXES, CEILINGS) if "cliffs" in suites else []
    return list(cases.values())[part::parts], cells[part::parts]


def main(arguments: Sequence[str]) -> None:
    """Make the calls of one process."""
    import paged_attn

    cases, cells = work(arguments[2:], *map(int, arguments[:2]))
    for case in cases:
        try:
            paged_attn.paged_attention(**inputs_of(case, "cuda"))
        except Exception as error:  # reported later: the case fails again when it is timed
            print(f"{case.name}: {error!r}", file=sys.stderr)
        torch.cuda.empty_cache()
    if cells:
        call_of = cliffs.shared(cells)
        for cell in cells:
            call_of(cell)()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1:])
