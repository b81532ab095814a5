"""One call of paged_attention, found in the cache of calls or checked and planned; one call of merge_states."""

from typing import Any

import torch
from torch import Tensor

from ..arguments import SCALE, SEVERAL, Options, Tensors, of_kind, scales_tokens
from ..checks import argument_rows as checks
from ..checks.options import unboxed
from ..launching.platform import device_of
from ..records.key_bounds import key_bounds_of
from ..strides import settled
from . import call_cache, checked
from .untraced import untraced
from .ways import way_of

RETURN_LSE = Options._fields.index("return_lse")
NUMBERS = of_kind(SCALE, SEVERAL)  # arguments that may be or hold numbers instead of tensors


@untraced
def attend(
    q: Any, k_cache: Any, v_cache: Any, page_table: Any, seq_lens: Any, cu_seqlens_q: Any, out: Any,
    others: tuple[Any, ...], options: tuple[Any, ...], check: bool | None,
) -> Any:  # fmt: skip
    """Make a call of paged_attention.

    others: the fields of Tensors between cu_seqlens_q and out.  options: the fields of Options.
    """
    form, tensors = call_cache.form_of(q, k_cache, v_cache, page_table, seq_lens, cu_seqlens_q, out, others, options)
    found, of = call_cache.again(form, tensors), None
    if found is None or (found[1][1] == found[1][2]) is not found[0].latent:
        of = call_cache.signature(form, tensors)
        found = call_cache.find(form, tensors, of)
    if found is None or (
        (checked.ALWAYS or (checked.IN_TORCH and found[0].in_torch)) if check is None else check is not False
    ):
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
    """Check, plan and launch a call, and keep its launches for calls of equal signature.

    of: the signature of the call.  None: its launches are not kept.
    """
    options = Options._make(unboxed([*options]))
    given = given._replace(**{name: unboxed(getattr(given, name)) for name in NUMBERS})
    axes = checks.check_attention(given, options)
    device = device_of(given.q.device)
    if checked.enabled(check, device):
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
    runs = way_of(device).run_of(given, options, device, lse, value_dim)
    runs.first(tuple([x for x in (*given.slots, lse) if isinstance(x, Tensor)]))
    call_cache.keep(of, runs)
    return result


@untraced
def merge(outs: Tensor, lses: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Merge states as merge_states specifies.  Each call is checked, and none is kept, because calls are rare."""
    axes = checks.check_merge(outs, lses, sinks)
    device = device_of(outs.device)
    outs, lses = outs.contiguous(), lses.contiguous()
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    if axes.tokens and axes.heads:
        way_of(device).merged(out, lse, outs, lses, sinks)
    return out, lse


def _empty_like(q: Tensor, value_dim: int | None) -> Tensor:
    if value_dim is not None:
        return torch.empty((*q.shape[:2], value_dim), dtype=q.dtype, device=q.device)
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def _empty_lse(q: Tensor) -> Tensor:
    return torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
