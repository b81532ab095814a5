"""Calls of copy_pages, move_pages and gather_pages: found in the cache of calls, or checked and run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..checks import pages as checks
from ..checks.kernel_tensors import FP8, POINTED
from ..checks.options import unboxed
from ..launching.platform import device_of
from ..records.formats import in_words
from ..strides import settled
from . import call_cache, checked
from .untraced import untraced
from .ways import Runs, way_of

KNOWN = (*POINTED, *FP8)  # dtypes of tensors that kernels take as they are


@untraced
def move(sources: Any, targets: Any, src: Any, dst: Any, page_axis: Any, check: bool | None) -> None:
    """Copy pages of sources to pages of targets, or, if targets is None, to other pages of the sources."""
    given = checks.listed("caches" if targets is None else "sources", sources)
    into = None if targets is None else checks.listed("targets", targets)

    def made() -> Runs:
        pages, count = checks.check_moves(sources, targets, src, dst, page_axis)
        device = device_of(src.device)
        if checked.enabled(check, device):
            checks.check_pairs(src, dst, pages, count, targets is None)
        runs: Runs = way_of(device).moves_of(given, into, src, dst, unboxed(page_axis))
        return runs

    form = ("move_pages", len(given), targets is None, type(page_axis), page_axis)  # True equals 1, but is refused

    def apart(found: tuple[Runs, call_cache.Addresses]) -> bool:
        """Make the checks again at new addresses of caches, and return True if they raise nothing."""
        runs, addresses = found
        places = tuple(addresses[:-2])
        if places not in runs.apart:
            made()
        return call_cache.remember(runs, places)

    _run(form, (*given, *(into or ()), src, dst), check, made, apart)


@untraced
def gather(
    cache: Any, page_table: Any, page_starts: Any, seq_lens: Any, out: Any, kv_layout: Any, scale: Any,
    check: bool | None,
) -> None:  # fmt: skip
    """Gather rows of pages into out."""
    if scale is None and _rare(cache) and _rare(out) and cache.dtype == out.dtype:
        cache, out = in_words(cache), in_words(out)
    given = (cache, page_table, page_starts, seq_lens, out, scale)

    def made() -> Runs:
        door = checks.check_gather(*given[:5], kv_layout, scale)
        device = device_of(cache.device)
        if checked.enabled(check, device):
            checks.check_rows(door, page_table, page_starts, seq_lens)
        settled_ones = tuple([settled(unboxed(x)) for x in given])
        runs: Runs = way_of(device).rows_of(settled_ones, kv_layout, door)
        return runs

    tensors = tuple([x for x in given if isinstance(x, Tensor)])
    form = ("gather_pages", kv_layout, page_starts is None, *call_cache.form_of_values((scale,)))
    place = 3 if page_starts is None else 4  # of out
    _run(form, tensors, check, made, lambda found: call_cache.apart(found, tensors, 0, place))


def _rare(x: Any) -> bool:
    """Whether a tensor has a dtype that kernels do not take.  False for conjugated views, which will be refused."""
    return isinstance(x, Tensor) and x.dtype not in KNOWN and not x.is_conj()


def _run(
    form: Any, tensors: tuple[Any, ...], check: bool | None, made: Callable[[], Runs],
    apart: Callable[[tuple[Runs, call_cache.Addresses]], bool],
) -> None:  # fmt: skip
    """Run the kept call of this form and these tensors.  Without one, or if checks are on, run what `made` returns.

    apart: whether the tensors of a kept call share no memory.  If they share memory, `made` raises.
    """
    found, of = call_cache.again(form, tensors), None
    if found is None:
        of = call_cache.signature(form, tensors)
        found = call_cache.find(form, tensors, of)
    if found is not None and (checked.by_default(found[0]) if check is None else check is not False):
        found = None
    if found is not None and apart(found):
        runs, addresses = found
        if runs.kept is None:
            runs.first(tensors)
        else:
            runs.again(addresses)
        return
    runs = made()
    runs.first(tensors)
    call_cache.keep(of, runs)
