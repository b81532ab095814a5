"""The two ways to make a checked call, by kernels or by plain torch without Triton, and limits that both have."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

from ..arguments import TINY, Options
from ..launching.locks import FIRST
from ..launching.platform import Device

FAR = 1 << 30  # farther than any key, and position + FAR still fits 32 bits
LEAST_CAP = 2.0**-40  # replaces a smaller softcap, whose inverse may be infinite; scores are as good as 0 with either
MOST_CAPS = 2.0**96  # largest |softmax scale| / softcap


class Runs(Protocol):
    """A kept call: Launches of kernels, or a Run in plain torch."""

    in_torch: bool
    latent: bool  # keys and values of the cache begin at the same address
    value_dim: int | None  # dims of results; None: as many as queries have
    kept: Any  # None: `first` makes the next call; otherwise `again` can make it
    again: Any
    apart: set[Any]  # addresses, or distances of two, at which tensors share no memory (`call_cache.apart`)

    def first(self, tensors: tuple[Any, ...]) -> None:
        """Make the call with these tensors."""


def way_of(device: Device) -> Any:
    """The module that makes calls on a device: `launched` or `in_torch`, which have functions of equal names."""
    with FIRST:
        return importlib.import_module(".in_torch" if device.in_torch else ".launched", __package__)


def scale_and_cap(options: Options, head_dim: int) -> tuple[float, float | None]:
    """Return (softmax scale, softcap or None): float32 numbers whose ratio is finite."""
    scale = head_dim**-0.5 if options.softmax_scale is None else float(options.softmax_scale)
    if abs(scale) < TINY:
        scale = 0.0  # all scores are 0 either way
    if options.softcap <= 0:
        return scale, None
    cap = max(float(options.softcap), LEAST_CAP)
    # with a larger ratio all scores are at the cap, and an infinite ratio would turn 0 into NaN
    return min(max(scale, -MOST_CAPS * cap), MOST_CAPS * cap), cap
