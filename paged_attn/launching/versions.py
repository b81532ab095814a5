"""Which Triton this is, and what of its launch path differs from version to version.

Gluon's names are in hopper/shim.py.

Read in the sources of 3.6.0, 3.7.1, 3.8.0 and 3.9.0.  Each difference says the version that brought it.
"""

import functools
import importlib
import importlib.util
import os
import subprocess
from pathlib import Path
from typing import Any

import triton

from . import tritons
from .locks import FIRST
from .tritons import KNOWN, in_words, number

__all__ = [
    "ASSEMBLER", "KNOWN", "assembler_was_another", "builds_launchers", "encoded", "has_stubs", "in_words", "known",
    "number", "older", "options",
]  # fmt: skip
ASSEMBLER = "TRITON_PTXAS_PATH"

# Whether a product and a sum become one instruction is said with every launch: 3.9 warns where it is left open, and
# later versions are to leave it out.
OPTIONS = {"enable_fp_fusion": True}


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


def known() -> bool:
    """Whether this Triton is a release of a version that was read."""
    return tritons.known(triton.__version__)


def older() -> bool:
    """Whether this is older than any that was read."""
    return tritons.older(triton.__version__)


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
