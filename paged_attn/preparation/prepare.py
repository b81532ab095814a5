"""Compile all kernels that a model's calls will need, side by side, before the first request."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from time import monotonic
from typing import Any, NamedTuple

import torch
import triton

from ..launching import backend
from ..launching.backend import Device, device_of
from ..launching.locks import FIRST
from ..planning.dialects import DIALECTS, dialect
from ..records import layout
from .model import Lengths, Model, batches_up_to, call_of, distinct, new_dtype, new_rows
from .named import named

Track = Callable[..., Iterable[Any]]


class Summary(NamedTuple):
    """What prepare() did."""

    kernels: int  # that the model can reach
    compiled: int  # of them; the others lay in Triton's cache on disk
    seconds: float


def prepare(
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    latent: bool = False,
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    kv_layout: str = "NHD",
    new: bool = False,
    causal: bool = True,
    causal_seqs: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    head_windows: bool = False,
    prefix_lens: bool = False,
    spans: int = 0,
    clip_spans: bool = False,
    chunk: int | None = None,
    softcap: float = 0.0,
    alibi: bool = False,
    sinks: torch.dtype | None = None,
    qq_bias: int = 0,
    qq_mask: int = 0,
    query_positions: bool = False,
    token_scales: bool = False,
    gate: torch.dtype | None = None,
    score_mod: Any = None,
    score_mod_args: Sequence[Any] = (),
    scales: str = "number",
    integers: torch.dtype = torch.int32,
    page_indices: torch.dtype | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    max_seqs: int = 256,
    max_tokens: int = 8192,
    max_seqlen: int = 131072,
    device: torch.device | str | Device | None = None,
    processes: int | None = None,
) -> Summary:
    """Compile every kernel that calls of this model can reach, in parallel processes, into Triton's cache on disk.

    After it no such call compiles anything, in this process or a later one.  Models whose layers differ, in their
    window say, are prepared once for each kind.  Tensors are taken to be aligned and contiguous as torch makes them.

    Processes are spawned: a script calls it under `if __name__ == "__main__"`.  Shows a progress bar if rich is there.

    Args:
        heads, kv_heads, head_dim, page_size, dtype: of queries and caches.
        value_dim: dims of values and results; head_dim if None.
        latent: calls pass k_cache[..., :value_dim] for v_cache, and no v_new, and write_kv gets no v.
        cache_dtype, out_dtype: dtype if None; out_dtype of an fp8 query is that of its results.
        kv_layout: "NHD", "HND", or "x" for x-packed caches of 16 bytes.
        new: calls pass k_new and v_new.
        causal, window_size, clip_spans, chunk, softcap, return_lse, batch_invariant: as in paged_attention.
        causal_seqs: calls pass a tensor as causal.
        head_windows: calls pass a tensor as window_size.
        prefix_lens: calls pass prefix_lens.
        spans: R of the [seqs, R, 2] spans that calls pass; 0: none.
        alibi: calls pass alibi_slopes.
        sinks: dtype of the sinks; None: none.
        qq_bias: n of an [n, n] query-query bias, which has the dtype of the queries; 0: none.
        qq_mask: words of each query of a qq_mask; 0: none.
        query_positions: calls pass query_positions.
        token_scales: calls pass a q_scale of each token.
        gate: dtype of the gate; None: none.
        score_mod, score_mod_args: as in paged_attention; the function of a module, which other processes import.  Of
            tensors only dtypes count.
        scales: of fp8 tensors: "number", "tensor" (one for all heads, [], [1] or expanded) or "per_head" ([kv_heads],
            [1, kv_heads] or expanded from these).  Inside torch.compile numbers become tensors.
        integers: dtype of page_table, seq_lens, cu_seqlens_q, prefix_lens, spans, query_positions and a tensor
            as window_size, torch.int32 or torch.int64.
        page_indices: dtype of indices where page_table is (indptr, indices), whose indptr is of `integers`; None: where
            it is a tensor.
        max_seqs, max_tokens: the most sequences and query tokens of a step.
        max_seqlen: the most keys of a sequence.
        device: where calls will run, the current GPU if None; a Device, to compile without one, as for an image.
        processes: at most so many, as many as there are processors if None.

    Returns: how many kernels there are, how many of them were compiled, and seconds.  Nothing, where kernels are
        interpreted.
    """
    given = locals()
    own = dict(
        cache_dtype=cache_dtype or dtype, out_dtype=out_dtype or dtype, score_mod=named(score_mod, score_mod_args)
    )
    model = Model(**{name: given[name] for name in Model._fields} | own)
    return compile_for(model, batches_up_to(max_seqs, max_tokens, max_seqlen), device, processes)


def compile_for(
    model: Model,
    batches: Iterable[Lengths],
    device: torch.device | str | Device | None = None,
    processes: int | None = None,
) -> Summary:
    """Compile every kernel that these batches of a model need, as prepare() does."""
    if model.latent and (model.kv_layout == "x" or model.value_width > model.head_dim):
        raise ValueError("latent: values are the first dims of keys, which are not x-packed, and as wide or wider")
    local = not isinstance(device, Device)
    if backend.INTERPRET and local:
        return Summary(0, 0, 0.0)
    facts = device if isinstance(device, Device) else device_of(torch.device(device or "cuda"))
    _read(facts)
    started = monotonic()
    with _tracking() as track:
        chosen = distinct(model, track(list(batches), "planning"), facts)
        # the kernels of prefills take three times as long as those of decodes: what begins last should be short
        chosen.sort(key=lambda batch: batch.max_seqlen_q == 1)
        found = _in_processes(model, chosen, facts, local, processes or os.cpu_count() or 1, track)
    return Summary(len(found), sum(found.values()), monotonic() - started)


def _read(device: Device) -> None:
    """What comes before this process first looks for a kernel on disk: Triton hashes all of itself, for half a second.

    The kernels are read, too.
    """
    with contextlib.suppress(ImportError):  # it has moved from version to version
        with FIRST:
            from triton.runtime.cache import triton_key

        triton_key()
    for name in DIALECTS:
        if dialect(name).why_not_on(device) is None:
            dialect(name).read()


# ---- processes -----------------------------------------------------------------------------------


def _in_processes(
    model: Model, batches: list[Lengths], device: Device, local: bool, processes: int, track: Track
) -> dict[str, bool]:
    """Whether each kernel, by its hash, had to be compiled."""
    found: dict[str, bool] = {}
    spawn = multiprocessing.get_context("spawn")
    workers = min(processes, len(batches))
    with _interpreting("0"), ProcessPoolExecutor(workers, spawn, _start, (device, local)) as pool:
        started = [pool.submit(_compile, model, batch) for batch in batches]
        for done in track(as_completed(started), "compiling", len(started)):
            for name, compiled in done.result().items():
                found[name] = found.get(name, False) or compiled
    return found


_seen: dict[str, bool] = {}


def _start(device: Device, local: bool) -> None:
    """Make this process one that compiles."""
    from . import offline

    def listener(*, metadata: dict[str, Any], cache_hit: bool, **_: Any) -> None:
        _seen[metadata["hash"]] = not cache_hit

    triton.knobs.compilation.listener = listener
    offline.compile_only(device, offline.build_launcher if local else lambda _: None)


def _compile(model: Model, batch: Lengths) -> dict[str, bool]:
    """Compile what a batch needs, and what writing into the model's cache needs; what was compiled, by hash."""
    from .. import paged_attention
    from ..calls.write import write

    call = call_of(model, batch)
    paged_attention(**call)
    if not layout.is_fp8(new_dtype(model)):
        k, v = new_rows(model, 1)
        scales = (call.get("k_scale"), None if model.latent else call.get("v_scale"))
        slots = torch.empty(1, dtype=torch.int64)
        caches = call["k_cache"], None if model.latent else call["v_cache"]
        parts = ("keys",) if model.latent else (None, "keys", "values")  # the halves are those of compiled graphs
        for part in parts:
            write(k, v, *caches, slots, *scales, call["kv_layout"], False, part)
    found = dict(_seen)
    _seen.clear()
    return found


@contextlib.contextmanager
def _interpreting(value: str) -> Iterator[None]:
    """What processes that start meanwhile are told about the interpreter."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


@contextlib.contextmanager
def _tracking() -> Iterator[Track]:
    """track(items, what, total) gives the items and shows how many have been taken, if rich is there to show it."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield lambda items, what, total=0: items
        return
    with Progress(transient=True, console=Console(stderr=True)) as bar:
        yield lambda items, what, total=0: bar.track(items, total or None, description=what)
