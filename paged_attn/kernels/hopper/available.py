"""Whether the Hopper kernels can be read and trusted in this process."""

import functools
import warnings

from ...launching import trust, versions
from ...launching.locks import FIRST


@functools.cache
def _why_unnamed() -> str | None:
    """What Gluon's kernels miss in this Triton; warns once."""
    try:
        with FIRST:
            from . import shim  # noqa: F401
    except ImportError as error:
        warnings.warn(f"the Hopper kernels need another Triton, the portable ones run instead: {error}", stacklevel=2)
        return f"they need another Triton: {error}"
    return None


def why_no_gluon() -> str | None:
    """Why all calls go to the portable kernels: PAGED_ATTN_HOPPER=0, or another Triton than Gluon's kernels know.

    PAGED_ATTN_HOPPER=1 takes any Triton in which they can be read.
    """
    if trust.ASKED == "0":
        return "PAGED_ATTN_HOPPER is 0"
    if trust.ASKED != "1" and versions.older():
        return trust.why_untrusted("sm90")
    return _why_unnamed() or (None if trust.ASKED == "1" else trust.why_untrusted("sm90"))


def gluon_available() -> bool:
    """Whether this Triton's Gluon is the one that the Hopper kernels are written in; warns once if not."""
    return why_no_gluon() is None
