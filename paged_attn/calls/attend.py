"""One call of paged_attention: found again, or checked, planned and described."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import arguments as checks
from ..checks.axes import TINY
from ..kernels.common.records import KeyValues, Modifiers
from ..kernels.common.score_mod import score_mod_of
from ..launching.backend import INTERPRET, device_of
from ..launching.launch import Launches
from ..launching.template import arguments_for
from ..planning.plan import plan
from ..planning.steps import steps_of
from ..records import layout
from ..records.call import Call, scales
from ..records.problem import Problem
from . import memo
from .untraced import untraced

LEAST_CAP = 2.0**-40  # a smaller softcap makes all scores 0 as well, and its inverse may be infinite
MOST_CAPS = 2.0**96
FAR = 1 << 30  # farther than any key, and position + FAR still fits 32 bits


class Tensors(NamedTuple):
    """The arguments of a call that are tensors, or may be, in the order of its launches' slots: log-sum-exp is next."""

    q: Any
    k_cache: Any
    v_cache: Any
    page_table: Any
    seq_lens: Any
    cu_seqlens_q: Any
    k_new: Any
    v_new: Any
    alibi_slopes: Any
    sinks: Any
    qq_bias: Any
    query_positions: Any
    q_scale: Any
    k_scale: Any
    v_scale: Any
    out_scale: Any
    score_mod_args: Any  # None or several: each has a slot
    out: Any  # last, for it may be made by the call

    @property
    def slots(self) -> tuple[Any, ...]:
        """One argument each."""
        return (*self[:BEHIND], *(self.score_mod_args or ()), self.out)

    @classmethod
    def of_slots(cls, held: list[Any]) -> "Tensors":
        return cls._make((*held[:BEHIND], tuple(held[BEHIND:-1]), held[-1]))


class Options(NamedTuple):
    """The other arguments that decide a call."""

    kv_layout: Any
    max_seqlen_q: Any
    max_seqlen_k: Any
    softmax_scale: Any
    causal: Any
    window_size: Any
    softcap: Any
    return_lse: Any
    only: Any
    batch_invariant: Any
    score_mod: Any = None


BEHIND = Tensors._fields.index("score_mod_args")
RETURN_LSE = Options._fields.index("return_lse")


@untraced
def attend(
    q: Any, k_cache: Any, v_cache: Any, page_table: Any, seq_lens: Any, cu_seqlens_q: Any, out: Any,
    others: tuple[Any, ...], options: tuple[Any, ...], check: bool | None,
) -> Any:  # fmt: skip
    """What paged_attention returns for these Tensors, `others` those after cu_seqlens_q, and these Options."""
    form, tensors = _form(q, k_cache, v_cache, page_table, seq_lens, cu_seqlens_q, out, others, options)
    found, of = memo.again(form, tensors), None
    if found is None:
        of = memo.signature(form, tensors)
        found = memo.find(form, tensors, of)
    if found is None or (checks.ALWAYS if check is None else check is not False):
        given = Tensors._make((q, k_cache, v_cache, page_table, seq_lens, cu_seqlens_q, *others, out))
        return _attend_new(given, Options(*options), check, of)
    launches, addresses = found
    made: tuple[Tensor, ...] = ()
    if out is None:
        out = _empty_like(q)
        made = (out,)
    if options[RETURN_LSE]:
        lse = _empty_lse(q)
        made += (lse,)
    if launches.kept is None:
        launches.first(tensors + made)
    else:
        launches.again([*addresses, *[x.data_ptr() for x in made]] if made else addresses)
    return (out, lse) if options[RETURN_LSE] else out


