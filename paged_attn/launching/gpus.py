"""GPUs by their usual names, for commands that plan or compile without a GPU, and measured limits of some GPUs.

This file imports no torch.
"""

from typing import NamedTuple


class GPU(NamedTuple):
    """What the planner may know of a GPU.  platform.Device has the same fields for any device."""

    arch: str  # "sm90", "gfx942"
    multiprocessors: int


GPUS = {
    "a100": GPU("sm80", 108),
    "l40s": GPU("sm89", 142),
    "h20": GPU("sm90", 78),
    "h100": GPU("sm90", 132),
    "h200": GPU("sm90", 132),
    "b200": GPU("sm100", 148),
    "mi300x": GPU("gfx942", 304),
}
# The GPU that is meant if only its architecture is named.
ARCHES = {GPUS[name].arch: GPUS[name] for name in ("a100", "l40s", "h200", "b200", "mi300x")}


def named(text: str) -> GPU:
    """Return the GPU that a text names: h200, sm90, or sm90:132, where 132 is the number of multiprocessors."""
    arch, _, count = text.lower().partition(":")
    if not count and arch in GPUS | ARCHES:
        return (GPUS | ARCHES)[arch]
    if not (arch.startswith(("sm", "gfx")) and count.isdecimal() and int(count) > 0):
        known = ", ".join([*GPUS, *ARCHES])
        raise ValueError(f"a device must be one of {known}, or with its multiprocessors, like sm89:142, got {text!r}")
    return GPU(arch, int(count))


class Ceilings(NamedTuple):
    """Limits of a device, each measured alone."""

    bytes_per_s: float  # of a read-only stream
    flops_per_s: float  # of a large product of 16-bit matrices


# Measured limits of GPUs of sm90, with CUDA's names: a read-only stream, and 8192^3 bfloat16 products, which reach 740
# to 820 TFLOP/s depending on power.
CEILINGS = {
    "h200": ("NVIDIA H200", Ceilings(4.54e12, 770e12)),
    "h100": ("NVIDIA H100 80GB HBM3", Ceilings(3.11e12, 816e12)),
}
