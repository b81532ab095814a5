"""Run suites: build each case once, check every peer against the library, time all calls together, write JSON."""

from __future__ import annotations

import gc
import json
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks import measure
from benchmarks.inputs import inputs_of
from benchmarks.peers import BOUNDS, OURS, Call, Peer
from benchmarks.peers.cannot import Cannot
from benchmarks.work import operations, traffic
from tests.support.cases import Case

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "triton", "nvidia-cudnn-frontend", "flashinfer-python", "vllm")
# Upper bound on |peer - ours| / |ours| in 2-norm.  Both round weights and results to 8 bits, which gives some 3e-3.
# The bound finds wrong masks and lengths, but not one key more or less among thousands.  Rows of few keys differ most.
AGREE = 2e-2


def device() -> str:
    """Return the device of the benchmark; without a GPU, end the process."""
    if not torch.cuda.is_available():
        raise SystemExit("the benchmark needs a GPU: torch.cuda.is_available() is False")
    return "cuda"


def measured(case: Case, peers: Mapping[str, Peer], rounds: int) -> dict[str, Any]:
    """Time a case: return seconds of every peer whose result agrees with the library's, and why others were skipped."""
    inputs = inputs_of(case, device())
    calls, errors, skipped = agreeing(case, peers, inputs)
    graphs = captured(case, calls, skipped)
    times = measure.samples(graphs, rounds) if OURS in graphs else {}
    seconds = {name: statistics.median(x) for name, x in times.items()}
    spread = {name: measure.spread(x) for name, x in times.items()}
    calls.clear()
    graphs.clear()
    del inputs
    gc.collect()
    torch.cuda.empty_cache()
    work = {"bytes": traffic(case), "operations": operations(case)}
    return {"case": case.name, **work, "seconds": seconds, "spread": spread, "errors": errors, "skipped": skipped}


def agreeing(
    case: Case, peers: Mapping[str, Peer], inputs: dict[str, Any]
) -> tuple[dict[str, Call], dict[str, float], dict[str, str]]:
    """Return (calls whose results agree with the library's, relative errors, why other peers are skipped), by peer."""
    calls: dict[str, Call] = {}
    errors: dict[str, float] = {}
    skipped: dict[str, str] = {}
    want: torch.Tensor | None = None
    for name, peer in peers.items():
        if name != OURS and want is None:
            skipped[name] = f"nothing to compare with: {OURS} failed"
            continue
        try:
            call = peer(case, inputs)
            got = call().float()
            if name == OURS or want is None:
                want = got.clone()
            else:
                errors[name] = float((got - want).norm() / want.norm())
                if not errors[name] <= AGREE:  # NaN is refused, too
                    skipped[name] = f"differs from {OURS}: relative error {errors[name]:.2g}"
                    continue
            calls[name] = call
        except Cannot as reason:
            skipped[name] = str(reason)
        except ImportError as reason:
            skipped[name] = f"not installed: {reason}"
        except Exception as reason:  # a peer may fail in any way; the run goes on and says so
            skipped[name] = f"{type(reason).__name__}: {first_line(reason)}"
            _survived(case, name, reason)
    return calls, errors, skipped


def captured(case: Case, calls: Mapping[str, Call], skipped: dict[str, str]) -> dict[str, Any]:
    """Capture a CUDA graph of every call; add peers that cannot be captured to `skipped`."""
    graphs = {}
    for name, call in calls.items():
        try:
            graphs[name] = measure.capture(call)
        except Exception as reason:
            skipped[name] = f"not captured: {type(reason).__name__}: {first_line(reason)}"
            _survived(case, name, reason)
    return graphs


