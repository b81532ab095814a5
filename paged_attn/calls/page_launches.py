"""Launches of copies of pages and of gathered rows.

A launch that copies pages reads the addresses of its tensors from a table on the device.  Up to LIMIT tables stay in
memory, because CUDA graphs may hold their addresses.  The host fills a table, so a call whose tensors have no table yet
cannot be captured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..arguments import scales_slots
from ..checks.axes import Door
from ..checks.options import refused
from ..checks.pages import refuse_pageable
from ..kernels.portable.page_kernels import RowScale, gather_pages_kernel, move_pages_kernel
from ..launching import driver, scratch
from ..launching.launch import Launches, Step
from ..launching.locks import left_free
from ..launching.platform import device_of
from ..launching.template import arguments_for
from ..records import layout
from ..records.formats import cdiv, is_scaled, next_power_of_2
from ..strides import PageRuns, runs_of

LANES = 512  # units that a program moves at a time: with vectors of 16 bytes, four for each thread
WARPS = 4
# Pages are cut until a launch has about this many parts.  The largest page has at most one part for each LANES units.
FEW_PROGRAMS = 2048
MAX_PROGRAMS = 8192
# Programs of a launch that reads or writes host memory.  A link to the host needs fewer bytes in flight than a device's
# memory.  These programs have at most 1 MiB in flight, and leave most warps of the GPU to other kernels.  Not measured
# yet.
HOST_PROGRAMS = 128
LIMIT = 4096  # tables that stay, some KiB each; beyond the limit, a call makes a table for itself alone
ELEMENTS = 4096  # elements of gathered rows in a program; if they have 16 bits, a thread has four vectors of 16 bytes

_tables: dict[Any, Tensor] = {}
_keeping = left_free()


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def table_of(rows: tuple[tuple[int, ...], ...], device: torch.device) -> tuple[Tensor, bool]:
    """(int64 table of these rows on the device, whether it stays)."""
    key = device, rows
    found = _tables.get(key)
    if found is not None:
        return found, True
    if _capturing(device):
        raise RuntimeError("a table of these caches' addresses is missing: make the call once before it is captured")
    stays = len(_tables) < LIMIT

    def made() -> tuple[Tensor]:
        return (torch.tensor(rows, dtype=torch.int64, device=device),)

    table = scratch.kept_memory(made, device)[0] if stays else made()[0]
    if stays:
        with _keeping:
            table = _tables.setdefault(key, table)
    return table, stays


class Moves:
    """A launch that copies pages of many tensors, for the tensors of any call of equal signature."""

    in_torch = False
    latent = False
    value_dim = None

    def __init__(
        self, sources: Sequence[Tensor], targets: Sequence[Tensor] | None, src: Tensor, dst: Tensor, page_axis: int
    ) -> None:
        into = sources if targets is None else targets
        self.device = src.device
        self.names = dict(_on_the_host(sources, into, self.device))
        places = [(i, i if targets is None else len(sources) + i) for i in range(len(sources))]
        given = zip(places, sources, into)
        self.runs: list[tuple[int, int, PageRuns]] = [
            (a, b, runs) for (a, b), x, y in given for runs in runs_of(x, y, page_axis)
        ]
        addresses = [x.data_ptr() for x in (*sources, *(targets or ()))]
        self.known: dict[Any, Tensor] = {}
        self.apart: set[Any] = set()  # for call_cache.apart
        self.launches: Launches | None = None
        if self.runs and src.numel():
            self.unit = _unit(self.runs, addresses)
            table = torch.empty(1, dtype=torch.int64, device="meta")
            with arguments_for((src, dst, table)) as held:
                self.launches = Launches([self._step(held, src.shape[0])], src.device)

    def _step(self, held: list[Any], pairs: int) -> Step:
        most = cdiv(max(runs.bytes for *_, runs in self.runs), self.unit)
        tensors, programs = len(self.runs), HOST_PROGRAMS if self.names else MAX_PROGRAMS
        parts = min(cdiv(most, LANES), cdiv(FEW_PROGRAMS, pairs * tensors))
        assert pairs * tensors * parts < 1 << 31  # the kernel counts parts of all pages in 32 bits
        flat = all(runs.run == runs.bytes for *_, runs in self.runs)
        args = (*held, pairs, tensors, parts, self.unit, LANES, flat)
        return Step(move_pages_kernel, (min(pairs * tensors * parts, programs),), args, {"num_warps": WARPS})

    @property
    def kept(self) -> Any:
        return None if self.launches is None else self.launches.kept

    def first(self, tensors: Sequence[Tensor]) -> None:
        """Launch with these tensors: caches, src, dst."""
        if self.launches is not None:
            *caches, src, dst = tensors
            self.launches.first((src, dst, self._table([x.data_ptr() for x in caches])))

    def again(self, addresses: Sequence[int]) -> None:
        """Launch the kept kernel for tensors at these addresses."""
        assert self.launches is not None
        *caches, src, dst = addresses
        table = self._table(caches)  # until the launch, the variable keeps a table that is not in _tables
        self.launches.again((src, dst, table.data_ptr()))

    def _table(self, addresses: Sequence[int]) -> Tensor:
        key = tuple(addresses)
        found = self.known.get(key)
        if found is not None:
            return found
        at = [_mapped(self.names[i], x) if i in self.names else x for i, x in enumerate(addresses)]
        rows = [(at[a] + r.source, at[b] + r.target, *r.in_units(self.unit)) for a, b, r in self.runs]
        table, stays = table_of(tuple(rows), self.device)
        if stays:
            self.known[key] = table
        return table


def _on_the_host(sources: Sequence[Tensor], into: Sequence[Tensor], device: torch.device) -> list[tuple[int, str]]:
    """(index among a call's tensors, name) of tensors in host memory.  Kernels of a GPU need this memory pinned."""
    if device.type != "cuda":
        return []
    named = [(i, f"sources[{i}]", x) for i, x in enumerate(sources)]
    named += [(len(sources) + i, f"targets[{i}]", x) for i, x in enumerate(into)]
    found = [(i, name, x) for i, name, x in named if x.device.type == "cpu"]
    for _, name, x in found:
        refuse_pageable(name, x)
    return [(i, name) for i, name, _ in found]


def _mapped(name: str, address: int) -> int:
    found = driver.mapped(address)
    if found is None:
        raise refused(name, "in pinned host memory", "memory that kernels do not reach")
    return found


def _unit(found: Sequence[tuple[int, int, PageRuns]], addresses: Sequence[int]) -> int:
    """Bytes of a unit: the largest power of two, at most 16, that divides all addresses, runs and strides."""
    return math.gcd(*[runs.unit for *_, runs in found], *addresses)


# ---- gathered rows -----------------------------------------------------------------------------------------------


class Rows:
    """The launch of a call of gather_pages.  Before the launch, torch sums lengths to find sequences' first rows."""

    in_torch = False
    latent = False
    value_dim = None
    kept = again = None  # `first` makes every call, because torch sums lengths anew

    def __init__(self, given: tuple[Any, ...], kv_layout: str, door: Door) -> None:
        """given: cache, page_table, page_starts, seq_lens, out, scale."""
        cache, table, table_starts, lengths, out, scale = given
        self.seqs = lengths.shape[0]
        self.ragged = table_starts is not None
        self.launches: Launches | None = None
        self.apart: set[Any] = set()  # for call_cache.apart
        if door.sizes["tokens"]:
            starts = torch.empty(self.seqs + 1, dtype=torch.int64, device="meta")
            with arguments_for((cache, table, table_starts, starts, out, scale)) as held:
                self.launches = Launches([self._step(held, kv_layout, door)], out.device)

    def _step(self, held: list[Any], kv_layout: str, door: Door) -> Step:
        cache, table, table_starts, starts, out, scale = held
        size = door.sizes
        dim = next_power_of_2(size["head_dim"])
        kv, apart, width = _layout(cache, kv_layout), scale, size["head_dim"]
        if scales_slots(scale) and is_scaled(cache.dtype) and cache.ndim == 4 and kv_layout != "HDN":
            kv, apart, width = layout.keys(cache, kv_layout, scale), None, dim  # a program has whole heads
        columns = size["kv_heads"] * width
        block = max(min(next_power_of_2(columns), ELEMENTS), width if kv.SCALED else 1)
        rows = max(ELEMENTS // block, 1)
        raw = scale is None and out.dtype == cache.dtype
        args = (
            layout.rows(out), kv, _scale(apart, cache.ndim == 4 and kv_layout == "NHD"), table,
            table.stride(0), table_starts, 0 if table_starts is None else table_starts.stride(0), starts,
            size["tokens"], self.seqs, max(self.seqs - 1, 0).bit_length(), size["page_size"], size["kv_heads"],
            size["head_dim"], rows, block, dim, raw, device_of(out.device).converts_fp8,
        )  # fmt: skip
        return Step(gather_pages_kernel, (cdiv(size["tokens"], rows), cdiv(columns, block)), args, {})

    def first(self, tensors: Sequence[Tensor]) -> None:
        """Launch with the tensors of a call: those among `given` in __init__, in the same order."""
        if self.launches is None:
            return
        left = [*tensors]
        lengths = left[3 if self.ragged else 2]
        left[3 if self.ragged else 2] = first_rows(lengths)
        if self.launches.kept is None:
            self.launches.first(tuple(left))
        else:
            self.launches.again([x.data_ptr() for x in left])


def first_rows(lengths: Tensor) -> Tensor:
    """First row of each sequence, and the number of all rows: int64 [seqs + 1].  Negative lengths count as 0."""
    return torch.nn.functional.pad(lengths.clamp(min=0).cumsum(0, dtype=torch.int64), (1, 0))


def _layout(cache: Any, kv_layout: str) -> Any:
    return layout.packed_value(cache) if cache.ndim == 4 and kv_layout == "HDN" else layout.keys(cache, kv_layout)


def _scale(scale: Any, slots_first: bool) -> RowScale:
    if scale is None or isinstance(scale, (int, float)):
        return RowScale(1.0 if scale is None else float(scale), None, 0, 0, 0)
    if scale.ndim == 3:
        page, slot, head = scale.stride() if slots_first else (scale.stride(i) for i in (0, 2, 1))
        return RowScale(1.0, scale, page, slot, head)
    return RowScale(1.0, scale, 0, 0, scale.stride(-1) if scale.ndim and scale.shape[-1] > 1 else 0)
