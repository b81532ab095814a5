"""A reduced suite under every known Triton other than the environment's, or, as a report, under the newest.

`make tritons` fetches each version into a folder of its own and tries a few variants of each dialect: it applies the
environment's checks of machine code for sm_90, simulates Hopper kernels and interprets portable ones.  `make newest`
does the same with the newest version on the index, unless it is known, and only reports.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from tests.support import index

ROOT = Path(__file__).parents[1]
TARGET = "sm90"
# Known versions other than the environment's -> packages that each needs instead of the environment's.
VERSIONS = {
    "3.6.0": ("numpy<2.4",),  # its interpreter converts arrays of one element to loop bounds, which numpy 2.4 refuses
    "3.8.0": (),
    "3.9.0": (),
}
# Variants with each kernel, both schedules, every kind of loop and number format; few, because CI waits for them.
VARIANTS = {
    "portable": (
        *("decode", "decode split features", "decode e4m3", "prefill", "prefill features", "prefill packed"),
        *("prefill invariant split", "write e4m3", "merge", "write qkv", "decode split int8 by token", "gathered"),
        *("decode split packed new", "decode split int4", "decode int4 new"),
    ),
    "hopper": (
        *("decode of 12", "decode split all fp8", "speculate 32", "prefill window sinks", "long", "two lists"),
        *("chunk x-packed new", "mixed", "mixed e4m3, no lse"),
    ),
    # keys and values of two widths, wide heads and latents, in few rows and in blocks of many rows
    "wide": (
        *("decode 192 and 128", "decode split latent", "decode latent 64 heads", "decode e4m3 latent 32 heads"),
        "prompts new 192 and 128",
    ),
    # small batches of `hopper_cases`, against the reference
    "simulated": ("decodes", "even drafts", "chunk, features", "chunk of e4m3", "mixed over e4m3, group 3"),
    # `selftest`: a call of each layout and kind, against the reference
    "interpreted": ("selftest",),
}
# Dialects that one version leaves out, because CI waits: the oldest and the newest version try them.
LEFT_OUT = {"3.8.0": ("simulated", "wide")}
DONE = {"portable": "sound", "hopper": "sound", "wide": "sound", "simulated": "right", "interpreted": "right"}
# (version, variant) -> beginning of an accepted complaint about what this version's compiler does worse.
KNOWN_COMPLAINTS = {
    ("3.8.0", "long"): "permutes words of weights",  # carried as numbers: `shim.COPIES_OPERANDS` says why
    ("3.8.0", "mixed e4m3, no lse"): "has 50 KB of machine code",  # 0.6 KB more: LLVM's vectorizer is off
    ("3.8.0", "decode split int8 by token"): "spills 24 bytes",  # of 168 registers; 3.6 has 167, 3.7 138
    ("3.9.0", "prefill"): "spills 48 bytes",  # the portable kernel, whose calls are the Hopper kernels' on sm_90
    ("3.9.0", "mixed"): "spills in a loop over keys",  # one register, in the loop of few rows
    # 0.6 KB more, and 40 bytes spilled instead of 12, by --regAllocOptLevel=2: ptxas 13 allocates registers otherwise,
    # and ptxas 12, which 3.6 to 3.8 have for sm_90, ignores it.
    ("3.9.0", "chunk x-packed new"): "has 115 KB of machine code",
}


class Row(NamedTuple):
    """The outcome of a variant."""

    dialect: str
    variant: str
    why: str  # the reason of a failure; "" if there was none


def main() -> None:
    """Try every variant under every version, with a process for each version and dialect, as many at once as cores."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--dialect", choices=VARIANTS, help="try these here, and print a JSON object each")
    options.add_argument("--newest", action="store_true", help="only report on the newest Triton on the index")
    options.add_argument("--folder", type=Path, default=ROOT / "build", help="where they are fetched to")
    asked = options.parse_args()
    if asked.dialect is not None:
        for line in tried(asked.dialect):
            print(json.dumps(line), flush=True)
        return
    started = monotonic()
    versions: dict[str, tuple[str, ...]] = {"": ()} if asked.newest else VERSIONS
    folders, failed = {}, 0
    for version, needs in versions.items():
        folder = asked.folder / f"triton-{version or 'newest'}"
        try:
            fetch(version, needs, folder)
            folders[version] = folder
        except index.NoAnswer as why:
            print(f"Triton {version or 'newest'} is left out, for the package index does not answer: {why}")
        except index.Failed as why:
            print(f"Triton {version or 'newest'} cannot be fetched: {why}")
            failed += 1
    if asked.newest and folders and (newest := version_in(folders[""])) in known():
        print(f"The newest Triton is {newest}, which other runs try")
        return
    jobs = [
        (version, dialect)
        for dialect in reversed(VARIANTS) for version in folders if dialect not in LEFT_OUT.get(version, ())
    ]  # fmt: skip
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = list(pool.map(lambda job: rows(job[1], *ended(child(job[1], folders[job[0]]))), jobs))
    for version in folders:
        of_version = [row for job, found_rows in zip(jobs, outcomes) if job[0] == version for row in found_rows]
        good = sum(not row.why for row in of_version)
        failed += len(of_version) - good
        print(f"Triton {version or 'newest'} does {good} of {len(of_version)} variants")
        for row in of_version:
            print(f"  {row.dialect:11} {row.variant:24} {row.why or DONE[row.dialect]}")
    print(f"{monotonic() - started:.0f} s")
    sys.exit(1 if failed and not asked.newest else 0)


def fetch(version: str, needs: Sequence[str], folder: Path) -> None:
    """Install Triton into a folder, unless it is there; version "" is the newest, which is always installed anew."""
    if not version:
        shutil.rmtree(folder, ignore_errors=True)
    index.install(folder, f"triton=={version}" if version else "triton", *needs)


