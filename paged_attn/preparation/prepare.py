"""Compile all kernels that a model's calls will need, side by side, before the first request."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from time import monotonic
from typing import Any, NamedTuple, NoReturn

import torch

from ..arguments import OF_MODELS, SCALES
from ..checks.argument_rows import check_options
from ..checks.keywords import refuse, told
from ..checks.options import choice, integer, kind, unboxed
from ..checks.projections import check_projections
from ..launching import platform
from ..launching.platform import Device, device_of
from .model import OF_WRITE_QKV, QKV, Lengths, Model, batches_up_to, call_of
from .other_calls import projections
from .processes import ModelBatches, Pool, Track, processors
from .score_mod_ref import named


class Summary(NamedTuple):
    """What prepare() did."""

    kernels: int  # kernels that the model can reach
    compiled: int  # kernels compiled now; the other kernels were in Triton's cache on disk
    seconds: float


@told
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
    side_by_side: bool = False,
    page_stride: int = 0,
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
    alibi_symmetric: bool = False,
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
    shard: tuple[int, int, int] | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    qkv: str | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    mrope_sections: tuple[int, int, int] | None = None,
    cos_sin: torch.dtype | None = None,
    qk_norm: torch.dtype | None = None,
    pages: bool = False,
    max_seqs: int = 256,
    max_tokens: int = 8192,
    max_seqlen: int = 131072,
    device: torch.device | str | Device | None = None,
    processes: int | None = None,
    **others: NoReturn,
) -> Summary:
    """Compile every kernel that calls of this model can reach, in parallel processes, into Triton's cache on disk.

    Calls are those of paged_attention and write_kv, with `qkv` also those of write_qkv, with `pages` also those of
    copy_pages, move_pages and gather_pages.  Afterwards no such call compiles anything, in this process or a later
    one; other functions compile at their first call.  A model whose layers differ, for example in their window, is
    prepared once for each kind of layers.  Tensors are taken to be aligned and contiguous, as torch makes them, and
    slot_mapping to be int64.

    Processes are spawned, so a script calls prepare() under `if __name__ == "__main__"`.  A progress bar is shown if
    rich is installed.

    Args:
        heads, kv_heads: query heads and KV heads of one device.
        head_dim: dims of queries and keys.
        page_size: slots of a page.
        dtype: dtype of queries.
        value_dim: dims of values and results.  None: head_dim.
        latent: calls pass k_cache[..., :value_dim] as v_cache, and no v_new; calls of write_kv pass no v.
        cache_dtype, out_dtype: dtypes of caches and results.  None: `dtype`.
        kv_layout: "NHD", "HND", or "x" for x-packed caches, whose x dims have 16 bytes.
        side_by_side: the caches are k_cache = cache[..., :head_dim] and v_cache = cache[..., head_dim:].  If `scales`
            are by token, each row of keys or values is followed by its scale.
        page_stride: slots from a page's first slot to the next page's first slot; other layers' slots may lie between
            pages.  0: page_size.
        new: calls pass k_new and v_new.
        causal, window_size, clip_spans, chunk, softcap, alibi_symmetric, return_lse, batch_invariant: as in
            paged_attention.
        shard: as in paged_attention.  Any rank will do, because all ranks have the same kernels.  Calls are then those
            of distributed.paged_attention: out_dtype None is float32, and return_lse is True.
        causal_seqs: calls pass a tensor as causal.
        head_windows: calls pass a tensor as window_size.
        prefix_lens: calls pass prefix_lens.
        spans: R of the [seqs, R, 2] spans that calls pass.  0: none.
        alibi: calls pass alibi_slopes.
        sinks: dtype of the sinks.  None: no sinks.
        qq_bias: n of an [n, n] query-query bias, which has the dtype of the queries.  0: none.
        qq_mask: int32 words of each query in qq_mask.  0: no qq_mask.
        query_positions: calls pass query_positions.
        token_scales: calls pass a q_scale with a number for each token.
        gate: dtype of the gate.  None: no gate.
        score_mod, score_mod_args: as in paged_attention.  The function must belong to a module, because other
            processes import it.  Of tensors in score_mod_args, only dtypes matter.
        scales: form of the scales of fp8, int8 and int4 tensors.  Inside torch.compile, numbers become tensors,
            and the form is "tensor".  int4 caches have "per_token".

            - "number": a number on the host.
            - "tensor": one number for all heads: [], [1], or expanded from one of these.
            - "per_head": [kv_heads], [1, kv_heads], or expanded from one of these.
            - "per_seq": [seqs, kv_heads], contiguous; in calls of one sequence, any [1, kv_heads].
            - "per_token", "per_token_float16": float32 or float16, for each slot and KV head of the caches.  They are
              contiguous, or lie beside keys and values (side_by_side).  Queries and results have "tensor".
        integers: torch.int32 or torch.int64, the dtype of page_table, seq_lens, cu_seqlens_q, prefix_lens, spans and
            query_positions.  If window_size is a tensor, `integers` is its dtype, too.
        page_indices: dtype of indices if page_table is (indptr, indices); indptr has the dtype `integers`.  None:
            page_table is a tensor.
        qkv: form of qkv in calls of write_qkv: "packed", one tensor, or "separate", a tuple of three, which may be
            views of one tensor.  If `dtype` is fp8, queries become fp8, with a q_scale.  None: no calls of write_qkv.
        rotary_dim: columns of cos_sin.  None: all dims of q, or of q_rope.  0: no rotary embedding.  Rows of cos_sin
            are contiguous, and 16 divides their number; calls pass int64 positions.
        interleaved, mrope_sections: as in write_qkv.
        cos_sin: dtype of cos_sin.  None: dtype of qkv.
        qk_norm: dtype of q_norm and k_norm; latents have only k_norm.  None: no norms.
        pages: calls also copy, move and gather whole pages of the caches: copy_pages and move_pages of keys and
            values, in any number of layers, and gather_pages with the scales of the cache.  Page ids have the dtype
            `integers`.  Rows gathered from an fp8, int8 or int4 cache have `dtype`; if this is fp8, they have
            `out_dtype`, and if both are fp8, bfloat16.
        max_seqs, max_tokens: the most sequences and query tokens of a step.
        max_seqlen: the most keys of a sequence.
        device: where calls will run.  None: the current GPU.  A Device describes a GPU that need not be present, for
            example while a container image is built.
        processes: the most processes at work.  None: one for each processor that this process may use.

    Returns: number of kernels, number of kernels compiled now, and seconds.  All are 0 if plain torch serves the
        device, or if kernels are interpreted and `device` is no Device.
    """
    if others:
        refuse(prepare, others)
    given = {name: unboxed(value) for name, value in locals().items()}
    own = dict(
        cache_dtype=cache_dtype or dtype, out_dtype=out_dtype or (dtype if shard is None else torch.float32),
        return_lse=return_lse or shard is not None, score_mod=named(score_mod, score_mod_args),
    )  # fmt: skip
    model = Model(**{name: given[name] for name in Model._fields} | own)
    return compile_for(model, batches_up_to(max_seqs, max_tokens, max_seqlen), device, processes)


def compile_for(
    model: Model,
    batches: Iterable[Lengths],
    device: torch.device | str | Device | None = None,
    processes: int | None = None,
) -> Summary:
    """Compile every kernel that these batches of a model need, as prepare() does."""
    _check(model)
    if model.side_by_side and (model.latent or model.kv_layout == "x"):
        raise ValueError("side_by_side: keys and values are parts of a slot each, which is neither latent nor x-packed")
    if model.latent and (model.kv_layout == "x" or model.value_width > model.head_dim):
        raise ValueError("latent: values are the first dims of keys, which are not x-packed, and as wide or wider")
    if model.page_stride and (model.page_stride < model.page_size or model.side_by_side):
        raise ValueError(
            f"page_stride must be 0 or page_size = {model.page_size} slots and more, without side_by_side, got "
            f"{model.page_stride}"
        )
    _check_write_qkv(model)
    local = not isinstance(device, Device)
    if platform.INTERPRET and local:
        return Summary(0, 0, 0.0)
    facts = device if isinstance(device, Device) else device_of(torch.device(device or "cuda"))
    if facts.in_torch:
        return Summary(0, 0, 0.0)
    started = monotonic()
    work = ModelBatches(model, list(batches))
    with _tracking() as track, Pool(facts, local, processes or processors()) as pool:
        found = pool.compile([work], track)
    return Summary(len(found), sum(kernel.now for kernel in found.values()), monotonic() - started)


def _check(model: Model) -> None:
    """Check sizes, dtypes and options of a model by the rules for calls."""
    for name in ("heads", "kv_heads", "head_dim", "page_size"):
        integer(name, getattr(model, name), 1, "an int")
    for name in ("dtype", "cache_dtype", "out_dtype", "integers"):
        if not isinstance(getattr(model, name), torch.dtype):
            given = f"{kind(getattr(model, name))}: torch.bfloat16, for example"
            raise TypeError(f"{name} must be a torch.dtype, got {given}")
    choice("kv_layout", model.kv_layout, ("NHD", "HND", "x"))
    choice("scales", model.scales, SCALES)
    check_options(**{x.name: getattr(model, x.name) for x in OF_MODELS})
    if (why := model.why_not_int4) is not None:
        raise ValueError(why)
    if model.heads % model.kv_heads:
        given = f"{model.heads}: both of one device"
        raise ValueError(f"heads must be a multiple of kv_heads = {model.kv_heads}, got {given}")


def _check_write_qkv(model: Model) -> None:
    """Check what a model says of write_qkv by the rules for its calls."""
    choice("qkv", model.qkv, (None, *QKV))
    if model.qkv is None:
        for name in OF_WRITE_QKV:
            if getattr(model, name) != (default := Model._field_defaults[name]):
                raise ValueError(f"{name} must be {default} without qkv, for no call of write_qkv is prepared")
        return
    integer("rotary_dim", model.rotary_dim, 0)
    for name in ("cos_sin", "qk_norm"):
        if not isinstance(getattr(model, name), (torch.dtype, type(None))):
            given = f"{kind(getattr(model, name))}: torch.float32, for example"
            raise TypeError(f"{name} must be a torch.dtype, got {given}")
    check_projections(*projections(model, call_of(model, Lengths(False, 1, 1, 1, 1)), 1))


@contextlib.contextmanager
def _tracking() -> Iterator[Track]:
    """Yield track(items, what, total), which yields the items and, if rich is installed, shows how many were taken."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield lambda items, what, total=0: items
        return
    with Progress(transient=True, console=Console(stderr=True)) as bar:
        yield lambda items, what, total=0: bar.track(items, total or None, description=what)
