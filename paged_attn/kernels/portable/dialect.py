"""The dialect of the portable Triton kernels: every call on every device, and the interpreter."""

from ...launching.launch import Step
from ...launching.platform import Device
from ...records.call import Call
from ...records.plan import Launch
from ...records.problem import Problem
from .launch_arguments import attention, need_of
from .regimes import launches, regime
from .words import heads_of, kernel_of, tiles_of, warps_of

__all__ = ["heads_of", "kernel_of", "launches", "need_of", "regime", "tiles_of", "warps_of"]

TITLE = "portable"


def why_not_on(device: Device) -> str | None:
    """Return None: the portable kernels run on every device."""
    return None


def uncovered(problem: Problem) -> list[str]:
    """Return nothing: the portable kernels take every call."""
    return []


def read() -> None:
    """Do nothing: this module has imported the kernels."""


def copies(problem: Problem) -> None:
    """Return None: the portable kernels read pages of any size."""
    return


def step(launch: Launch, call: Call) -> Step:
    """Return the step of a launch: kernel, grid and arguments."""
    return attention(launch, call)


def multiplies_fp8(launch: Launch) -> bool:
    """Return False: operands of products have 16 bits or more."""
    return False


def compiled(launch: Launch) -> tuple[object, ...]:
    """Return the key of a launch's compiled kernel."""
    return (launch.shape, launch.config, launch.shortest, launch.longest, launch.least)
