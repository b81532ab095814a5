"""A kernel that a process compiled is found on disk by every other, whatever it asked for first."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import triton

from paged_attn.launching import triton_version
from tests.support import warm

KEYS = """
import importlib, json, sys
from paged_attn.kernels import common, portable
from paged_attn.launching.jit_functions import settle

kernels = []
for name in sys.argv[2:]:
    module, _, kernel = name.partition(":")
    kernels.append(getattr(importlib.import_module(f"paged_attn.kernels.{module}"), kernel))
for kernel in kernels:
    settle(kernel) if sys.argv[1] == "settled" else kernel.cache_key
used = [(k, repr(v)) for x in kernels for (k, _), (v, _) in x.used_global_vals.items() if "constexpr" in repr(v)]
print(json.dumps([{x.__name__: x.cache_key for x in kernels}, used]))
"""
HOPPER = ("hopper.shares:shares_kernel", "hopper.blocks:blocks_kernel", "hopper.mixed:mixed_kernel")
PORTABLE = (
    "portable.attention_kernel:attention_kernel", "portable.cache_write:write_kv_kernel",
    "common.merge:merge_blocks_kernel", "common.copying:copy_pages_kernel",
)  # fmt: skip
KERNELS = (*HOPPER, *PORTABLE)


def found(how: str, *kernels: str) -> Any:
    """Keys of kernels, made in this order by a process of its own, and constants that are part of them."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = warm.run(["-c", KEYS, how, *kernels], environment, Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_no_order_of_kernels_changes_a_key() -> None:
    orders = (KERNELS, KERNELS[::-1], KERNELS[2:] + KERNELS[:2])
    first, *others = [found("settled", *order)[0] for order in orders]
    assert len(first) == len(KERNELS)
    assert others == [first] * len(others)


@pytest.mark.skipif(triton_version.number(triton.__version__) >= (3, 8), reason="this Triton makes them alike")
def test_without_it_an_order_does() -> None:
    assert found("plain", *KERNELS)[0] != found("plain", *KERNELS[::-1])[0]


def test_no_two_constants_of_kernels_have_one_name() -> None:
    """Triton lists those of one name by where their modules lie in memory, which is another place in each process."""
    values = defaultdict(set)
    for name, value in found("settled", *KERNELS)[1]:
        values[name].add(value)
    assert len(values) > 10
    assert [name for name, told in values.items() if len(told) > 1] == []


COMPILED = """
import shutil, sys
from pathlib import Path

import torch
import triton

from paged_attn.launching import platform, triton_version
from paged_attn.launching.platform import Device
from paged_attn.preparation import processes

library = Path(triton_version.options(True)["extern_libs"]["libdevice"])
if len(sys.argv) > 1:  # as torch.compile does it: another library, and other bytes
    other = Path(sys.argv[1], "libdevice.10.bc")
    other.write_bytes(library.read_bytes() + b"0000")
    triton.knobs.nvidia.libdevice_path = str(other)
triton.knobs.compilation.listener = lambda *, cache_hit, **_: print("hit" if cache_hit else "compiled")
processes.compile_only(Device("sm90", 132), lambda _: None)
import paged_attn

k, v = torch.empty(2, 1, 2, 16)
cache = torch.empty(2, 4, 16, 2, 16)
paged_attn.write_kv(k, v, cache[0], cache[1], torch.empty(1, dtype=torch.int64))
"""


@pytest.mark.skipif("nvidia" not in triton.backends.backends, reason="this Triton does not compile for nvidia")
def test_a_library_that_torch_compile_sets_changes_no_key(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    said = []
    for more in ([], [str(tmp_path)]):
        done = warm.run(["-c", COMPILED, *more], environment, Path(__file__).parents[2])
        assert done.returncode == 0, done.stderr[-4000:]
        said.append(done.stdout.split())
    assert said == [["compiled"], ["hit"]]


OTHER_ASSEMBLER = """
import os, sys
from pathlib import Path

import triton
from triton.backends.nvidia import compiler

from paged_attn.preparation import processes, subprocess
from tests.preparation.asked import ASKED, H200, TINY

if __name__ == "__main__":
    compiler.get_ptxas_version(90)  # as torch.compile of 2.11 does it: a look, and then another assembler
    other = Path(sys.argv[2], "ptxas")
    other.write_text(f"#!/bin/sh\\n{compiler.get_ptxas(90).path} $@ && echo of another build\\n")
    other.chmod(0o755)
    os.environ["TRITON_PTXAS_PATH"] = str(other)
    if sys.argv[1] == "apart":
        subprocess.prepare(ASKED)
    else:
        with processes.Pool(H200, False, 1) as pool:
            pool.compile([TINY.work()], lambda items, *_: items)
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: print("hit" if cache_hit else "compiled")
    processes.compile_only(H200, lambda _: None)
    for batch in TINY.batches():
        processes.compile_call(TINY.model, batch, ("both",))
"""


@pytest.mark.skipif("nvidia" not in triton.backends.backends, reason="this Triton does not compile for nvidia")
@pytest.mark.parametrize("how", ["apart", "spawned"])
def test_an_assembler_that_torch_compile_names_changes_no_key(how: str, tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("TRITON_PTXAS_PATH", None)
    done = warm.run(["-c", OTHER_ASSEMBLER, how, str(tmp_path)], environment, Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-4000:]
    assert {*done.stdout.split()} == {"hit"}
