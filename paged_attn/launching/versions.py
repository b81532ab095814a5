"""Which Triton this is, and what of its launch path differs from version to version.

Gluon's names are in hopper/shim.py.

Read in the sources of 3.6.0, 3.7.1, 3.8.0 and 3.9.0.  Each difference says the version that brought it.
"""

import importlib
from typing import Any

import triton

from . import tritons
from .locks import FIRST
from .tritons import KNOWN, in_words, number

__all__ = ["KNOWN", "OPTIONS", "builds_launchers", "encoded", "has_stubs", "in_words", "known", "number", "older"]

# Whether a product and a sum become one instruction is said with every launch: 3.9 warns where it is left open, and
# later versions are to leave it out.
OPTIONS = {"enable_fp_fusion": True}


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
