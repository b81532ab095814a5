"""Time cases with several versions of this project on one card, to see what a change brings.

    python -m benchmarks.beside ../before . decode --only "b1 x" --cells 3x64x16384

    python -m benchmarks.beside . .:build/triton-3.9.0 decode prefill --output beside.json

A version is a folder with a checkout; `git archive COMMIT | tar -x -C FOLDER` makes one.  A colon and a folder of
packages, such as another Triton, may follow.  Versions are timed in turns, each turn in a new process: in a process
that has timed many other kernels, some kernels take up to 12% longer.  Cases that a version does not know or cannot run
are left out.  Results that differ from those of the first version are reported.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

SAMPLED = 200_000  # upper bound on how many elements of a result are compared
AGREE = 4e-3  # upper bound on the relative error, in 2-norm, of results that agree: two roundings to 8 bits


class Version(NamedTuple):
    """A checkout, and a folder of packages that take precedence over the installed ones."""

    folder: Path
    packages: Path | None = None

    def __str__(self) -> str:
        return str(self.folder) if self.packages is None else f"{self.folder}:{self.packages}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile with many processes, time with one, print a table."""
    from rich.console import Console

    options = _options(arguments)
    names = [*chosen(options.suites, options.only), *options.cells]
    compiling = max(1, min(options.processes, len(names)))
    with tempfile.TemporaryDirectory() as folder:
        results = [Path(folder) / f"{i}.pt" for i in range(len(options.versions))]
        for version in options.versions:
            parts = [_start(version, names[i::compiling]) for i in range(compiling)]
            for process in parts:
                process.communicate()
        seconds: list[dict[str, list[float]]] = [{} for _ in options.versions]
        console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
        signal.signal(signal.SIGTERM, _stop)
        try:
            for _ in range(options.turns):
                for version, result, times in zip(options.versions, results, seconds):
                    for name, time in _finish(_start(version, names, options.rounds, result)).items():
                        times.setdefault(name, []).append(time)
        finally:  # an interrupted run prints what it has measured
            console.print(table(list(map(str, options.versions)), names, seconds))
            if options.output:
                options.output.write_text(json.dumps(_report(options.versions, seconds), indent=1) + "\n")
        for version, result in zip(options.versions[1:], results[1:]):
            for name, error in differences(results[0], result):
                console.print(f"{version} differs from {options.versions[0]} in {name}: {error:.2g}", markup=False)


def _stop(number: int, frame: object) -> None:
    """Leave through `finally`, as after Ctrl-C; without a handler, the signal would end the process at once."""
    raise SystemExit(128 + number)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    from benchmarks.suites import SUITES

    parser = argparse.ArgumentParser(prog="beside", description=__doc__)
    parser.add_argument("versions", nargs="+", metavar="FOLDER | SUITE", help="versions, and suites of these")
    parser.add_argument("--only", nargs="*", default=[""], help="cases with one of these in their names")
    parser.add_argument("--cells", nargs="*", default=[], metavar="BxQxK", help="sequences x query tokens x keys")
    parser.add_argument("--rounds", type=int, default=20, help="timings of a call in each turn  [20]")
    parser.add_argument("--turns", type=int, default=2, help="of each version  [2]")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="that compile")
    parser.add_argument("--output", type=Path, help="a JSON file")
    options = parser.parse_args(arguments)
    versions = {word: version for word in options.versions if (version := _version(word))}
    options.suites = [word for word in options.versions if word not in versions]
    options.versions = [*versions.values()]
    if not versions:
        parser.error("no folder holds a version")
    for word in options.suites:
        if word not in SUITES:
            parser.error(f"{word!r} is neither a folder with a version nor a suite: {', '.join(SUITES)}")
    return options


def _version(word: str) -> Version | None:
    """Return the version that a word of the command line names; None: the word is no folder with a checkout."""
    folder, _, packages = word.partition(":")
    if not (Path(folder) / "paged_attn").is_dir():
        return None
    return Version(Path(folder), Path(packages) if packages else None)


