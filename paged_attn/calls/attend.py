"""One call of paged_attention: found again, or checked, planned and described."""

from typing import Any

import torch
from torch import Tensor
from triton.language import constexpr

from ..arguments import SCALE, SEVERAL, TINY, Options, Tensors, of_kind
from ..checks import argument_rows as checks
from ..checks.options import unboxed
from ..kernels.common.records import KeyValues, Modifiers
from ..launching.backend import INTERPRET, device_of
from ..launching.launch import Launches
from ..launching.template import arguments_for
from ..planning.planner import plan, steps_of
from ..records import layout
from ..records.call import Call, scales, scales_tokens
from ..records.key_bounds import key_bounds_of
from ..records.problem import problem_of
from ..strides import settled
from . import call_cache, checked
from .call_key import form_of
from .untraced import untraced

LEAST_CAP = 2.0**-40  # a smaller softcap makes all scores 0 as well, and its inverse may be infinite
MOST_CAPS = 2.0**96
FAR = 1 << 30  # farther than any key, and position + FAR still fits 32 bits
RETURN_LSE = Options._fields.index("return_lse")
TENSORS = {*Tensors._fields}
NUMBERS = of_kind(SCALE, SEVERAL)  # arguments that may be numbers beside tensors
# Arguments that modifiers have a field of the same name for: it holds them as they are, unless it is told otherwise.
IN_MODIFIERS = [name for name in Modifiers._fields if name in (*Tensors._fields, *Options._fields)]


@untraced
def attend(
    q: Any, k_cache: Any, v_cache: Any, page_table: Any, seq_lens: Any, cu_seqlens_q: Any, out: Any,
    others: tuple[Any, ...], options: tuple[Any, ...], check: bool | None,
) -> Any:  # fmt: skip
    """What paged_attention returns for these Tensors, `others` those after cu_seqlens_q, and these Options."""
    form, tensors = form_of(q, k_cache, v_cache, page_table, seq_lens, cu_seqlens_q, out, others, options)
    found, of = call_cache.again(form, tensors), None
    if found is None or (found[1][1] == found[1][2]) is not found[0].latent:
        of = call_cache.signature(form, tensors)
        found = call_cache.find(form, tensors, of)
    if found is None or (checked.ALWAYS if check is None else check is not False):
        given = Tensors._make((q, k_cache, v_cache, page_table, seq_lens, cu_seqlens_q, *others, out))
        return _attend_new(given, Options(*options), check, of)
    launches, addresses = found
    made: tuple[Tensor, ...] = ()
    if out is None:
        out = _empty_like(q, launches.value_dim)
        made = (out,)
    if options[RETURN_LSE]:
        lse = _empty_lse(q)
        made += (lse,)
    if launches.kept is None:
        launches.first(tensors + made)
    else:
        launches.again([*addresses, *[x.data_ptr() for x in made]] if made else addresses)
    return (out, lse) if options[RETURN_LSE] else out


def _attend_new(given: Tensors, options: Options, check: bool | None, of: call_cache.Signature | None) -> Any:
    """Check, plan, launch, and keep what was found out."""
    options = Options._make(unboxed([*options]))
    given = given._replace(**{name: unboxed(getattr(given, name)) for name in NUMBERS})
    axes = checks.check_attention(given, options)
    device = device_of(given.q.device)
    if checked.enabled(check):
        checks.check_attention_contents(
            axes, given.page_table, given.page_starts, given.seq_lens, given.cu_seqlens_q,
            max_seqlen_q=options.max_seqlen_q, max_seqlen_k=options.max_seqlen_k, k_new=given.k_new,
            key_bounds=key_bounds_of(options), head_windows=given.head_windows, only=options.only,
            query_positions=given.query_positions, prefix_lens=given.prefix_lens, spans=given.spans,
            clip_spans=options.clip_spans,
            causal=options.causal if given.causal_seqs is None else given.causal_seqs,
            token_scales=given.q_scale if scales_tokens(given.q_scale, given.q) else None,
        )  # fmt: skip
    value_dim = None if axes.value_dim == axes.head_dim else axes.value_dim
    out = _empty_like(given.q, value_dim) if given.out is None else given.out
    lse = _empty_lse(given.q) if options.return_lse else None
    given = Tensors._make([settled(x) for x in given._replace(out=out)])
    result = out if lse is None else (out, lse)
    if axes.seqs == 0:
        if options.only is None:
            out.zero_()
            if lse is not None:
                lse.fill_(float("-inf"))
        return result
    same = given.k_cache.data_ptr() == given.v_cache.data_ptr()
    problem = problem_of(given, options, device, INTERPRET)
    with arguments_for((*given.slots, lse)) as held:
        launches = Launches(steps_of(plan(problem), _call(held, options, axes)), given.q.device, value_dim, same)
    launches.first(tuple([x for x in (*given.slots, lse) if isinstance(x, Tensor)]))
    call_cache.keep(of, launches)
    return result


