"""python -m benchmarks [SUITE ...]: every case with every peer that can do it, as a table and as JSON."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.measure import ceilings, measure
from benchmarks.peers import PEERS
from benchmarks.suites import SUITES, operations, traffic
from tests.cases import Case


def measured(case: Case, rounds: int) -> dict[str, Any]:
    """Seconds of every peer on one case, interleaved, with the work that the case needs."""
    calls = {name: call for name, peer in PEERS.items() if (call := peer(case)) is not None}
    seconds = measure(calls, rounds)
    calls.clear()
    gc.collect()
    torch.cuda.empty_cache()
    return {"case": case.name, "bytes": traffic(case), "operations": operations(case), "seconds": seconds}


def versions() -> dict[str, str]:
    """What the figures depend on."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": os.environ.get("COMMIT", commit),
    }


def line(result: dict[str, Any]) -> str:
    """One row of the table."""
    best = result["seconds"]["paged-attn"]
    peers = "  ".join(f"{name} {s * 1e6:.1f}" for name, s in result["seconds"].items() if name != "paged-attn")
    rates = f"{result['bytes'] / best / 1e12:5.2f} TB/s {result['operations'] / best / 1e12:6.1f} TFLOP/s"
    return f"{result['case']:<48} {best * 1e6:9.1f} us  {rates}  {peers}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITES)}; all if none is named")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/h200"), help="folder of the JSON files")
    options = parser.parse_args()
    for suite in options.suites or SUITES:
        limits = ceilings()
        print(
            f"{suite}: this card reads {limits['bytes_per_second'] / 1e12:.2f} TB/s, "
            f"multiplies {limits['operations_per_second'] / 1e12:.0f} TFLOP/s"
        )
        results = []
        for case in SUITES[suite]:
            results.append(measured(case, options.rounds))
            print(line(results[-1]), flush=True)
        options.output.mkdir(parents=True, exist_ok=True)
        report = {"suite": suite, **versions(), "ceilings": limits, "results": results}
        (options.output / f"{suite}.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
