"""The dialects of kernels, best first: each is a module `kernels/<name>/dialect.py` of the same functions.

No other module names one.  A new dialect is a folder under `kernels/` and a name here.  Beside these there is plain
torch, which makes a call at once from its tensors: nothing here imports Triton before a dialect of it is asked for.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..launching.backend import Device
from ..launching.locks import FIRST

if TYPE_CHECKING:
    from torch import Tensor

    from ..arguments import Options, Tensors
    from ..launching.launch import Step
    from ..launching.scratch import Need
    from ..records.call import Call
    from ..records.copies import Copies
    from ..records.plan import Launch
    from ..records.problem import Problem

DIALECTS = ("hopper", "portable")  # the last one covers every call on every device

TORCH = "torch"  # takes all calls whose device is in plain torch, and plans none


class Dialect(Protocol):
    """What a dialect's module has."""

    TITLE: str  # as `explain` names its kernels

    def why_not_on(self, device: Device) -> str | None:
        """Why its kernels do not run on a device, or in this process; None: they do."""

    def uncovered(self, problem: Problem) -> Sequence[str]:
        """What a call asks for that its kernels do not have."""

    def copies(self, problem: Problem) -> Copies | None:
        """Whole pages that keys of a call that it does not cover are worth copying to, should it cover it then."""

    def launches(self, problem: Problem) -> tuple[Launch, ...]:
        """The launches of a call that it covers; of these some may be another dialect's."""

    def regime(self, problem: Problem) -> tuple[str, str]:
        """What its planner takes such a call for, by name, and why it has these launches."""

    def read(self) -> None:
        """Import its kernels."""

    def step(self, launch: Launch, call: Call) -> Step:
        """A launch with its arguments."""

    def need_of(self, launch: Launch) -> Need:
        """Scratch of a launch that cuts keys."""

    def kernel_of(self, launch: Launch) -> str:
        """The name of the kernel."""

    def warps_of(self, launch: Launch) -> int:
        """Warps of a program, but for those that serve what is beside its launch."""

    def tiles_of(self, launch: Launch) -> str:
        """How a program holds its tiles, in words."""

    def heads_of(self, launch: Launch) -> str:
        """What has blocks of its own, in words."""

    def multiplies_fp8(self, launch: Launch) -> bool:
        """Whether its products are of fp8 operands."""

    def compiled(self, launch: Launch) -> tuple[Any, ...]:
        """What tells its compiled kernel from that of another launch for the same tensors."""


class Direct(Protocol):
    """What the module of plain torch has: the public functions, of calls that were checked."""

    TITLE: str

    def attention(self, given: Tensors, options: Options, scale: float, cap: float | None, lse: Tensor | None) -> None:
        """Write `given.out`, and log-sum-exps where they are asked for."""

    def ways(self, given: Tensors, options: Options, scale: float, cap: float | None) -> list[str]:
        """How each group of a call's sequences is computed, in words."""

    def write(
        self, k: Tensor, v: Tensor | None, k_cache: Tensor, v_cache: Tensor | None, slot_mapping: Tensor, k_scale: Any,
        v_scale: Any, kv_layout: str, part: str | None,
    ) -> None:  # fmt: skip
        """Write the keys, the values, or both where `part` is None."""

    def merge_states(self, out: Tensor, lse: Tensor, outs: Tensor, lses: Tensor) -> None:
        """Write the union of states to out and lse."""


@functools.cache
def dialect(name: str) -> Any:
    """A dialect of `DIALECTS`, or TORCH, imported when it is first asked for."""
    with FIRST:
        return importlib.import_module(f"..kernels.{name}.dialect", __package__)


def torch_dialect() -> Direct:
    """The dialect of plain torch."""
    direct: Direct = dialect(TORCH)
    return direct


def chosen(problem: Problem) -> Dialect:
    """The first dialect that runs on the device and covers the call."""
    for name in DIALECTS[:-1]:
        found = dialect(name)
        if found.why_not_on(problem.device) is None and not found.uncovered(problem):
            return found
    return dialect(DIALECTS[-1])