def _form(
    q: Any, k: Any, v: Any, table: Any, lens: Any, starts: Any, out: Any,
    others: tuple[Any, ...], options: tuple[Any, ...],
) -> tuple[Any, tuple[Any, ...]]:  # fmt: skip
    """What decides a call but the facts of its tensors, and those that are there; every call waits for it."""
    tensors = (q, k, v, table, lens) if starts is None else (q, k, v, table, lens, starts)
    try:
        _, max_q, max_k, scale, causal, (left, right), softcap, lse, _, invariant, _ = options
    except (TypeError, ValueError):  # a window of another form, which cannot be hashed either
        return [], tensors
    form: tuple[Any, ...] = (
        # numbers of different types are equal, and some of those types are refused
        options, type(max_q), type(max_k), type(scale), type(causal), type(left), type(right), type(softcap),
        type(lse), type(invariant), starts is None, out is None,
    )  # fmt: skip
    a, b, c, d, e, f, g, h, i, j, more = others
    if not (a is b is c is d is e is f is g is h is i is j is more is None):
        if more is not None:
            if not isinstance(more, (tuple, list)):  # it will be refused
                return [], tensors
            others = (*others[:-1], *more)
        form += memo.form_of(others)
        tensors += tuple([x for x in others if isinstance(x, Tensor)])
    return form, tensors if out is None else tensors + (out,)


def _attend_new(given: Tensors, options: Options, check: bool | None, of: memo.Signature | None) -> Any:
    """Check, plan, launch, and keep what was found out."""
    axes = checks.check_attention(**given._asdict(), **options._asdict())
    device = device_of(given.q.device)
    if checks.enabled(check):
        checks.check_attention_contents(
            axes, given.page_table, given.seq_lens, given.cu_seqlens_q, max_seqlen_q=options.max_seqlen_q,
            max_seqlen_k=options.max_seqlen_k, k_new=given.k_new, window_size=options.window_size, only=options.only,
            query_positions=given.query_positions,
        )  # fmt: skip
    out = _empty_like(given.q) if given.out is None else given.out
    lse = _empty_lse(given.q) if options.return_lse else None
    given = given._replace(out=out)
    result = out if lse is None else (out, lse)
    if axes.seqs == 0:
        if options.only is None:
            out.zero_()
            if lse is not None:
                lse.fill_(float("-inf"))
        return result
    problem = _problem(given, options, axes, device, out)
    with arguments_for((*given.slots, lse)) as held:
        launches = Launches(steps_of(plan(problem), _call(held, options, axes)), given.q.device)
    launches.first(tuple([x for x in (*given.slots, lse) if isinstance(x, Tensor)]))
    memo.keep(of, launches)
    return result


def _empty_like(q: Tensor) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def _empty_lse(q: Tensor) -> Tensor:
    return torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)


def _problem(given: Tensors, options: Options, axes: checks.Axes, device: Any, out: Tensor) -> Problem:
    """What the planner is told."""
    scale, max_seqlen_q, new = options.softmax_scale, options.max_seqlen_q, given.k_new is not None
    # lengths that the host knows: of the queries, and of the keys that the page table and the call's own hold
    room = axes.max_pages * axes.page_size + (axes.tokens if new else 0)
    return Problem(
        tokens=axes.tokens,
        seqs=axes.seqs,
        heads=axes.heads,
        kv_heads=axes.kv_heads,
        head_dim=axes.head_dim,
        page_size=axes.page_size,
        max_seqlen_q=axes.tokens if max_seqlen_q is None else min(max_seqlen_q, axes.tokens),
        max_seqlen_k=room if options.max_seqlen_k is None else min(options.max_seqlen_k, room),
        window_left=options.window_size[0],
        ragged=given.cu_seqlens_q is not None,
        positive=scale is None or scale >= TINY,
        softcap=float(options.softcap),
        alibi=given.alibi_slopes is not None,
        qq_bias=given.qq_bias is not None,
        only=options.only,
        compute=_compute_dtype(given.q, given.k_cache, given.k_new),
        query=given.q.dtype,
        cache=given.k_cache.dtype,
        packed=axes.x > 0,
        pairable=pairable(given.q.dtype, given.k_cache, given.v_cache, options.kv_layout, new),
        boxable=layout.boxable(given.k_cache, given.v_cache),
        rows_per_page=layout.rows_per_page(given.k_cache, given.v_cache, options.kv_layout),
        adjacent=layout.adjacent(given.k_cache, given.v_cache, options.kv_layout),
        query_box=layout.aligned(given.q),
        new=new,
        new_box=new and layout.rows_boxable(given.k_new, given.v_new, given.k_cache.dtype),
        lse=bool(options.return_lse),
        batch_invariant=bool(options.batch_invariant),
        device=device,
        score_mod=score_mod_of(options.score_mod, given.score_mod_args),
    )


