"""Times of single replays of two decodes, in several processes, to see whether the times of a decode have two modes.

    python -m benchmarks.modes [--processes 10] [--replays 1000] [--output FILE]

Keys and values are two halves of one allocation of 4.8 GB, in pages of 16 tokens at random places of each half.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import measure, runner
from benchmarks.inputs import inputs_of
from benchmarks.peers import ours
from tests.support.cases import Case

BYTES = 4_800_000_000
SIZES: dict[str, Any] = dict(heads=32, kv_heads=8, head_dim=128, page_size=16, dtype=torch.bfloat16, bounds=True)
CASES = {
    "decode b16 x 4096": Case("decode b16 x 4096", (1,) * 16, (4096,) * 16, lse=False, **SIZES),
    "decode b256 x 1024": Case("decode b256 x 1024", (1,) * 256, (1024,) * 256, lse=False, **SIZES),
}


def inputs_in_one_allocation(case: Case) -> dict[str, Any]:
    """Return a case's arguments with the caches as halves of one buffer, and pages at random places of each half."""
    inputs = inputs_of(case, "cuda")
    k_cache, v_cache, table = inputs["k_cache"], inputs["v_cache"], inputs["page_table"]
    pages = BYTES // (2 * k_cache[0].nbytes)
    both = torch.empty((2, pages, *k_cache.shape[1:]), dtype=k_cache.dtype, device="cuda").normal_()
    moved = torch.randperm(pages, device="cuda")[: len(k_cache)].to(table.dtype)
    for half, cache in zip(both, (k_cache, v_cache)):
        half[moved.long()] = cache
    return {**inputs, "k_cache": both[0], "v_cache": both[1], "page_table": moved[table.long()]}


def measured(replays: int) -> dict[str, Any]:
    """Return each case's spread of seconds, and whether its result equals that over small caches."""
    report: dict[str, Any] = {}
    for name, case in CASES.items():
        want = ours.call(case, inputs_of(case, "cuda"))().clone()
        call = ours.call(case, inputs_in_one_allocation(case))
        got = call()
        times = measure.samples({name: measure.capture(call)}, replays)[name]
        report[name] = {"median": statistics.median(times), **measure.spread(times), "right": bool((got == want).all())}
        torch.cuda.empty_cache()
    return report


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="modes", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--processes", type=int, default=10, metavar="N")
    parser.add_argument("--replays", type=int, default=1000, metavar="N")
    parser.add_argument("--output", type=Path, metavar="FILE")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run:
        print(json.dumps(measured(options.replays)))
        return
    command = [sys.executable, "-m", "benchmarks.modes", "--run", "--replays", str(options.replays)]
    found = []
    for number in range(options.processes):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
        for name, x in found[-1].items():
            us = " ".join(f"{key} {x[key] * 1e6:.1f}" for key in ("min", "q1", "median", "q3", "p90"))
            print(f"{number} {name}: {us}, p90 / min {x['p90'] / x['min']:.3f}, modes {x['modes']}", flush=True)
    if options.output is not None:
        report = {**runner.versions(), "replays": options.replays, "processes": found}
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
