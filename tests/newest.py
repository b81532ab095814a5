"""What the newest Triton makes of both dialects: a table of what compiles, what gives right results, and why not.

`make newest` runs it beside that Triton.  The library runs its portable kernels there, and the Hopper ones if asked to,
so this is how one learns of a change before it matters; nothing here is required of a Triton outside the tested list.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

# Each kernel, both schedules, every kind of loop and number format; few, for CI waits for them.
VARIANTS = {
    "portable": (
        *("decode", "decode split features", "decode e4m3", "prefill", "prefill features", "prefill packed"),
        *("prefill invariant split", "write e4m3", "merge"),
    ),
    "hopper": ("decode", "decode split e4m3", "speculate 32", "prefill window sinks", "prefill all fp8", "mixed e4m3"),
    # small batches of `hopper_cases`, against the reference
    "simulated": ("decodes", "even drafts", "chunk, features", "chunk of e4m3", "mixed over e4m3, group 3"),
}
DONE = {"portable": "compiles", "hopper": "compiles", "simulated": "right"}
TARGET = "sm90"


def main() -> None:
    """Try every variant in a process per dialect, and say what came of it; exit status 0 whatever that is."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--dialect", choices=VARIANTS, help="try these here, and print a JSON object each")
    dialect = options.parse_args().dialect
    if dialect is not None:
        for line in tried(dialect):
            print(json.dumps(line), flush=True)
        return
    import triton

    started = monotonic()
    children = {name: _child(name) for name in VARIANTS}
    rows = [row for name, child in children.items() for row in _rows(name, child)]
    good = sum(why == "" for *_, why in rows)
    took = f"{monotonic() - started:.0f} s"
    print(f"Triton {triton.__version__} does {good} of {len(rows)} variants for {TARGET}, {took}")
    for name, variant, why in rows:
        print(f"  {name:9} {variant:24} {why or DONE[name]}")


def tried(dialect: str) -> Iterator[dict[str, str]]:
    """Each variant when it begins and when it is done; one that fails has a reason."""
    os.environ["TRITON_INTERPRET"] = "0"
    os.environ["PAGED_ATTN_HOPPER"] = "0" if dialect == "portable" else "1"
    os.environ["SIMULATE"] = "1" if dialect == "simulated" else "0"
    from paged_attn import backend

    missing = None if dialect == "portable" else backend.why_no_gluon()
    attempt = _simulate if dialect == "simulated" else _compile
    for variant in VARIANTS[dialect]:
        yield {"variant": variant}
        try:
            if missing is not None:
                raise ImportError(missing)
            attempt(variant)
            yield {"variant": variant, "why": ""}
        except Exception as error:  # a compiler fails in ways of its own, and they are what is reported
            yield {"variant": variant, "why": _reason(error)}


def _compile(variant: str) -> None:
    from tests.machine_code import compile_calls
    from tests.variants import calls

    kernels = [
        kernel.metadata.name for _, kernel in compile_calls(TARGET, [(variant, dict(calls([variant]))[variant])])
    ]
    assert kernels, "nothing was launched"


def _simulate(variant: str) -> None:
    from tests.cases import run
    from tests.hopper_cases import SMALL, sized
    from tests.simulator.process import simulate

    simulate()
    run(sized(variant, **SMALL[variant]))


def _child(dialect: str) -> subprocess.Popen[str]:
    """A compiler that dies takes its process with it: that of one dialect, not this one."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.newest", "--dialect", dialect]
    root = Path(__file__).parents[1]
    return subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _rows(dialect: str, child: subprocess.Popen[str]) -> Iterator[tuple[str, str, str]]:
    """(dialect, variant, why not) of all variants, also of those that a process which died did not come to."""
    said, errors = child.communicate()
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"nothing could be tried:\n{errors[-2000:]}")
    begun = {line["variant"] for line in lines}
    results = {line["variant"]: line["why"] for line in lines if "why" in line}
    for variant in VARIANTS[dialect]:
        status = f"the compiler died, status {child.returncode}"
        died = status if variant in begun else f"not tried: {status}"
        yield dialect, variant, results.get(variant, died)


def _reason(error: BaseException) -> str:
    """The first error of a chain, in a line."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).rpartition("^")[2].split())  # a compiler shows the source, and what is wrong under it
    return f"{type(error).__name__}: {text if len(text) <= 160 else '... ' + text[-160:]}"


if __name__ == "__main__":
    main()