def _empty_like(q: Tensor, value_dim: int | None) -> Tensor:
    if value_dim is not None:
        return torch.empty((*q.shape[:2], value_dim), dtype=q.dtype, device=q.device)
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def _empty_lse(q: Tensor) -> Tensor:
    return torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)


def _new(k_new: Any, v_new: Any) -> KeyValues:
    """Keys and values outside the cache; values that are not given are the first dims of these keys."""
    return KeyValues(layout.contiguous(k_new), layout.contiguous(k_new if v_new is None else v_new))


def _spans(spans: Any, options: Options, right: int | None) -> dict[str, Any]:
    """Fields of the modifiers."""
    if spans is None:
        return {}
    fields = dict(spans=spans, spans_count=spans.shape[1], spans_stride=spans.stride(0), spans_step=spans.stride(1))
    return fields | (dict(CLIP_SPANS=constexpr(True), spans_right=right) if options.clip_spans else {})


def _head_windows(windows: Any, options: Options, apart: bool) -> dict[str, Any]:
    """Fields of the modifiers; a causal query, and one by positions, sees no more slots by any window to its right."""
    if windows is None:
        return {}
    stride = windows.stride(0)
    to_the_right = None if options.causal or apart else constexpr(True)
    return dict(head_windows_stride=None if stride == 2 else stride, BY_HEAD_TO_THE_RIGHT=to_the_right)


def _alibi(slopes: Any, options: Options) -> dict[str, Any]:
    """Fields of the modifiers."""
    if slopes is None:
        return {}
    stride = slopes.stride(0) if slopes.ndim == 2 and slopes.shape[0] > 1 else 0  # 0: the same for all
    return dict(alibi_stride_seq=stride or None, ALIBI_SYMMETRIC=constexpr(True) if options.alibi_symmetric else None)


def _call(held: list[Any], options: Options, axes: checks.Axes) -> Call:
    """The records of a call; a Hole stands for each tensor."""
    *given, lse = held
    x = Tensors.of_slots(given)
    # whoever asks whether there is a bound to the left asks for `left` alone, whatever bounds it
    left, right = [min(x, FAR) if x >= 0 else None for x in (key_bounds_of(options).reach, options.window_size[1])]
    if x.head_windows is not None:  # which say where these bounds are
        left, right = FAR if left is None else left, FAR
    apart = x.query_positions is not None
    scale = axes.head_dim**-0.5 if options.softmax_scale is None else float(options.softmax_scale)
    if abs(scale) < TINY:
        scale = 0.0  # no score would be another
    cap = max(float(options.softcap), LEAST_CAP)
    if options.softcap > 0:  # farther above it scores are at the cap, and a ratio that is infinite would make 0 NaN
        scale = min(max(scale, -MOST_CAPS * cap), MOST_CAPS * cap)
    slots_right = None if apart else right
    if x.causal_seqs is not None and slots_right is None:
        slots_right = FAR
    as_given = {name: getattr(x if name in TENSORS else options, name) for name in IN_MODIFIERS}
    # a position plus any of them still fits 32 bits
    as_given |= {name: min(value, FAR) for name, value in as_given.items() if type(value) is int}
    changed = dict(
        left=left,
        # a causal query sees nothing to its right, however wide its window
        right=0 if options.causal else slots_right,
        softcap=cap if options.softcap > 0 else None,
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
    )
    mods = Modifiers(**as_given | changed)
    return Call(
        out=layout.rows(x.out),
        lse=lse,
        query=layout.rows(x.q),
        cache=layout.cache(x.k_cache, x.v_cache, options.kv_layout),
        new=None if x.k_new is None else _new(x.k_new, x.v_new),
        query_starts=x.cu_seqlens_q,
        seq_lens=x.seq_lens,
        page_table=x.page_table,
        page_starts=layout.page_starts(x.page_table, x.page_starts),
        mods=mods,
        scales=scales(scale, x.q_scale, x.k_scale, x.v_scale, x.out_scale, x.gate, scales_tokens(x.q_scale, x.q)),
    )
