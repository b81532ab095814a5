"""The dialect of the Hopper kernels (sm_90, in Gluon), and whether this process can import and trust them."""

import functools
import warnings

from ...launching import triton_trial, triton_version
from ...launching.launch import Step
from ...launching.locks import FIRST
from ...launching.platform import Device
from ...records.call import Call
from ...records.plan import Launch
from ..shared_steps import numbers_of
from .planning.coverage import copies, launches, need_of, regime, uncovered
from .words import heads_of, kernel_of, tiles_of, warps_of

__all__ = [
    "copies",
    "heads_of",
    "kernel_of",
    "launches",
    "need_of",
    "regime",
    "tiles_of",
    "uncovered",
    "warps_of",
]

TITLE = "Hopper's"


@functools.cache
def _why_unnamed() -> str | None:
    """Return the names that this Triton's Gluon lacks, in a sentence; None: it has all.  Warns once."""
    try:
        with FIRST:
            from . import shim  # noqa: F401
    except ImportError as error:
        warnings.warn(f"the Hopper kernels need another Triton, the portable ones run instead: {error}", stacklevel=2)
        return f"they need another Triton: {error}"
    return None


def why_no_gluon() -> str | None:
    """Return why all calls go to the portable kernels (PAGED_ATTN_HOPPER=0, or an unknown Triton), else None.

    PAGED_ATTN_HOPPER=1 accepts every Triton in which the kernels can be imported.
    """
    if triton_trial.ASKED == "0":
        return "PAGED_ATTN_HOPPER is 0"
    if triton_trial.ASKED != "1" and triton_version.older():
        return triton_trial.why_untrusted("sm90")
    return _why_unnamed() or (None if triton_trial.ASKED == "1" else triton_trial.why_untrusted("sm90"))


def gluon_available() -> bool:
    """Whether the Hopper kernels can be used with this Triton; warns once if names are missing."""
    return why_no_gluon() is None


def why_not_on(device: Device) -> str | None:
    """Return why the Hopper kernels do not run on a device, or in this process; None: they do."""
    if device.arch != "sm90":
        return "the others are for sm90"
    why = why_no_gluon()
    return why and f"not {TITLE}, for {why}"


def read() -> None:
    """Import the kernels."""
    with FIRST:
        from . import launch_arguments  # noqa: F401, of which Gluon is optional


def step(launch: Launch, call: Call) -> Step:
    """Return the step of a launch: kernel, grid and arguments."""
    with FIRST:
        from .launch_arguments import attention  # Gluon is optional

    return attention(launch, call, numbers_of(launch, call))


def multiplies_fp8(launch: Launch) -> bool:
    """Whether the launch multiplies fp8 operands."""
    return launch.pipe.FP8_PRODUCTS


def compiled(launch: Launch) -> tuple[object, ...]:
    """Return the key of a launch's compiled kernel; `least` follows lengths and is not specialised."""
    return (launch.shape, launch.pipe, launch.config, launch.shortest, launch.longest)
