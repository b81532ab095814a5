"""compute-sanitizer over a few launches of every kind, on a GPU: `python -m tools.sanitize --output sanitizer.json`.

Several processes first compile all kernels, without a tool.  Then the tools run one after another, each in several
processes that divide the cases.  `--seconds` limits the whole run.  Compilation may take half of that time, and the
tools share the rest by their weights.  Time that a pass does not need goes to later passes.  Cases that a limit cuts
off are counted; cases that have not begun are missing from the number done.  For 49 cases and 4 processes an H200's
host compiled for 121 s, and memcheck took 91 s.

If a command may take only some minutes, run one tool at a time: `--tools racecheck`.  If kernels of an earlier run are
on the disk, `--no-compile` leaves the first pass out.  `--part 1/3` is every third case, from the second on.  With
`--output`, a later run adds its tools to those in the file.  Needs compute-sanitizer (CUDA's toolkit).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

TOOLS = {"racecheck": 3.0, "initcheck": 1.0, "memcheck": 1.0}  # tool -> weight by its time, the slowest first
ROOT = Path(__file__).parents[1]
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
PROGRAM = [sys.executable, "-m", "tests.sanitized"]


def run(
    command: list[str], parts: int, seconds: float, only: str, part: tuple[int, int] = (0, 1)
) -> list[tuple[int | None, str]]:
    """Run `parts` processes side by side; return (status, output) of each.  Status None: its time was up.

    part: (i, n): the processes divide every n-th case, beginning with case i, among them; the first case is 0.
    """
    first, step = part
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, str(i)) for i in range(parts)]
        running = []
        for i, output in enumerate(outputs):
            words = [*command, *PROGRAM, "--part", f"{first + i * step}/{parts * step}", "--only", only]
            with output.open("wb") as to:
                running.append(subprocess.Popen(words, cwd=ROOT, env=environment, stdout=to, stderr=to))
        until, found = time.monotonic() + seconds, []
        for process, output in zip(running, outputs):
            try:
                status: int | None = process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                status = None
            found.append((status, output.read_text(errors="replace")))
    return found


def share(left: float, passes: list[str]) -> float:
    """Return the seconds of passes[0], out of `left` for all these passes: half for compilation, else by weight."""
    weights = [TOOLS.get(tool, 1.0) for tool in passes if tool != "none"]
    return max(0.0, left * (0.5 if passes[0] == "none" else weights[0] / sum(weights)))


def read(outputs: list[tuple[int | None, str]]) -> dict[str, Any]:
    """Return what a tool's outputs say.

    The numbers are those of cases begun, cases ended, and errors.  The lists name unfinished cases, wrong results and
    failed processes.  `reports` has the 40 most frequent reports, counted by their first two lines.
    """
    numbers: dict[str, Any] = {"begun": 0, "ended": 0, "wrong": [], "errors": 0, "unfinished": [], "failed": []}
    reports: Counter[str] = Counter()
    for status, output in outputs:
        begun = re.findall(r"^begin (.*)$", output, re.M)
        ended = re.findall(r"^end (.*)$", output, re.M)
        numbers["begun"] += len(begun)
        numbers["ended"] += len(ended)
        numbers["unfinished"] += [name for name in begun if name not in ended]
        numbers["wrong"] += re.findall(r"^wrong (.*)$", output, re.M)
        numbers["errors"] += sum(int(a or b) for a, b in SUMMARY.findall(output))
        if status not in (0, 1, None):
            numbers["failed"].append(f"status {status}: {output[-1500:]}")
        lines = output.splitlines()
        for line, after in zip(lines, [*lines[1:], ""]):
            if re.match(r"========= (Invalid|Uninitialized|Error:|Warning:|Race|Program hit|Misaligned)", line):
                reports[
                    re.sub(r"0x[0-9a-f]+|block \(.*?\)|thread \(.*?\)", "*", f"{line[10:]} | {after[10:].strip()}")
                ] += 1
    return numbers | {"reports": dict(reports.most_common(40))}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.sanitize", description=__doc__.splitlines()[0])
    parser.add_argument("--tools", default=",".join(TOOLS), help=f"of compute-sanitizer, in order ({','.join(TOOLS)})")
    parser.add_argument("--seconds", type=float, default=560, help="for all of it")
    parser.add_argument("--processes", type=int, default=8, help="side by side")
    parser.add_argument("--no-compile", action="store_true", help="kernels lie on disk: begin with the tools")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th case from the i-th on")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--output", type=Path, help="what was found, as JSON")
    given = parser.parse_args()
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on the PATH: it comes with CUDA's toolkit", file=sys.stderr)
        return 2
    found: dict[str, Any] = {}
    if given.output is not None and given.output.exists():
        found = json.loads(given.output.read_text())
    first, step = map(int, given.part.split("/"))
    until, passes = time.monotonic() + given.seconds, ["none"] * (not given.no_compile) + given.tools.split(",")
    for number, tool in enumerate(passes):
        watch = ["compute-sanitizer", "--tool", tool, "--print-limit", "20"] if tool != "none" else []
        if tool == "racecheck":
            watch += ["--racecheck-report", "analysis"]
        started = time.monotonic()
        seconds = share(until - started, passes[number:])
        found[tool] = read(run(watch, given.processes, seconds, given.only, (first, step)))
        found[tool]["seconds"] = round(time.monotonic() - started, 1)
        x = found[tool]
        print(
            f"{tool:10} {x['ended']:3} cases done, {len(x['unfinished'])} cut off, {len(x['wrong'])} wrong, "
            f"{x['errors']} errors in {x['seconds']} s",
            flush=True,
        )
        for text, count in x["reports"].items():
            print(f"    {count:4} x {text[:200]}", flush=True)
        for text in (*x["wrong"], *x["failed"]):
            print(f"    {text[-400:]}", flush=True)
        if given.output is not None:
            given.output.parent.mkdir(parents=True, exist_ok=True)
            given.output.write_text(json.dumps(found, indent=1))
    return int(any(found[tool][kind] for tool in passes for kind in ("errors", "wrong", "failed")))


if __name__ == "__main__":
    sys.exit(main())
