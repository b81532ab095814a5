"""Calls in plain torch.  A kept call has no launches, only a function and the places of tensors among its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..arguments import Options, Tensors
from ..checks.axes import Axes, Door
from ..checks.projections import Projections, Rotation, unpacked
from ..launching.platform import Device
from ..planning.dialects import torch_dialect
from .ways import scale_and_cap


class Place(NamedTuple):
    """Stands for a tensor among a kept call's arguments.  number: its index among the tensors of a call."""

    number: int


class Run:
    """A checked call: a function, and arguments in which Places stand for tensors.  The counterpart of Launches.

    `first` makes the call with the tensors of any call of equal signature.
    """

    __slots__ = ("again", "apart", "arguments", "function", "in_torch", "kept", "latent", "value_dim")

    def __init__(
        self, function: Callable[..., object], given: Sequence[Any], value_dim: int | None = None, latent: bool = False
    ) -> None:
        self.function, self.value_dim, self.latent = function, value_dim, latent
        self.arguments: list[Any] = []
        self.apart: set[Any] = set()  # for call_cache.apart
        count = 0
        for x in given:
            self.arguments.append(Place(count) if isinstance(x, Tensor) else x)
            count += isinstance(x, Tensor)
        self.kept, self.again = None, None  # there is no compiled kernel
        self.in_torch = True

    def first(self, tensors: Sequence[Tensor]) -> None:
        """Make the call with these tensors."""
        self.function(*[tensors[x.number] if type(x) is Place else x for x in self.arguments])


def run_of(given: Tensors, options: Options, device: Device, lse: Tensor | None, value_dim: int | None) -> Run:
    """The Run of a call of paged_attention."""
    dialect, numbers = torch_dialect(), scale_and_cap(options, given.q.shape[2])

    def attention(*slots: Any) -> None:
        dialect.attention(Tensors.of_slots([*slots[:-1]]), options, *numbers, slots[-1])

    same = given.k_cache.data_ptr() == given.v_cache.data_ptr()
    return Run(attention, (*given.slots, lse), value_dim, same)


def write_of(given: tuple[Any, ...], kv_layout: str, part: str | None, axes: Axes, device: Device) -> Run:
    """The Run of a call of write_kv.  given: tensors and scales, in the order of its arguments."""
    dialect = torch_dialect()

    def write(k: Any, v: Any, k_cache: Any, v_cache: Any, slots: Any, k_scale: Any, v_scale: Any) -> None:
        dialect.write(k, v, k_cache, v_cache, slots, k_scale, v_scale, kv_layout, part)

    return Run(write, given)


def qkv_write_of(given: Projections, options: Rotation, axes: Axes, device: Device, part: str | None) -> Run:
    """The Run of a call of write_qkv.  q_out = None means that queries are rotated in place."""
    dialect, host = torch_dialect(), options._asdict()

    def write_qkv(*tensors: Any) -> None:
        x = Projections._make(tensors)
        if x.packed:
            q, k, v = unpacked(x.q, x.k_cache, options.kv_layout)
            x = x._replace(q=q, k=k, v=v)
        x = x if x.q_out is not None else x._replace(q_out=x.q)
        dialect.write_qkv(**x._asdict(), **host, part=part)

    return Run(write_qkv, given)


def merged(out: Tensor, lse: Tensor, outs: Tensor, lses: Tensor, sinks: Tensor | None) -> None:
    """Merge states `outs` and `lses` into out and lse."""
    torch_dialect().merge_states(out, lse, outs, lses, sinks)


def moves_of(
    sources: Sequence[Tensor], targets: Sequence[Tensor] | None, src: Tensor, dst: Tensor, page_axis: int
) -> Run:
    """The Run of a call of copy_pages (targets = None) or of move_pages."""
    dialect, count = torch_dialect(), len(sources)

    def move(*given: Tensor) -> None:
        *caches, src, dst = given
        dialect.move_pages(caches[:count], caches[-count:], src, dst, page_axis)

    return Run(move, (*sources, *(targets or ()), src, dst))


def rows_of(given: tuple[Any, ...], kv_layout: str, door: Door) -> Run:
    """The Run of a call of gather_pages.  given: cache, page_table, page_starts, seq_lens, out, scale."""
    dialect = torch_dialect()

    def gather(cache: Any, table: Any, starts: Any, lengths: Any, out: Any, scale: Any) -> None:
        dialect.gather_pages(cache, table, starts, lengths, out, kv_layout, scale)

    return Run(gather, given)