def run(
    suite: str,
    cases: Sequence[Case],
    peers: Mapping[str, Peer],
    rounds: int,
    output: Path,
    *,
    shown: Callable[[str], object] = print,
    **about: Any,
) -> dict[str, Any]:
    """Measure a suite, and write its JSON with the facts `about` it after every case."""
    report = {"suite": suite, **about, **versions(), "ceilings": measure.ceilings(), "rounds": rounds, "results": []}
    for number, case in enumerate(cases, 1):
        result = measured(case, peers, rounds)
        report["results"].append(result)
        report["totals"] = totals(report["results"])
        report["losses"] = losses(report["results"])
        write(report, output)
        shown(f"{suite} {number}/{len(cases)}  {summary(result)}")
    return report


def summary(result: Mapping[str, Any]) -> str:
    """Return one line about a case."""
    times = [f"{name} {seconds * 1e6:.1f}" for name, seconds in result["seconds"].items()]
    return f"{result['case']}: {', '.join(times) or result['skipped'][OURS]}"


def losses(results: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return cases in which a competitor is faster, with (library's time) / (its time); bounds are not competitors."""
    found = []
    for result in results:
        rivals = {name: s for name, s in result["seconds"].items() if name not in BOUNDS | {OURS}}
        if rivals and min(rivals.values()) < result["seconds"][OURS]:
            best = min(rivals, key=lambda name: rivals[name])
            factor = result["seconds"][OURS] / rivals[best]
            found.append({"case": result["case"], "peer": best, "factor": round(factor, 3)})
    return found


def totals(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return for each peer its summed seconds, the library's over the same cases, the number of cases, and the factor.

    The factor is the peer's sum divided by the library's.  `best rival` takes the fastest competitor of each case, a
    choice that no server could make.
    """
    table: dict[str, dict[str, float]] = {}
    best = [
        {"best rival": min(s for name, s in r["seconds"].items() if name not in BOUNDS | {OURS})}
        if set(r["seconds"]) - BOUNDS - {OURS}
        else {}
        for r in results
    ]
    for result, extra in zip(results, best, strict=True):
        for name, seconds in {**result["seconds"], **extra}.items():
            row = table.setdefault(name, {"seconds": 0.0, "ours": 0.0, "cases": 0})
            row["seconds"] += seconds
            row["ours"] += result["seconds"][OURS]
            row["cases"] += 1
    for row in table.values():
        row["factor"] = row["seconds"] / row["ours"]
    return table


def versions() -> dict[str, Any]:
    """Return what figures depend on: device, versions of packages, commit."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        found["cuda"], found["cudnn"] = str(torch.version.cuda), str(torch.backends.cudnn.version())
    return {"device": device_name(), "versions": found, "commit": os.environ.get("COMMIT") or _commit()}


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def folder(device: str) -> Path:
    """Return benchmarks/results/<gpu> of this checkout; the <gpu> of "NVIDIA H200" is h200."""
    words = re.findall(r"[a-z0-9]+", device.lower())
    return ROOT / "benchmarks" / "results" / "-".join(word for word in words if word != "nvidia")


def write(report: Mapping[str, Any], output: Path) -> None:
    """Write the report as <suite>.json, indented, with each cell of a map on one line."""
    output.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**report, "cells": []} if "cells" in report else report, indent=1)
    if "cells" in report:
        text = text.replace('"cells": []', '"cells": [\n  ' + ",\n  ".join(map(json.dumps, report["cells"])) + "\n ]")
    (output / f"{report['suite']}.json").write_text(text + "\n", encoding="utf-8")


def first_line(error: BaseException) -> str:
    """Return an error's message as one line of at most 200 characters."""
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else text[:200] + " ..."


def _survived(case: Case, peer: str, error: Exception) -> None:
    """Stop the run if the error has broken the CUDA context: every later figure would be wrong."""
    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            raise RuntimeError(f"{peer} broke the device in {case.name!r}: {first_line(error)}") from error


def _commit() -> str:
    """Return the commit at HEAD, with a + if the work tree differs from it; "" without git."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True).stdout.strip()
    except OSError:  # no git here
        return ""