def version_in(folder: Path) -> str:
    """The version of the Triton that is installed in a folder."""
    (made,) = folder.glob("triton-*.dist-info")
    return made.name.removeprefix("triton-").removesuffix(".dist-info")


def known() -> set[str]:
    """Versions that `make tritons` or the main suite tries."""
    return {*VERSIONS, importlib.metadata.version("triton")}


def tried(dialect: str) -> Iterator[dict[str, str]]:
    """Yield each variant twice: when it begins, and when it is done, with `why`: "", or the reason of a failure."""
    os.environ["TRITON_INTERPRET"] = "1" if dialect == "interpreted" else "0"
    os.environ["PAGED_ATTN_HOPPER"] = "0" if dialect in ("portable", "interpreted") else "1"
    os.environ["SIMULATE"] = "1" if dialect == "simulated" else "0"
    from paged_attn.kernels.hopper.dialect import why_no_gluon

    missing = why_no_gluon() if os.environ["PAGED_ATTN_HOPPER"] == "1" else None
    attempt = {"simulated": _simulate, "interpreted": _interpret, "wide": _compile_wide}.get(dialect, _compile)
    for variant in VARIANTS[dialect]:
        yield {"variant": variant}
        try:
            if missing is not None:
                raise ImportError(missing)
            attempt(variant)
            yield {"variant": variant, "why": ""}
        except Exception as error:  # whatever a compiler raises is to be reported
            yield {"variant": variant, "why": _reason(error)}


def _compile(variant: str) -> None:
    import triton

    from tests.kernels.portable import test_machine_code
    from tests.machine_code import compile_calls, report
    from tests.support import hopper_complaints
    from tests.support.variants import calls

    wrong = []
    compiled = list(compile_calls(TARGET, [(variant, dict(calls([variant]))[variant])]))
    assert compiled, "nothing was launched"
    for _, kernel in compiled:
        facts, name = report(variant, kernel), kernel.metadata.name
        if name in ("blocks_kernel", "shares_kernel", "mixed_kernel"):
            wrong += hopper_complaints.complaints(facts)
        elif name == "merge_blocks_kernel" and variant in hopper_complaints.MERGED:
            wrong += hopper_complaints.merge_complaints(facts)
        else:
            wrong += test_machine_code.complaints(TARGET, facts)
    known = KNOWN_COMPLAINTS.get((triton.__version__, variant))
    if known is not None:
        assert any(text.startswith(known) for text in wrong), f"no longer {known!r}: take it from the table"
        wrong = [text for text in wrong if not text.startswith(known)]
    assert not wrong, "; ".join(wrong)


def _compile_wide(variant: str) -> None:
    """Compile kernels of two widths, wide heads or latents; check shared memory, ptxas' advice and products."""
    from tests.kernels.hopper import test_wide_blocks_machine_code, test_wide_shares_machine_code
    from tests.machine_code import SHARED, compile_calls, report
    from tests.support import hopper_complaints, variants, wide_variants

    few_rows = variant in wide_variants.SHARES
    tests = test_wide_shares_machine_code if few_rows else test_wide_blocks_machine_code
    call = dict((wide_variants if few_rows else variants).calls([variant]))[variant]
    reports = [report(variant, kernel) for _, kernel in compile_calls(TARGET, [(variant, call)])]
    (facts,) = [x for x in reports if x["kernel"] == ("shares_kernel" if few_rows else "blocks_kernel")]
    assert facts["shared"] <= SHARED[TARGET], f"takes {facts['shared']} bytes of shared memory"
    assert not facts["advice"], facts["advice"]
    loops = [x for x in facts["innermost"] if hopper_complaints.products(x) >= 8]
    assert {x["HGMMA"] for x in loops} == {tests.PRODUCTS[variant]}, "does other products"


def _simulate(variant: str) -> None:
    from tests.simulator.process import simulate
    from tests.support.cases import run
    from tests.support.hopper_cases import SMALL, sized

    simulate()
    run(sized(variant, **SMALL[variant]))


def _interpret(_: str) -> None:
    import torch

    from paged_attn import selftest

    wrong = [f"{name}: error {error:.2g}" for name, error, most in selftest.run(torch.device("cpu")) if error > most]
    assert not wrong, "; ".join(wrong)


def child(dialect: str, folder: Path) -> subprocess.Popen[str]:
    """Start a process that tries one dialect; a compiler's crash ends that process alone."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.tritons", "--dialect", dialect]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        "TRITON_CACHE_DIR": str(folder.with_name(f"{folder.name}-cache")),
    }
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(process: subprocess.Popen[str]) -> tuple[str, str, int]:
    """Wait for a process; return (its output, its errors, its status)."""
    said, errors = process.communicate()
    return said, errors, process.returncode


def rows(dialect: str, said: str, errors: str, status: int) -> list[Row]:
    """Return a row for each variant of a dialect, also for those that a crashed process did not reach."""
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"nothing could be tried:\n{errors[-2000:]}")
    begun = {line["variant"] for line in lines}
    results = {line["variant"]: line["why"] for line in lines if "why" in line}
    died = f"the compiler died, status {status}"
    return [
        Row(dialect, variant, results.get(variant, died if variant in begun else f"not tried: {died}"))
        for variant in VARIANTS[dialect]
    ]


def _reason(error: BaseException) -> str:
    """Return the first error of a chain of causes, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).rpartition("^")[2].split())  # a compiler prints the source, and the error below it
    return f"{type(error).__name__}: {text if len(text) <= 400 else '... ' + text[-400:]}"


if __name__ == "__main__":
    main()
