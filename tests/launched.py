"""Count, without a GPU, which variants of kernels a GPU's suite compiles, and estimate how long that takes.

    LAUNCHED=build/launched python -m pytest -p tests.launched -n 2 tests    # -m smoke: of that part
    python -m tests.launched build/launched                                  # sums, by file and in all

This is a pytest plugin.  It runs the tests that a machine with an H200 would run, but each launch ends where Triton
would compile, so nothing is computed or compared.  Some tests fail for this reason.  Launches after a test's first
failure, in other processes, or on the device that a test calls "cuda" are not counted.
"""

from __future__ import annotations

import collections
import hashlib
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = os.environ.get("LAUNCHED")
# Kernel -> seconds of one core for a variant, measured with 5 to 16 variants of each under Triton 3.6.0.
SECONDS = {
    "mixed_kernel": 5.0, "blocks_kernel": 4.0, "shares_kernel": 2.4, "attention_kernel": 1.5,
    "merge_blocks_kernel": 0.9, "merge_states_kernel": 0.6, "copy_pages_kernel": 0.4,
}  # fmt: skip
ANOTHERS = 0.2
# Measured with 14 workers and one H200: 568 tests of 750 variants took 157 seconds.  With 48 workers and four H200,
# compilation took 4.1 times the seconds of a core given here, for an unknown reason.
SLOWER, SECONDS_PER_TEST, START, WORKERS = 1.4, 0.4, 45, 12

lines: list[dict[str, Any]] = []
seen: set[str] = set()  # variants that the running test would compile


def _passes(*args: Any, **options: Any) -> float:
    return 0.0


def _compile(kernel: Any, key: Any, *args: Any) -> None:
    """Replace Triton's compilation: note the variant, and let the launch end."""
    text = re.sub(r" at 0x[0-9a-f]+", "", f"{kernel.module}:{kernel._fn_name} {key}")
    seen.add(f"{kernel._fn_name.rpartition('.')[2]} {hashlib.sha256(text.encode()).hexdigest()[:12]}")


def pytest_configure() -> None:
    import triton
    from triton.runtime.jit import JITFunction

    from tests.support import comparing

    comparing.compare = torch.testing.assert_close = _passes  # before other modules import them
    torch.equal = lambda *_: True
    from paged_attn.launching import launch, platform
    from paged_attn.preparation import processes
    from tests.support import cases, hopper_cases

    device = platform.Device("sm90", 132)
    triton.runtime.driver.set_active(processes.CompileOnly(processes.target_of(device)))
    platform.pretend(device)
    launch.run = lambda kernel, grid, *args, **options: kernel.warmup(*args, grid=grid, **options)
    JITFunction._do_compile = _compile
    torch.cuda.is_available = lambda: True  # while tests are collected
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    build = cases.build
    cases.build = lambda case, device="cpu", filled=True: build(case, device, False)
    cases.poison_scratch = _passes
    hopper_cases.DEVICE = "cpu"
    torch.set_num_threads(1)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems() -> None:
    torch.cuda.is_available = lambda: False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Any:
    report = yield
    if call.when == "call":
        lines.append(dict(test=item.nodeid, variants=sorted(seen)))
    if call.when == "teardown":
        seen.clear()
    return report


def pytest_sessionfinish() -> None:
    if FOLDER and lines:
        Path(FOLDER).mkdir(parents=True, exist_ok=True)
        (Path(FOLDER) / f"{os.getpid()}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))


def main(folder: str) -> None:
    tests = [json.loads(x) for file in sorted(Path(folder).glob("*.jsonl")) for x in file.read_text().splitlines()]
    files: dict[str, set[str]] = collections.defaultdict(set)
    for test in tests:
        files[test["test"].partition("::")[0]] |= {*test["variants"]}

    def seconds(variants: set[str]) -> float:
        return math.fsum(SECONDS.get(x.split()[0], ANOTHERS) for x in variants)

    for name, variants in sorted(files.items(), key=lambda x: -seconds(x[1])):
        if variants:
            print(f"{seconds(variants):7.1f} s of a core, {len(variants):4} variants: {name}")
    everything = set[str]().union(*files.values())
    launching = sum(bool(x["variants"]) for x in tests)
    print(f"{seconds(everything):7.1f} s of a core, {len(everything):4} variants, by {launching} of {len(tests)} tests")
    whole = (SLOWER * seconds(everything) + SECONDS_PER_TEST * launching) / WORKERS + START
    print(f"about {whole:.0f} s of {WORKERS} workers on a GPU's host")


if __name__ == "__main__":
    main(*sys.argv[1:])
else:
    os.environ["TRITON_INTERPRET"] = "0"
