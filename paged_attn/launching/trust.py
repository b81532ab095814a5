"""Whether this Triton is one whose kernels and launches are known to be right for an architecture."""

import os

import triton

from . import trial, versions

ASKED = os.environ.get("PAGED_ATTN_HOPPER")


def why_untrusted(arch: str) -> str | None:
    """Why launches are left to Triton: nobody knows how this one makes kernels for this architecture, or how it fails.

    A version that is not known is tried, unless PAGED_ATTN_HOPPER says what to do.
    """
    if versions.known():
        return None
    if versions.older() or ASKED in ("0", "1") or not arch.startswith("sm"):
        return f"they know Triton {versions.in_words()}, and this is {triton.__version__}"
    return trial.why_not(arch)
