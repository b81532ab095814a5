"""Which Triton this is, and what of its launch path differs from version to version.

Gluon's names are in hopper/shim.py.

Read in the sources of 3.6.0, 3.7.1, 3.8.0 and 3.9.0.  Each difference says the version that brought it.
"""

import functools
import re
from typing import Any

import triton

KNOWN = ((3, 6), (3, 7), (3, 8), (3, 9))  # both dialects and the launch path have been looked at

# Whether a product and a sum become one instruction is said with every launch: 3.9 warns where it is left open, and
# later versions are to leave it out.
OPTIONS = {"enable_fp_fusion": True}


@functools.cache
def number(version: str) -> tuple[int, int]:
    """(3, 6) of "3.6.0"."""
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


def known() -> bool:
    """Whether this is a release of a version that was read; what is built between releases is not."""
    version = triton.__version__
    return number(version) in KNOWN and "dev" not in version and "git" not in version


def older() -> bool:
    """Whether this is older than any that was read."""
    return number(triton.__version__) < KNOWN[0]


def in_words() -> str:
    """The known versions, as messages name them."""
    return f"{'.'.join(map(str, KNOWN[0]))} to {'.'.join(map(str, KNOWN[-1]))}"


def encoded(descriptor: Any, meta: Any) -> Any:
    """What the launcher for CUDA makes of a descriptor: an object that holds it, sizes and strides."""
    from triton.backends.nvidia.driver import make_tensordesc_arg as make

    # 3.8: also the launch's other arguments, which it does not look at
    return make(descriptor, meta, ()) if make.__code__.co_argcount == 3 else make(descriptor, meta)


def has_stubs(module: Any) -> bool:
    """Whether a vendor's driver compiles a launcher in C for every kernel.  3.7: one does for all."""
    return hasattr(module, "make_launcher")