def _report(versions: Sequence[Version], seconds: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Any]:
    """Return seconds of every turn, with the versions of packages that each version ran with."""
    report = []
    for version, times in zip(versions, seconds):
        process = _run(
            version, ["-c", "from benchmarks import runner; import json; print(json.dumps(runner.versions()))"]
        )
        said = process.communicate()[0].splitlines()
        report.append({"version": str(version), **(json.loads(said[-1]) if said else {}), "seconds": dict(times)})
    return {"versions": report}


def chosen(suites: Sequence[str], words: Sequence[str]) -> list[str]:
    """Return the suites' case names that contain one of the words."""
    from benchmarks.suites import SUITES

    return [case.name for suite in suites for case in SUITES[suite] if any(word in case.name for word in words)]


def table(versions: Sequence[str], names: Sequence[str], seconds: Sequence[Mapping[str, Sequence[float]]]) -> Any:
    """Microseconds of every turn, and the ratio of a version's median to that of the first version."""
    from rich.table import Table

    made = Table("case", *versions, box=None, pad_edge=False)
    for name in names:
        before = seconds[0].get(name)
        cells = []
        for number, times in enumerate(seconds):
            text = " ".join(f"{1e6 * time:.1f}" for time in times.get(name, ()))
            if text and before and number:
                text += f"  {statistics.median(times[name]) / statistics.median(before):.3f}x"
            cells.append(text or "-")
        made.add_row(name, *cells)
    return made


def differences(first: Path, other: Path) -> Iterator[tuple[str, float]]:
    """Yield (case, relative error) of results that differ by more than rounding."""
    import torch

    wanted, found = torch.load(first), torch.load(other)
    for name in wanted.keys() & found.keys():
        error = float((found[name] - wanted[name]).norm() / wanted[name].norm())
        if not error <= AGREE:  # true of NaN, too
            yield name, error


# ---- a version, in a process of its own ------------------------------------------------------------


def _start(
    version: Version, names: Sequence[str], rounds: int = 0, result: Path | None = None
) -> subprocess.Popen[str]:
    """Run this file with a version's modules.  With `rounds` = 0, the process only compiles."""
    asked = json.dumps(dict(names=list(names), rounds=rounds, result=str(result or "")))
    return _run(version, [__file__, asked])


def _run(version: Version, words: Sequence[str]) -> subprocess.Popen[str]:
    """Start a Python that imports a version's modules."""
    paths = [path.resolve() for path in (version.packages, version.folder) if path is not None]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    words = [sys.executable, *words]
    return subprocess.Popen(words, env=environment, cwd=version.folder, stdout=subprocess.PIPE, text=True)


def _finish(process: subprocess.Popen[str]) -> dict[str, float]:
    with process:
        try:
            said = process.communicate()[0].splitlines()
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise SystemExit(f"a version failed with status {process.returncode}")
    return json.loads(said[-1])


def alone(names: Sequence[str], rounds: int, result: str) -> dict[str, float]:
    """Time the cases with the modules that this process imports; return median seconds by case, {} without rounds."""
    import torch

    import paged_attn
    from benchmarks import measure
    from benchmarks.inputs import build  # benchmarks.inputs has it in older versions, too
    from benchmarks.suites import SUITES, uniform

    known = {case.name: case for cases in SUITES.values() for case in cases}
    calls, samples = {}, {}
    for name in names:
        if re.fullmatch(r"\d+x\d+x\d+", name):
            known[name] = uniform(name, *map(int, name.split("x")))
        if name in known:
            inputs = build(known[name], "cuda")
            calls[name] = lambda inputs=inputs: paged_attn.paged_attention(**inputs)
            try:
                out = calls[name]()
            except Exception as error:  # an older version may not have what a case asks for
                print(f"{name}: {error!r}", file=sys.stderr)
                del calls[name]
                continue
            flat = (out[0] if isinstance(out, tuple) else out).float().flatten()
            samples[name] = flat[:: -(-flat.numel() // SAMPLED)].cpu()
    if not rounds:
        return {}
    torch.save(samples, result)
    return measure.measure(calls, rounds)


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        sys.path.pop(0)  # this file's folder
        print(json.dumps(alone(**json.loads(sys.argv[1]))))
    else:
        main()
