"""Which Triton this is, which releases were read, and what of their launch path differs.

Nothing is imported but what a function asks for: the command says versions without torch.  Gluon's names are in
hopper/shim.py.

Read in the sources of 3.6.0, 3.7.1, 3.8.0 and 3.9.0.  Each difference says the version that brought it.
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

KNOWN = ((3, 6), (3, 7), (3, 8), (3, 9))  # both dialects and the launch path have been looked at
ASSEMBLER = "TRITON_PTXAS_PATH"

# Whether a product and a sum become one instruction is said with every launch: 3.9 warns where it is left open, and
# later versions are to leave it out.
OPTIONS = {"enable_fp_fusion": True}


@functools.lru_cache(maxsize=16)
def number(version: str) -> tuple[int, int]:
    """(3, 6) of "3.6.0"."""
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


def this() -> str:
    """The version of the Triton of this process."""
    return str(importlib.import_module("triton").__version__)


def known(version: str | None = None) -> bool:
    """Whether a version, this one where none is named, was read; what is built between releases was not."""
    version = version or this()
    return number(version) in KNOWN and "dev" not in version and "git" not in version


def older(version: str | None = None) -> bool:
    """Whether a version, this one where none is named, is older than any that was read."""
    return number(version or this()) < KNOWN[0]


def in_words() -> str:
    """The known versions, as messages name them."""
    return f"{'.'.join(map(str, KNOWN[0]))} to {'.'.join(map(str, KNOWN[-1]))}"


@functools.lru_cache(maxsize=2)
def options(cuda: bool) -> dict[str, Any]:
    """Options of every launch.

    On CUDA they name Triton's own library of functions.  torch.compile of some versions puts another one in its place
    for all kernels of the process that are compiled later, and a kernel's key on disk has a digest of the library: what
    was prepared would not be found.
    """
    spec = importlib.util.find_spec("triton.backends.nvidia") if cuda else None
    if spec is None or not spec.submodule_search_locations:
        return OPTIONS
    library = Path(spec.submodule_search_locations[0], "lib", "libdevice.10.bc")
    return OPTIONS | ({"extern_libs": {"libdevice": str(library)}} if library.is_file() else {})


def assembler_was_another(capability: int) -> bool:
    """Whether ASSEMBLER names another version than the one in this process's keys of kernels: that of its first look.

    torch.compile of 2.11 looks, and then names the assembler that torch brings.  A process that begins later would
    take that one, and this process would not find its kernels.
    """
    if ASSEMBLER not in os.environ or not capability:
        return False
    compiler = importlib.import_module("triton.backends.nvidia.compiler")
    command = [compiler.get_ptxas(capability).path, "--version"]
    return bool(subprocess.check_output(command).decode("utf-8") != compiler.get_ptxas_version(capability))


def encoded(descriptor: Any, meta: Any) -> Any:
    """What the launcher for CUDA makes of a descriptor: an object that holds it, sizes and strides."""
    with FIRST:
        from triton.backends.nvidia.driver import make_tensordesc_arg as make

    # 3.8: also the launch's other arguments, which it does not look at
    return make(descriptor, meta, ()) if make.__code__.co_argcount == 3 else make(descriptor, meta)


def has_stubs(module: Any) -> bool:
    """Whether a vendor's driver compiles a launcher in C for every kernel.  3.7: one does for all."""
    return hasattr(module, "make_launcher")


def builds_launchers() -> bool:
    """The same of CUDA's."""
    return has_stubs(importlib.import_module("triton.backends.nvidia.driver"))
