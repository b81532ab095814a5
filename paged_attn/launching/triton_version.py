"""Versions of Triton: the version that runs, known versions, and differences between their launch paths.

Functions import what they need, so that the command line can print versions without torch.  Differences between
Gluon's names are in kernels/hopper/shim.py.

Facts come from the sources of 3.6.0, 3.7.1, 3.8.0 and 3.9.0.  Each difference names the version that brought it.
"""

import functools
import importlib
import importlib.util
import os
import re
import subprocess
from pathlib import Path
from typing import Any

from .locks import FIRST

KNOWN = ((3, 6), (3, 7), (3, 8), (3, 9))  # versions whose sources were read: launch path, Triton and Gluon
ASSEMBLER = "TRITON_PTXAS_PATH"

# Unless a step says otherwise, a product and a sum may become one instruction.  Triton 3.9 warns without the option,
# and later versions will not fuse by default.
OPTIONS = {"enable_fp_fusion": True}


@functools.lru_cache(maxsize=16)
def number(version: str) -> tuple[int, int]:
    """The first two numbers of a version: (3, 6) for "3.6.0"."""
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


def this() -> str:
    """The version of the Triton of this process."""
    return str(importlib.import_module("triton").__version__)


def known(version: str | None = None) -> bool:
    """Whether a version, by default this process's, is among KNOWN; builds between releases are not."""
    version = version or this()
    return number(version) in KNOWN and "dev" not in version and "git" not in version


def older(version: str | None = None) -> bool:
    """Whether a version, by default this process's, is older than all of KNOWN."""
    return number(version or this()) < KNOWN[0]


def in_words() -> str:
    """The known versions as text: "3.6 to 3.9"."""
    return f"{'.'.join(map(str, KNOWN[0]))} to {'.'.join(map(str, KNOWN[-1]))}"


@functools.lru_cache(maxsize=2)
def options(cuda: bool) -> dict[str, Any]:
    """Options of each launch, which the options of its step may replace.

    On CUDA the options name Triton's own libdevice.  torch.compile of some versions replaces libdevice for all kernels
    that the process compiles later.  A kernel's key on disk has a digest of libdevice, so prepared kernels would not
    be found.
    """
    spec = importlib.util.find_spec("triton.backends.nvidia") if cuda else None
    if spec is None or not spec.submodule_search_locations:
        return OPTIONS
    library = Path(spec.submodule_search_locations[0], "lib", "libdevice.10.bc")
    return OPTIONS | ({"extern_libs": {"libdevice": str(library)}} if library.is_file() else {})


def assembler_was_another(capability: int) -> bool:
    """Whether ASSEMBLER now names another ptxas version than the one in this process's kernel keys.

    Triton reads the version once, for its keys.  torch.compile of torch 2.11 makes Triton read it, and then sets
    ASSEMBLER to the ptxas that torch brings.  A process that begins later would use torch's ptxas, and this process
    would not find its kernels.
    """
    if ASSEMBLER not in os.environ or not capability:
        return False
    compiler = importlib.import_module("triton.backends.nvidia.compiler")
    command = [compiler.get_ptxas(capability).path, "--version"]
    return bool(subprocess.check_output(command).decode("utf-8") != compiler.get_ptxas_version(capability))


def encoded(descriptor: Any, meta: Any) -> Any:
    """The CUDA launcher's form of a descriptor: an object that holds the descriptor, then sizes and strides."""
    with FIRST:
        from triton.backends.nvidia.driver import make_tensordesc_arg as make

    # 3.8 also takes the launch's other arguments, and ignores them
    return make(descriptor, meta, ()) if make.__code__.co_argcount == 3 else make(descriptor, meta)


def has_stubs(module: Any) -> bool:
    """Whether a vendor's driver compiles a C launcher for every kernel; from 3.7 on one launcher serves all kernels."""
    return hasattr(module, "make_launcher")


def builds_launchers() -> bool:
    """Whether CUDA's driver compiles a C launcher for every kernel."""
    return has_stubs(importlib.import_module("triton.backends.nvidia.driver"))
