"""The two ways of a call behind its checks: kernels that are launched, or plain torch, which imports no Triton."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

from ..launching.backend import Device
from ..launching.locks import FIRST


class Runs(Protocol):
    """What a kept call is: Runs of kernels, or a Run in plain torch."""

    in_torch: bool
    latent: bool  # keys and values of the cache begin at the same address
    value_dim: int | None  # of results, where it is not that of the queries
    kept: Any  # None: `first` makes every call
    again: Any

    def first(self, tensors: tuple[Any, ...]) -> None:
        """Make the call with these tensors."""


def way_of(device: Device) -> Any:
    """The module that makes calls on a device: `launched` or `in_torch`, which have the same functions."""
    with FIRST:
        return importlib.import_module(".in_torch" if device.in_torch else ".launched", __package__)