def _call(held: list[Any], options: Options, axes: checks.Axes) -> Call:
    """The records of a call; an Argument stands for each tensor."""
    *given, lse = held
    x = Tensors.of_slots(given)
    left, right = [min(x, FAR) if x >= 0 else None for x in options.window_size]
    apart = x.query_positions is not None
    scale = axes.head_dim**-0.5 if options.softmax_scale is None else float(options.softmax_scale)
    if abs(scale) < TINY:
        scale = 0.0  # no score would be another
    cap = max(float(options.softcap), LEAST_CAP)
    if options.softcap > 0:  # farther above it scores are at the cap, and a ratio that is infinite would make 0 NaN
        scale = min(max(scale, -MOST_CAPS * cap), MOST_CAPS * cap)
    mods = Modifiers(
        left=left,
        # a causal query sees nothing to its right, however wide its window
        right=0 if options.causal else None if apart else right,
        softcap=cap if options.softcap > 0 else None,
        alibi_slopes=x.alibi_slopes,
        qq_bias=x.qq_bias,
        qq_bias_stride=None if x.qq_bias is None else x.qq_bias.stride(0),
        qq_bias_size=None if x.qq_bias is None else x.qq_bias.shape[0],
        sinks=x.sinks,
        query_positions=x.query_positions,
        position_right=right if apart else None,
        score_mod_args=None if options.score_mod is None else x.score_mod_args,
    )
    return Call(
        out=layout.rows(x.out),
        lse=lse,
        query=layout.rows(x.q),
        cache=layout.cache(x.k_cache, x.v_cache, options.kv_layout),
        new=None if x.k_new is None else KeyValues(layout.contiguous(x.k_new), layout.contiguous(x.v_new)),
        query_starts=x.cu_seqlens_q,
        seq_lens=x.seq_lens,
        page_table=x.page_table,
        mods=mods,
        scales=scales(scale, x.q_scale, x.k_scale, x.v_scale, x.out_scale),
    )


def _compute_dtype(q: Tensor, k_cache: Tensor, k_new: Tensor | None) -> torch.dtype:
    """Operands of the dots here."""
    if INTERPRET:  # which has no other arithmetic that is right
        return torch.float32
    return operand_dtype(q.dtype, [x.dtype for x in (k_cache, k_new) if x is not None])


def operand_dtype(query: torch.dtype, keys: list[torch.dtype]) -> torch.dtype:
    """Operands of the dots: the type of keys that are not fp8; float16, which holds every fp8 number, if all are.

    Keys of bfloat16 may be anywhere in its range; queries alone are brought into float16's, row by row.
    """
    wide = [dtype for dtype in keys if not layout.is_fp8(dtype)]
    return query if query == torch.float32 else wide[0] if wide else torch.float16


def pairable(query: torch.dtype, k_cache: Tensor, v_cache: Tensor, kv_layout: str, new: bool) -> bool:
    """Whether fp8 keys can be read two dims at a time; new keys would have to lie in the same parts."""
    if new or query == torch.float32 or not layout.is_fp8(k_cache.dtype):
        return False
    head_dim = v_cache.shape[2 if v_cache.ndim == 4 and k_cache.ndim == 5 else 3]
    return layout.pairable(layout.cache(k_cache, v_cache, kv_layout).key, head_dim)
