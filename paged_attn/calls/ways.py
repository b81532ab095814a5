"""The two ways of a checked call: launches of kernels, or plain torch, which imports no Triton."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

from ..launching.locks import FIRST
from ..launching.platform import Device


class Runs(Protocol):
    """A kept call: Launches of kernels, or a Run in plain torch."""

    in_torch: bool
    latent: bool  # keys and values of the cache begin at the same address
    value_dim: int | None  # dims of results; None: as many as queries have
    kept: Any  # None: `first` makes every call
    again: Any

    def first(self, tensors: tuple[Any, ...]) -> None:
        """Make the call with these tensors."""


def way_of(device: Device) -> Any:
    """The module that makes calls on a device: `launched` or `in_torch`, which have functions of equal names."""
    with FIRST:
        return importlib.import_module(".in_torch" if device.in_torch else ".launched", __package__)
