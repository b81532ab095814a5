"""What the newest Triton makes of both dialects: a table of what compiles and what does not, and why.

`make newest` runs it beside that Triton.  The library runs its portable kernels there and never the Hopper ones, so
this is how one learns of a change before it matters; nothing here is required of a Triton outside the tested list.
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
}
TARGET = "sm90"


def main() -> None:
    """Compile every variant in a process per dialect, and say what came of it; exit status 0 whatever that is."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--dialect", choices=VARIANTS, help="compile these here, and print a JSON object each")
    dialect = options.parse_args().dialect
    if dialect is not None:
        for line in compiled(dialect):
            print(json.dumps(line), flush=True)
        return
    import triton

    started = monotonic()
    children = {name: _child(name) for name in VARIANTS}
    rows = [row for name, child in children.items() for row in _rows(name, child)]
    good = sum(why == "" for *_, why in rows)
    took = f"{monotonic() - started:.0f} s"
    print(f"Triton {triton.__version__} compiles {good} of {len(rows)} variants for {TARGET}, {took}")
    for name, variant, why in rows:
        print(f"  {name:9} {variant:24} {why or 'compiles'}")


def compiled(dialect: str) -> Iterator[dict[str, str]]:
    """Each variant when it begins and when it is done; one that fails has a reason."""
    os.environ["TRITON_INTERPRET"] = "0"
    os.environ["PAGED_ATTN_HOPPER"] = "1" if dialect == "hopper" else "0"
    import triton

    from paged_attn import backend
    from tests.machine_code import compile_calls
    from tests.variants import calls

    backend.TESTED_TRITON = (triton.__version__,)  # for once: what is not tested would run the portable kernels
    missing = backend.why_no_gluon() if dialect == "hopper" else None
    known = dict(calls(VARIANTS[dialect]))
    for variant in VARIANTS[dialect]:
        yield {"variant": variant}
        try:
            if missing is not None:
                raise ImportError(missing)
            kernels = [kernel.metadata.name for _, kernel in compile_calls(TARGET, [(variant, known[variant])])]
            assert kernels, "nothing was launched"
            yield {"variant": variant, "why": ""}
        except Exception as error:  # a compiler fails in ways of its own, and they are what is reported
            yield {"variant": variant, "why": _reason(error)}


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
