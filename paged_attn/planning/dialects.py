"""The dialects of kernels, best first.  Each is a module `kernels/<name>/dialect.py` with the functions of Dialect.

The planner and all code that uses a plan find dialects by these names.  A new dialect is a folder under
`kernels/` and a name here.  Plain torch makes no plans: it computes a call directly from its tensors.  This file
imports Triton only when a Triton dialect is asked for.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..launching.locks import FIRST
from ..launching.platform import Device

if TYPE_CHECKING:
    from torch import Tensor

    from ..arguments import Options, Tensors
    from ..launching.launch import Step
    from ..launching.scratch import Need
    from ..records.copies import Copies
    from ..records.layout import Call
    from ..records.plan import Launch
    from ..records.problem import Problem

DIALECTS = ("hopper", "portable")  # the last one covers every call on every device that has Triton

TORCH = "torch"  # takes all calls of devices that plain torch serves, and makes no plans


class Dialect(Protocol):
    """The names in a dialect's module."""

    TITLE: str  # name of its kernels in `explain`

    def why_not_on(self, device: Device) -> str | None:
        """Why the dialect's kernels do not run on a device, or in this process; None if they do."""

    def uncovered(self, problem: Problem) -> Sequence[str]:
        """Features that a call asks for and the dialect's kernels lack; empty if they cover the call."""

    def copies(self, problem: Problem) -> Copies | None:
        """Pages in scratch to which a first launch copies keys and values, for other launches of the call to read.

        None: a copy is impossible, not needed, or not worth its time.
        """

    def launches(self, problem: Problem) -> tuple[Launch, ...]:
        """Launches of a covered call; a launch may belong to another dialect (`Launch.dialect`)."""

    def regime(self, problem: Problem) -> tuple[str, str]:
        """(name of the regime to which the planner assigns a call, the reason for its launches)."""

    def read(self) -> None:
        """Import the dialect's kernels."""

    def step(self, launch: Launch, call: Call) -> Step:
        """The step of a launch: kernel, grid and arguments."""

    def need_of(self, launch: Launch) -> Need:
        """Scratch memory that a launch with cut keys needs."""

    def kernel_of(self, launch: Launch) -> str:
        """Name of the launch's kernel."""

    def warps_of(self, launch: Launch) -> int:
        """Warps of a program that work for this launch, not for `Launch.beside`."""

    def tiles_of(self, launch: Launch) -> str:
        """Sizes, stages and loads of a program's tiles, in words."""

    def heads_of(self, launch: Launch) -> str:
        """Sets of heads that have separate blocks, in words: KV heads, pairs of KV heads, or parts of groups."""

    def multiplies_fp8(self, launch: Launch) -> bool:
        """Whether both products of the launch have fp8 operands."""

    def compiled(self, launch: Launch) -> tuple[Any, ...]:
        """Cache key of a launch's compiled kernel.

        Two launches with equal cache keys run the same compiled kernel if the facts of their tensors are equal, too.
        """


class Direct(Protocol):
    """The names in the module of plain torch: implementations of the public functions, for checked arguments."""

    TITLE: str

    def attention(self, given: Tensors, options: Options, scale: float, cap: float | None, lse: Tensor | None) -> None:
        """Write `given.out`, and the log-sum-exps if lse is not None."""

    def ways(self, given: Tensors, options: Options, scale: float, cap: float | None) -> list[str]:
        """How each group of a call's sequences is computed, in words."""

    def write(
        self, k: Tensor, v: Tensor | None, k_cache: Tensor, v_cache: Tensor | None, slot_mapping: Tensor, k_scale: Any,
        v_scale: Any, kv_layout: str, part: str | None,
    ) -> None:  # fmt: skip
        """Write keys and values to the caches; part: "keys", "values", or None for both."""

    def write_qkv(
        self, q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor | None, slot_mapping: Tensor,
        positions: Tensor | None, cos_sin: Tensor | None, q_norm: Tensor | None, k_norm: Tensor | None, k_scale: Any,
        v_scale: Any, q_scale: Any, q_out: Tensor, kv_layout: str, interleaved: bool,
        mrope_sections: Sequence[int] | None, eps: float, norm_offset: float, part: str | None,
    ) -> None:  # fmt: skip
        """Write q_out, which may be q, and keys and values to the caches; part: "keys" (no values), or None (both)."""

    def merge_states(self, out: Tensor, lse: Tensor, outs: Tensor, lses: Tensor, sinks: Tensor | None) -> None:
        """Merge states `outs` and `lses`, and sinks, into out and lse."""

    def move_pages(
        self, sources: Sequence[Tensor], targets: Sequence[Tensor], src: Tensor, dst: Tensor, page_axis: int
    ) -> None:
        """Copy page src[i] of each source to page dst[i] of its target; a negative id skips the pair."""

    def gather_pages(
        self, cache: Tensor, page_table: Tensor, page_starts: Tensor | None, seq_lens: Tensor, out: Tensor,
        kv_layout: str, scale: Any,
    ) -> None:  # fmt: skip
        """Write the rows of all sequences to out; rows after them, and rows of a page with a negative id, are zeros."""


@functools.cache
def dialect(name: str) -> Any:
    """A dialect of `DIALECTS`, or TORCH, imported at the first call."""
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
