"""compute-sanitizer over a few launches of every kind, on a GPU: `python -m tools.sanitize --output sanitizer.json`.

Kernels are compiled first, without the tool, by processes side by side.  Then each tool watches parts of the cases side
by side, for at most so long; what has not begun by then is told.  Needs compute-sanitizer on the PATH (CUDA's toolkit).
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

TOOLS = ("memcheck", "initcheck", "racecheck")
ROOT = Path(__file__).parents[1]
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
PROGRAM = [sys.executable, "-m", "tests.sanitized"]


def run(command: list[str], parts: int, seconds: float, only: str) -> list[tuple[int | None, str]]:
    """(status, output) of each part, run side by side; the status is None where time was up."""
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, str(i)) for i in range(parts)]
        running = []
        for i, output in enumerate(outputs):
            words = [*command, *PROGRAM, "--part", f"{i}/{parts}", "--only", only]
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


def read(outputs: list[tuple[int | None, str]]) -> dict[str, Any]:
    """What a tool has said: cases begun and ended, wrong results, reports by their first line and kernel."""
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
    parser.add_argument("--tools", default=",".join(TOOLS), help="of compute-sanitizer")
    parser.add_argument("--seconds", type=float, default=140, help="for each tool")
    parser.add_argument("--processes", type=int, default=8, help="side by side")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--output", type=Path, help="what was found, as JSON")
    given = parser.parse_args()
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on the PATH: it comes with CUDA's toolkit", file=sys.stderr)
        return 2
    found: dict[str, Any] = {}
    for tool in ("none", *given.tools.split(",")):
        watch = ["compute-sanitizer", "--tool", tool, "--print-limit", "20"] if tool != "none" else []
        if tool == "racecheck":
            watch += ["--racecheck-report", "analysis"]
        started = time.monotonic()
        found[tool] = read(run(watch, given.processes, given.seconds, given.only))
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
    return int(any(x["errors"] or x["wrong"] or x["failed"] for x in found.values()))


if __name__ == "__main__":
    sys.exit(main())
