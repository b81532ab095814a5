"""The Hopper kernels (sm_90), in Gluon."""

from ...launching.backend import Device
from ...launching.launch import Step
from ...launching.locks import FIRST
from ...records.call import Call
from ...records.plan import Launch
from ..arguments import numbers_of
from . import available
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


def why_not_on(device: Device) -> str | None:
    """Why these kernels do not run on a device, or in this process; None: they do."""
    if device.arch != "sm90":
        return "the others are for sm90"
    why = available.why_no_gluon()
    return why and f"not {TITLE}, for {why}"


def read() -> None:
    """Import the kernels."""
    with FIRST:
        from . import arguments  # noqa: F401, of which Gluon is optional


def step(launch: Launch, call: Call) -> Step:
    """A launch with its arguments."""
    with FIRST:
        from .arguments import attention  # Gluon is optional

    return attention(launch, call, numbers_of(launch, call))


def multiplies_fp8(launch: Launch) -> bool:
    """Whether the products are of fp8 operands."""
    return launch.pipe.FP8_PRODUCTS


def compiled(launch: Launch) -> tuple[object, ...]:
    """What tells the compiled kernel from that of another launch; `least` follows lengths and is not specialised."""
    return (launch.shape, launch.pipe, launch.config, launch.shortest, launch.longest)
