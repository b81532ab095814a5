"""What has to work without Triton, in plain torch: importing, calls, the command, the demo, and a reduced suite.

`make without-triton` runs it in an environment with links to every package of this one except Triton.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "without-triton"
SUITE = (
    "features/test_paged_attention.py", "arguments/test_edges.py", "features/test_properties.py",
    "compiled/test_ops.py", "features/test_shard.py", "steps/test_padding.py", "steps/test_step.py",
    "calls/test_plain_torch.py", "calls/test_write_kv.py", "calls/test_write_qkv.py", "calls/test_merge_states.py",
    "calls/test_page_copies.py", "calls/test_page_gathers.py",
    "checks/test_accepted.py", "checks/test_check.py", "checks/test_contents.py",
)  # fmt: skip
IMPORT = """
import importlib.util, paged_attn
assert importlib.util.find_spec("triton") is None
from paged_attn.launching import platform
assert not platform.HAS_TRITON and paged_attn.distributed.merge and paged_attn.prepare and paged_attn.paged_attention
"""
COMMANDS = (
    ["-c", IMPORT],
    ["-m", "paged_attn", "info", "--json"],
    ["-m", "paged_attn", "check"],
    ["-m", "paged_attn", "explain", "--queries", "1x300,5x1", "--keys", "1x900,5x600", "--json"],
    ["-m", "paged_attn", "explain", "--keys", "1x900,5x600", "--batch", "6", "--shard", "1", "2", "16"],
    ["-m", "paged_attn", "demo", "--requests", "12", "--output", str(FOLDER / "demo.png")],
    ["-m", "pytest", "-q", *[f"tests/{name}" for name in SUITE]],
)


def environment() -> Path:
    """Make an environment with links to this one's packages, Triton and paged_attn excepted; return its Python."""
    venv.create(FOLDER, symlinks=os.name != "nt", clear=True)
    python = FOLDER / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    asked = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    packages = Path(subprocess.run([python, "-c", asked], check=True, capture_output=True, text=True).stdout.strip())
    for entry in Path(torch.__file__).parents[1].iterdir():
        if not entry.name.startswith(("triton", "paged_attn", "_editable_impl_paged_attn")):
            (packages / entry.name).symlink_to(entry)
    return python


def main() -> None:
    python = environment()
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "PAGED_ATTN_"))}
    for command in COMMANDS:
        asked = variables | {"PYTHONPATH": str(ROOT)} | ({"PAGED_ATTN_DIALECT": "torch"} if "pytest" in command else {})
        print("without Triton:", *command[:4], flush=True)
        subprocess.run([python, *command], cwd=ROOT, env=asked, check=True)


if __name__ == "__main__":
    sys.exit(main())
