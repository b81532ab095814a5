"""Random calls of every function, compared with the reference for some time: `python -m tests.fuzz --seconds 60`.

Calls run on a GPU if there is one, else in Triton's interpreter.  PAGED_ATTN_DIALECT=torch selects plain torch on a
CPU, and SIMULATE=1 the simulator of the Hopper kernels.  The log has a line for each seed.  A failing call is shrunk
and printed as a test.  `--seed N --seeds 1` repeats one seed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import simulator  # before the package decides whether it is interpreted
from tests.support.formats import FORMATS
from tests.support.torch_ways import IN_TORCH

if not (torch.cuda.is_available() or simulator.SIMULATES):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on tensors on a CPU only if that is asked for
os.environ.setdefault("PAGED_ATTN_CHECK", "0")  # cases may have more queries than keys, which a checked call refuses

STUCK = 600.0  # seconds after which a call, its compilation included, is assumed never to end
GRACE = 180.0  # seconds beyond the budget, to shrink the last failure


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="when to stop (60)")
    parser.add_argument("--count", type=int, default=1 << 40, help="or after so many calls")
    parser.add_argument("--seeds", type=int, default=1 << 40, help="or after so many seeds, a configuration each")
    parser.add_argument("--seed", type=int, help="the first seed; otherwise any")
    parser.add_argument("--batches", type=int, help="calls of a configuration (400 on a GPU, else 6)")
    parser.add_argument("--processes", type=int, help="side by side (one for each core, 16 at most on a GPU)")
    parser.add_argument("--on-host", type=int, help="products up to which the reference stays on the host (2^23)")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, help="caches of these alone, fp8 with scales by token")
    parser.add_argument("--output", type=Path, help="a summary as JSON")
    parser.add_argument("--log", type=Path, default=Path("outputs/fuzz.jsonl"), help="a line for each seed")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)  # a worker process's folder
    parser.add_argument("--step", type=int, default=1, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(given: argparse.Namespace) -> int:
    """Start processes, gather their reports, and replace processes that a call has ended; return the exit status."""
    gpu = torch.cuda.is_available() and not simulator.SIMULATES
    first = random.SystemRandom().randrange(1 << 30) if given.seed is None else given.seed
    count = min(given.processes or min(os.cpu_count() or 1, 16 if gpu else 1 << 10), given.seeds)
    batches = given.batches or (400 if gpu else 6)
    where = (
        torch.cuda.get_device_name()
        if gpu
        else "simulator"
        if simulator.SIMULATES
        else "plain torch"
        if IN_TORCH
        else "interpreter"
    )
    print(
        f"{where}: seeds {first} and on, {batches} calls of each, {count} processes, {given.seconds:.0f} s", flush=True
    )
    started = time.time()
    until = started + given.seconds
    given.log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, given.log.open("a") as log:
        work = Path(folder)
        crew = [
            Worker(work, first + i, count, batches, until, (given.seeds + count - 1 - i) // count, _told(given))
            for i in range(count)
        ]
        reports: list[dict[str, Any]] = []
        while any(worker.alive() for worker in crew):
            time.sleep(0.2)
            for worker in crew:
                for report in worker.gather():
                    reports.append(report)
                    print(json.dumps({"time": time.strftime("%FT%T"), "where": where, **report}), file=log, flush=True)
                    if report["error"]:
                        print(f"\nseed {report['seed']}: {report['error']}\n\n{report['test']}\n", flush=True)
            if sum(x["calls"] for x in reports) >= given.count:
                (work / "stop").touch()
    return _summary(given, where, reports, time.time() - started, until)


def _summary(given: argparse.Namespace, where: str, reports: list[dict[str, Any]], seconds: float, until: float) -> int:
    failures = [x for x in reports if x["error"]]
    calls = sum(x["calls"] for x in reports)
    numbers = {
        "where": where,
        "calls": calls,
        "configurations": len(reports),
        "failures": len(failures),
        "seconds": round(seconds, 1),
        "calls per second": round(calls / seconds, 1),
        "busy seconds": round(sum(x["seconds"] for x in reports)),  # of all processes
        "compiling": round(sum(x.get("compiling", 0) for x in reports), 1),
        "building": round(sum(x.get("building", 0) for x in reports), 1),
        "comparing": round(sum(x.get("comparing", 0) for x in reports), 1),
        "seeds": [min((x["seed"] for x in reports), default=0), max((x["seed"] for x in reports), default=0)],
    }
    for name, value in numbers.items():
        print(f"{name:18} {value}")
    if given.output is not None:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        slowest = sorted(reports, key=lambda x: -x["seconds"])[:20]
        given.output.write_text(json.dumps({**numbers, "found": failures, "slowest": slowest}, indent=1))
    return 1 if failures else 0


def _told(given: argparse.Namespace) -> list[str]:
    """Options that a process has as they were given."""
    on_host = [] if given.on_host is None else ["--on-host", str(given.on_host)]
    return on_host + (["--formats", *given.formats] if given.formats else [])


class Worker:
    """A process that fuzzes; if a call ends it, another process takes its place."""

    def __init__(
        self, work: Path, seed: int, step: int, batches: int, until: float, seeds: int, told: list[str]
    ) -> None:
        self.folder, self.step, self.batches, self.until, self.told = work / str(seed), step, batches, until, told
        self.folder.mkdir()
        self.seed, self.left, self.read = seed, seeds, 0
        self.start()

    def start(self) -> None:
        (self.folder / "call").write_text("{}")
        command = [sys.executable, "-m", "tests.fuzz", "--work", str(self.folder), "--seed", str(self.seed)]
        command += ["--step", str(self.step), "--batches", str(self.batches), "--seeds", str(self.left)]
        command += ["--seconds", str(self.until), *self.told]
        with (self.folder / "said").open("wb") as said:
            self.process: subprocess.Popen[bytes] | None = subprocess.Popen(command, stdout=said, stderr=said)

    def alive(self) -> bool:
        return self.process is not None

    def gather(self) -> list[dict[str, Any]]:
        """Return new reports; a call that ended the process, or that does not end, is a failure."""
        if self.process is None:
            return []
        status = self.process.poll()
        path = self.folder / "reports"
        lines = path.read_text().splitlines(keepends=True)[self.read :] if path.exists() else []
        reports = [json.loads(line) for line in lines if line.endswith("\n")]
        self.read += len(reports)
        self.left -= len(reports)
        self.seed += self.step * len(reports)
        stuck = time.time() - (self.folder / "call").stat().st_mtime > STUCK or time.time() > self.until + GRACE
        if status is None and stuck:
            self.process.kill()
            status = self.process.wait()
        if status is None:
            return reports
        self.process = None
        if status != 0:
            said = _without_frames((self.folder / "said").read_text(errors="replace"))[-2000:]
            error = f"{'a call that does not end' if stuck else f'the process ended with status {status}'}: {said}"
            last = {
                "test": None,
                "configuration": "",
                "ways": [],
                **json.loads((self.folder / "call").read_text() or "{}"),
            }
            reports.append({"seed": self.seed, "calls": 0, "seconds": 0.0, **last, "error": error})
            self.left -= 1
            self.seed += self.step
            if self.left > 0 and time.time() < self.until and not (self.folder.parent / "stop").exists():
                self.start()
        return reports


def _without_frames(said: str) -> str:
    """Return a process's output without the frames of C++ stacks, which follow the error and would displace it."""
    return "\n".join(line for line in said.splitlines() if not line.startswith(("frame #", "Exception raised from")))


