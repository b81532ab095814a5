"""The portable kernels, in Triton: every call on every device, and the interpreter."""

from ...launching.backend import Device
from ...launching.launch import Step
from ...records.call import Call
from ...records.plan import Launch
from ...records.problem import Problem
from .launch_arguments import attention, need_of
from .regimes import launches, regime
from .words import heads_of, kernel_of, tiles_of, warps_of

__all__ = ["heads_of", "kernel_of", "launches", "need_of", "regime", "tiles_of", "warps_of"]

TITLE = "portable"


def why_not_on(device: Device) -> str | None:
    """They run everywhere."""
    return None


def uncovered(problem: Problem) -> list[str]:
    """They take everything."""
    return []


def read() -> None:
    """They are imported with this module."""


def copies(problem: Problem) -> None:
    """They read pages of any size."""
    return


def step(launch: Launch, call: Call) -> Step:
    """A launch with its arguments."""
    return attention(launch, call)


def multiplies_fp8(launch: Launch) -> bool:
    """Products are of 16 bits and more."""
    return False


def compiled(launch: Launch) -> tuple[object, ...]:
    """What tells the compiled kernel from that of another launch."""
    return (launch.shape, launch.config, launch.shortest, launch.longest, launch.least)
