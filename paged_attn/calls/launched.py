"""The launches of calls: tensors and options become the records that Triton kernels take."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from triton.language import constexpr

from ..arguments import Options, Tensors, scales_tokens
from ..checks.axes import Axes, Door
from ..checks.projections import Projections, Rotation
from ..kernels.common.records import KeyValues, Modifiers, Norm, Rotary
from ..kernels.portable.cache_write import write_kv_kernel
from ..kernels.portable.rotary_write import HeadRuns, Pairs, write_qkv_kernel
from ..kernels.shared_steps import merge_states
from ..launching.launch import Launches, Step
from ..launching.platform import INTERPRET, Device
from ..launching.template import arguments_for
from ..planning.planner import plan, steps_of
from ..records import layout
from ..records.formats import cdiv, next_power_of_2
from ..records.key_bounds import key_bounds_of
from ..records.layout import Call, scales
from ..records.problem import problem_of
from .page_launches import Moves, Rows
from .ways import FAR, scale_and_cap

# Maximum elements of a program of write_qkv, and its warps.  Of bfloat16, each of the 64 threads loads up to four times
# 16 bytes.
WRITE_ELEMENTS, WRITE_WARPS = 2048, 2
# Maximum elements of a program if the whole call has no more than FEW_WRITE_ELEMENTS: a thread has less to do, and ends
# sooner.  With more elements, starting so many programs would take longer than their work.
ELEMENTS_OF_FEW, FEW_WRITE_ELEMENTS = 512, 3 << 18
TENSORS = {*Tensors._fields}
# Arguments with a field of equal name in Modifiers, which holds the argument unchanged unless `_call` says otherwise.
IN_MODIFIERS = [name for name in Modifiers._fields if name in (*Tensors._fields, *Options._fields)]


def run_of(given: Tensors, options: Options, device: Device, lse: Tensor | None, value_dim: int | None) -> Launches:
    """The launches of a checked call of paged_attention.  value_dim: dims of results.  None: head_dim."""
    same = given.k_cache.data_ptr() == given.v_cache.data_ptr()
    problem = problem_of(given, options, device, INTERPRET)
    with arguments_for((*given.slots, lse)) as held:
        call = _call(held, options, given.q.shape[2])
        return Launches(steps_of(plan(problem), call), given.q.device, value_dim, same)


def _new(k_new: Any, v_new: Any) -> KeyValues:
    """Keys and values outside the cache; if v_new is None, values are the first dims of the keys."""
    return KeyValues(layout.contiguous(k_new), layout.contiguous(k_new if v_new is None else v_new))


def _spans(spans: Any, options: Options, right: int | None) -> dict[str, Any]:
    """Fields of Modifiers for spans.  right: the window's number of keys after a query's own place.  None: all."""
    if spans is None:
        return {}
    fields = dict(spans=spans, spans_count=spans.shape[1], spans_stride=spans.stride(0), spans_step=spans.stride(1))
    return fields | (dict(CLIP_SPANS=constexpr(True), spans_right=right) if options.clip_spans else {})


def _head_windows(windows: Any, options: Options, apart: bool) -> dict[str, Any]:
    """Fields of Modifiers for windows by head.  apart: query_positions are given.

    BY_HEAD_TO_THE_RIGHT: each head's `right` bounds the places of visible keys.  Causal queries see no later keys, so
    they do not need the bound.  With query_positions, `right` bounds positions instead (Modifiers.position_right).
    """
    if windows is None:
        return {}
    stride = windows.stride(0)
    to_the_right = None if options.causal or apart else constexpr(True)
    return dict(head_windows_stride=None if stride == 2 else stride, BY_HEAD_TO_THE_RIGHT=to_the_right)


def _alibi(slopes: Any, options: Options) -> dict[str, Any]:
    """Fields of Modifiers for ALiBi."""
    if slopes is None:
        return {}
    stride = slopes.stride(0) if slopes.ndim == 2 and slopes.shape[0] > 1 else 0  # 0: one row for all sequences
    return dict(alibi_stride_seq=stride or None, ALIBI_SYMMETRIC=constexpr(True) if options.alibi_symmetric else None)


def _call(held: list[Any], options: Options, head_dim: int) -> Call:
    """The records of a call.  held: Tensors.slots of the call, then lse, with a Hole in place of each tensor."""
    *given, lse = held
    x = Tensors.of_slots(given)
    # Kernels take left = None for no bound.  With a chunk, `left` is the smaller of the window's and the chunk's bound.
    left, right = [min(x, FAR) if x >= 0 else None for x in (key_bounds_of(options).reach, options.window_size[1])]
    if x.head_windows is not None:  # kernels read the bounds from head_windows; these numbers limit no head
        left, right = FAR if left is None else left, FAR
    apart = x.query_positions is not None
    scale, cap = scale_and_cap(options, head_dim)
    slots_right = None if apart else right
    if x.causal_seqs is not None and slots_right is None:
        slots_right = FAR
    v_scale = x.k_scale if x.v_scale is None else x.v_scale  # values within keys have the scale of keys
    as_given = {name: getattr(x if name in TENSORS else options, name) for name in IN_MODIFIERS}
    # a position plus any of these numbers still fits 32 bits
    as_given |= {name: min(value, FAR) for name, value in as_given.items() if type(value) is int}
    changed = dict(
        left=left,
        # a causal query sees no key to its right, however wide its window
        right=0 if options.causal else slots_right,
        softcap=cap,
        qq_bias_stride=None if x.qq_bias is None else x.qq_bias.stride(-2),
        qq_bias_size=None if x.qq_bias is None else x.qq_bias.shape[-1],
        position_right=right if apart else None,
        causal=x.causal_seqs,
        **_spans(x.spans, options, None if apart else right),
        score_mod_args=None if options.score_mod is None else x.score_mod_args,
        qq_bias_stride_seq=None if x.qq_bias is None or x.qq_bias.ndim < 3 else x.qq_bias.stride(0),
        qq_mask_stride=None if x.qq_mask is None else x.qq_mask.stride(0),
        **_head_windows(x.head_windows, options, apart),
        qq_words=None if x.qq_mask is None else x.qq_mask.shape[1],
        **_alibi(x.alibi_slopes, options),
        shard_rank=None if options.shard is None else 16 * options.shard[0] + 2,
    )
    mods = Modifiers(**as_given | changed)
    by_token = scales_tokens(x.q_scale, x.q)
    return Call(
        out=layout.rows(x.out),
        lse=lse,
        query=layout.rows(x.q),
        cache=layout.cache(x.k_cache, x.v_cache, options.kv_layout, x.k_scale, v_scale),
        new=None if x.k_new is None else _new(x.k_new, x.v_new),
        query_starts=x.cu_seqlens_q,
        seq_lens=x.seq_lens,
        page_table=x.page_table,
        page_starts=layout.page_starts(x.page_table, x.page_starts),
        mods=mods,
        scales=scales(scale, x.q_scale, x.k_scale, v_scale, x.out_scale, x.gate, by_token, seqs=x.seq_lens.shape[0]),
    )


# ---- the other functions -------------------------------------------------------------------------


def write_of(given: tuple[Any, ...], kv_layout: str, part: str | None, axes: Axes, device: Device) -> Launches:
    """The launch of a call of write_kv.  given: tensors and scales, in the order of its arguments."""
    with arguments_for(given) as held:
        return Launches([_step(held, kv_layout, part, axes, device)], given[0].device)


def _step(held: list[Any], kv_layout: str, part: str | None, axes: Axes, device: Device) -> Step:
    """The launch of write_kv_kernel.

    A program writes some KV heads of one token: up to 2048 elements of keys, and as many of values, padding included.
    """
    k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale = held
    dim, value_padded = (max(16, next_power_of_2(x)) for x in (axes.head_dim, axes.value_dim or 1))
    block_heads = min(next_power_of_2(axes.kv_heads), max(1, 2048 // max(dim, value_padded)))
    grid = (axes.tokens, cdiv(axes.kv_heads, block_heads))
    if part == "keys":  # there may be no values
        stored = layout.keys(k_cache, kv_layout, k_scale)
        new, cache = KeyValues(layout.rows(k), None), KeyValues(stored, _unwritten(stored))
    else:
        new = KeyValues(layout.rows(k), layout.rows(v))
        cache = layout.cache(k_cache, v_cache, kv_layout, k_scale, v_scale)
    if part == "values":
        new, cache = new._replace(key=None), cache._replace(key=_unwritten(cache.key))
    args = (
        new.key, new.value, cache, slot_mapping,
        scales(1.0, key=k_scale, value=v_scale),
        axes.page_size, axes.kv_heads, axes.head_dim, dim, axes.value_dim, value_padded, block_heads, device.dependent,
    )  # fmt: skip
    return Step(write_kv_kernel, grid, args, {"launch_pdl": True} if device.dependent else {})


def _unwritten(kv: Any) -> Any:
    """Return a KV whose ptr is None, so that kernels do not write it."""
    return kv._replace(ptr=None, SCALED=constexpr(False), scale_ptr=constexpr(0))


def qkv_write_of(given: Projections, options: Rotation, axes: Axes, device: Device, part: str | None) -> Launches:
    """The launch of a call of write_qkv.  q_out = None means that queries are rotated in place."""
    with arguments_for(given) as held:
        step = _qkv_step(Projections._make(held), options, axes, device, part)
        return Launches([step], given.q.device)


def _qkv_step(x: Projections, options: Rotation, axes: Axes, device: Device, part: str | None) -> Step:
    """The launch of write_qkv_kernel.  A program has a block of query heads, or a block of KV heads, of one token."""
    queries, keys, _ = shapes = _head_runs(x, options, axes)
    new: list[Any] = (
        [layout.packed_rows(x.q, axes.head_dim)] * 3 if x.packed else [layout.rows(y) for y in (x.q, x.k, x.v)]
    )
    q_out = new[0] if x.q_out is None else layout.rows(x.q_out)
    stored = layout.keys(x.k_cache, options.kv_layout, x.k_scale)
    cache = KeyValues(stored, stored)
    if not x.latent:
        cache = layout.cache(x.k_cache, x.v_cache, options.kv_layout, x.k_scale, x.v_scale)
    if part == "keys":
        new[2], cache = None, cache._replace(value=_unwritten(cache.value))
    q_norm, k_norm = (_norm(weight, options) for weight in (x.q_norm, x.k_norm))
    args = (
        *new, q_out, cache, x.slot_mapping, _rotary(x),
        q_norm, None if x.latent else k_norm, k_norm if x.latent else None,
        scales(1.0, x.q_scale, x.k_scale, x.k_scale if x.latent else x.v_scale),
        axes.page_size, *shapes, _pairs(x, options), device.dependent,
    )  # fmt: skip
    programs = cdiv(queries.HEADS, queries.BLOCK) + cdiv(keys.HEADS, keys.BLOCK)
    more = {"launch_pdl": True} if device.dependent else {}
    return Step(write_qkv_kernel, (axes.tokens * programs,), args, {"num_warps": WRITE_WARPS} | more)


def few_tokens(heads: int, kv_heads: int, head_dim: int, value_dim: int) -> int:
    """Maximum tokens of a call of write_qkv whose programs have few elements."""
    return FEW_WRITE_ELEMENTS // (heads * head_dim + kv_heads * (head_dim + value_dim))


def _head_runs(x: Projections, options: Rotation, axes: Axes) -> tuple[HeadRuns, HeadRuns, HeadRuns]:
    """HeadRuns of queries, keys and values.  In a packed tensor, keys follow queries, and values follow keys."""
    heads, kv_heads, value_dim = axes.heads, axes.kv_heads, axes.value_dim
    turned, values = _runs(axes.head_dim, _rotary_dim(x), options.interleaved), _runs(value_dim, 0, False)
    few = axes.tokens <= few_tokens(heads, kv_heads, axes.head_dim, value_dim)
    most = ELEMENTS_OF_FEW if few else WRITE_ELEMENTS
    block, kv_block = _heads_at_once(heads, turned, most), _heads_at_once(kv_heads, (*turned, *values), most)
    keys_at, values_at = (heads, heads + kv_heads) if x.packed else (0, 0)
    behind = value_dim if x.latent else 0  # in a slot, a latent lies before the rotated dims
    return (
        HeadRuns(heads, block, 0, heads // kv_heads, axes.head_dim, 0, *_columns(turned)),
        HeadRuns(kv_heads, kv_block, keys_at, 1, axes.head_dim, behind, *_columns(turned)),
        HeadRuns(kv_heads, kv_block, values_at, 1, value_dim, 0, *_columns(values)),
    )


def _runs(dims: int, rotary_dim: int, interleaved: bool) -> list[tuple[int, int]]:
    """(first dim, number of dims) of each run of a head.

    The rotated dims are two runs, one for each half, or one run if interleaved.  The other dims are the last run.
    """
    step = rotary_dim if interleaved else rotary_dim // 2
    runs = [(begin, step) for begin in range(0, rotary_dim, step)] if rotary_dim else []
    return runs + ([(rotary_dim, dims - rotary_dim)] if rotary_dim < dims else [])


def _columns(runs: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """(first dims, numbers of dims, numbers of dims rounded up to powers of two) of runs."""
    starts, sizes = zip(*runs)
    return starts, sizes, tuple(map(next_power_of_2, sizes))


def _heads_at_once(heads: int, runs: Sequence[tuple[int, int]], most: int) -> int:
    """Number of heads of a program, a power of two: at most `most` padded elements, but at least one head."""
    width = sum(next_power_of_2(size) for _, size in runs)
    return min(next_power_of_2(heads), 1 << max(0, (most // width).bit_length() - 1))


def _rotary_dim(x: Projections) -> int:
    return 0 if x.cos_sin is None else int(x.cos_sin.shape[1])


def _norm(weight: Any, options: Rotation) -> Norm | None:
    return None if weight is None else Norm(weight, float(options.eps), float(options.norm_offset))


def _rotary(x: Projections) -> Rotary | None:
    if x.cos_sin is None:
        return None
    if x.positions is None:  # row t belongs to token t, so kernels need no `length` to clamp positions
        return Rotary(x.cos_sin, x.cos_sin.stride(0))
    stride = x.positions.stride(0) if x.positions.ndim == 2 else None
    return Rotary(x.cos_sin, x.cos_sin.stride(0), x.cos_sin.shape[0], x.positions, stride)


def _pairs(x: Projections, options: Rotation) -> Pairs | None:
    pairs, sections = _rotary_dim(x) // 2, options.mrope_sections
    if not pairs:
        return None
    height, width = (None, None) if sections is None else (sections[0], sections[0] + sections[1])
    return Pairs(bool(options.interleaved), pairs, next_power_of_2(pairs), height, width)


def merged(out: Tensor, lse: Tensor, outs: Tensor, lses: Tensor, sinks: Tensor | None) -> None:
    """Launch the merge of states `outs` and `lses` into out and lse."""
    tensors = (out, lse, outs, lses, sinks)
    with arguments_for(tensors) as (result, *others):
        launches = Launches(merge_states(layout.rows(result), *others), outs.device)
    launches.first(tuple([x for x in tensors if x is not None]))


def moves_of(
    sources: Sequence[Tensor], targets: Sequence[Tensor] | None, src: Tensor, dst: Tensor, page_axis: int
) -> Moves:
    """The launch of a call of copy_pages (targets = None) or of move_pages."""
    return Moves(sources, targets, src, dst, page_axis)


def rows_of(given: tuple[Any, ...], kv_layout: str, door: Door) -> Rows:
    """The launch of a call of gather_pages.  given: cache, page_table, page_starts, seq_lens, out, scale."""
    return Rows(given, kv_layout, door)