def work(given: argparse.Namespace) -> None:
    """Run a worker process: append a line for each seed to `reports`, and write each call to `call` before it runs.

    The file `call` tells what ended the process, if a call did.
    """
    if simulator.SIMULATES:
        from tests.simulator import process

        process.simulate()
    from paged_attn.launching import platform
    from tests.support import fuzzing
    from tests.support.interpreter import quicken
    from tests.support.random_calls import of_formats

    torch.set_num_threads(1)
    fuzzing.ON_HOST = fuzzing.ON_HOST if given.on_host is None else given.on_host
    lines = of_formats(given.formats) if given.formats else None
    warnings.filterwarnings("ignore")
    with pytest.MonkeyPatch.context() as patch, (given.work / "reports").open("a") as reports:
        if platform.INTERPRET:
            quicken(patch)

        def begin(call: fuzzing.Call) -> None:
            (given.work / "call").write_text(json.dumps({"ways": call.ways, "test": call.as_test()}))

        for i in range(given.seeds):
            if time.time() > given.seconds or (given.work.parent / "stop").exists():
                break
            found = fuzzing.explore(given.seed + i * given.step, given.batches, given.seconds, begin, lines)
            print(json.dumps(found._asdict()), file=reports, flush=True)


if __name__ == "__main__":
    asked = parsed()
    if asked.work is not None:
        work(asked)
    else:
        sys.exit(main(asked))
