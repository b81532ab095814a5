"""Checks of the arguments of paged_attention, write_kv and merge_states.

The rows of the argument table check options and most tensors.  Every call that is not kept is checked by what the host
knows (axes.py, options.py).  Checks of contents, if enabled (calls/checked.py), also read numbers back from the device
(contents.py).  No check launches a kernel of this package, or writes to an argument.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..arguments import BY_NAME, BY_ROWS, PLACES, REFUSED, WITHIN, Options, Tensors, scales_slots
from ..launching.locks import FIRST
from ..strides import lies_in
from .axes import MAX_DIM, MAX_WORDS, Axes, Door, check_query_scale
from .contents import check_attention_contents, check_write_contents
from .kernel_tensors import BIAS_FOR, BOOL, FLOAT, FLOAT32, FP8, HALF, INT32, INTEGER, POINTED, QUERY, SAME, SCALED
from .options import INT32_MAX, boolean, both, choice, integer, kind, number, shard, window
from .overlap import no_overlap, same_elements, writable, written_scale
from .page_table import STARTS, admit_page_table
from .swapped import looks_swapped, warn

__all__ = [
    "Axes",
    "check_attention",
    "check_attention_contents",
    "check_merge",
    "check_options",
    "check_write",
    "check_write_contents",
]

RULES: dict[str, Callable[..., None]] = {
    "boolean": boolean,
    "choice": choice,
    "integer": integer,
    "number": number,
    "shard": shard,
    "window": window,
}
# Names of dtypes in the table's rows.  A further name, "beside scores", means dtypes that depend on q (BIAS_FOR).
KINDS = {"integer": INTEGER, "int32": INT32, "bool": BOOL, "float32": FLOAT32}
OF_SEQS = {"qq_bias", "alibi_slopes"}  # tensors that may have an axis of sequences before the axes in the table
# Arguments that may share no memory with out, in the order in which they are checked.  q may be out itself.
APART = [name for name in Tensors._fields if name not in ("q", "out", "score_mod_args")]


def _pairs(spans: Tensor) -> None:
    if spans.shape[2] != 2:
        raise ValueError(f"spans must be [seqs, R, 2], begins and ends, got {list(spans.shape)}")


def _few_words(qq_mask: Tensor) -> None:
    if qq_mask.shape[1] > MAX_WORDS:
        raise ValueError(f"qq_mask must have words <= {MAX_WORDS}, got {list(qq_mask.shape)}")


def _both_sides(head_windows: Tensor) -> None:
    if head_windows.shape[1] != 2:
        raise ValueError(f"window_size must be [heads, 2], keys before and after, got {list(head_windows.shape)}")


FURTHER: dict[str, Callable[[Tensor], None]] = {
    "spans": _pairs,
    "qq_mask": _few_words,
    "head_windows": _both_sides,
}  # checks beyond axes and dtypes


def check_attention(given: Tensors, options: Options) -> Axes:
    """Check all that the host knows about a call of paged_attention; returns the sizes of its axes."""
    q, k_cache, v_cache, page_table, seq_lens, cu_seqlens_q = given[: len(PLACES)]
    page_starts, k_new, v_new, out = given.page_starts, given.k_new, given.v_new, given.out
    door = Door()
    door.tensor("q", q, ("tokens", "heads", "head_dim"), QUERY)
    door.caches(k_cache, v_cache, options.kv_layout, "q", q.dtype)
    admit_page_table(door, page_table, page_starts, seq_lens)
    sizes = door.sizes
    tokens, seqs, heads, kv_heads = sizes["tokens"], sizes["seqs"], sizes["heads"], sizes["kv_heads"]
    if heads < 1 or heads % kv_heads:
        raise door.wrong_heads(heads)
    # Warn of a kv_layout that is probably wrong.  With k_new, a wrong one is an error of shapes.  A ragged table does
    # not say how many pages a row holds.
    if k_new is None and page_starts is None:
        _doubt(door, options.max_seqlen_k)
    if cu_seqlens_q is not None:
        sizes["seqs + 1"] = seqs + 1
        door.tensor("cu_seqlens_q", cu_seqlens_q, ("seqs + 1",), INTEGER)
    elif tokens != seqs:
        cure = "q.transpose(0, 1)" if heads == seqs else "pass cu_seqlens_q, where each sequence's queries begin"
        rows = f"{seqs}: {cure}"
        raise ValueError(f"cu_seqlens_q = None needs tokens = seqs, got q with tokens = {tokens} and seqs = {rows}")
    if k_new is not None or v_new is not None:
        latent = k_new is not None and v_new is None and lies_in(v_cache, k_cache)
        if not latent:
            both("k_new", k_new, "v_new", v_new)
            if sizes["head_dim"] > MAX_DIM:
                raise ValueError(f"v_new must be None with head_dim = {sizes['head_dim']}: values lie in k_new")
        beside, unscaled = ("k_cache", k_cache.dtype) if q.dtype in FP8 else ("q", q.dtype)
        dtypes = HALF if unscaled in SCALED else SAME[unscaled]
        door.tensor("k_new", k_new, ("tokens", "kv_heads", "head_dim"), dtypes, beside, unscaled)
        if not latent:
            door.tensor("v_new", v_new, ("tokens", "kv_heads", "value_dim"), SAME[k_new.dtype], "k_new", k_new.dtype)
    kinds = KINDS | {"beside scores": BIAS_FOR[q.dtype]}
    for x in BY_ROWS:
        value = getattr(given, x.name)
        if value is not None:
            of_seqs = x.name in OF_SEQS and isinstance(value, Tensor) and value.ndim == len(x.axes) + 1
            name, axes = WITHIN.get(x.name, x.name), ("seqs", *x.axes) if of_seqs else x.axes
            door.tensor(name, value, axes, kinds[x.dtypes], "q", q.dtype if x.dtypes == "beside scores" else None)
            if x.name in FURTHER:
                FURTHER[x.name](value)
    more: dict[str, Tensor] = {}
    score_mod, score_mod_args = options.score_mod, given.score_mod_args
    if score_mod is not None or score_mod_args is not None:
        with FIRST:  # importing platform looks for a GPU, which `import paged_attn` must not
            from ..launching.platform import device_of

        in_torch = device_of(q.device).in_torch
        more = check_score_mod(door, score_mod, () if score_mod_args is None else score_mod_args, in_torch)
    if out is not None:
        door.tensor("out", out, ("tokens", "heads", "value_dim"), QUERY)
        writable("out", out)
        if not same_elements(out, q):  # a block reads its queries before it writes its results, so out may be q
            no_overlap("out", out, q=q)
        others = {STARTS if name == "page_starts" else WITHIN.get(name, name): getattr(given, name) for name in APART}
        no_overlap("out", out, **others, **more)
    check_query_scale(door, given.q_scale, q)
    door.cache_scale("k_scale", given.k_scale, "k_cache", k_cache.dtype)
    if given.v_scale is not None or not lies_in(v_cache, k_cache):  # values within keys have the scale of keys
        door.cache_scale("v_scale", given.v_scale, "v_cache", v_cache.dtype)
    door.scale("out_scale", given.out_scale, "out", (q if out is None else out).dtype, axis=None)
    check_options(**options._asdict())
    _check_together(given, options)
    return Axes(
        tokens,
        seqs,
        heads,
        kv_heads,
        sizes["head_dim"],
        sizes["pages"],
        sizes["page_size"],
        sizes["max_pages"],
        sizes.get("x", 0),
        value_dim=sizes["value_dim"],
    )


def _doubt(door: Door, max_seqlen_k: object) -> None:
    """Warn if k_cache fits the call, but was probably meant in the other kv_layout."""
    if door.cache is None or not isinstance(max_seqlen_k, int):
        return
    sizes = door.sizes
    kv_heads, page_size, max_pages = sizes["kv_heads"], sizes["page_size"], sizes["max_pages"]
    if looks_swapped(sizes["heads"], kv_heads, page_size, max_pages, max_seqlen_k):
        warn(door.cache, kv_heads, page_size, max_pages, max_seqlen_k)


def _check_together(given: Tensors, options: Options) -> None:
    """Refuse a call that gives both arguments of a row of REFUSED."""
    values = given._asdict() | options._asdict()
    for rule in REFUSED:
        if all(_differs_from_default(name, values[name]) for name in (rule.argument, rule.beside)):
            raise ValueError(rule.message.format(**options._asdict()))


def _differs_from_default(name: str, value: Any) -> bool:
    default = BY_NAME[name].default
    if default is None:
        return value is not None
    return bool((tuple(value) if isinstance(default, tuple) else value) != default)


def check_options(**given: Any) -> None:
    """Check options of paged_attention, given by name, against the limits in their rows."""
    for name, value in given.items():
        argument = BY_NAME[name]
        if argument.check and (value is not None or argument.default is not None):
            rule, *limits = argument.check
            RULES[rule](name, value, *limits)


def check_write(
    k: Tensor,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor | None,
    slot_mapping: Tensor,
    *,
    kv_layout: str,
    k_scale: float | Tensor | None,
    v_scale: float | Tensor | None,
) -> Axes:
    """Check all that the host knows about a call of write_kv; returns the sizes of its axes."""
    door = Door()
    door.tensor("k", k, ("tokens", "kv_heads", "head_dim"), FLOAT)
    if v is None:
        door.latent(k_cache, v_cache, kv_layout, "k", k.dtype)
    else:
        door.tensor("v", v, ("tokens", "kv_heads", "value_dim"), SAME[k.dtype], "k", k.dtype)
        door.caches(k_cache, v_cache, kv_layout, "k", k.dtype)
    door.tensor("slot_mapping", slot_mapping, ("tokens",), INTEGER)
    writable("k_cache", k_cache)
    door.cache_scale("k_scale", k_scale, "k_cache", k_cache.dtype)
    read = dict(k=k, v=v, slot_mapping=slot_mapping, k_cache=k_cache, v_cache=v_cache)
    if scales_slots(k_scale):
        written_scale("k_scale", k_scale, **read, v_scale=v_scale)
    if v is None:
        if v_scale is not None:
            raise ValueError("v_scale must be None with v = None, for values are the first dims of keys")
    elif v_cache is not None:  # always true, because `caches` has refused None; for the type checker
        writable("v_cache", v_cache)
        if not (same_elements(k, v) and same_elements(k_cache, v_cache)):
            latent = lies_in(v_cache, k_cache)
            no_overlap("v_cache", v_cache, latent and "pass v = None where keys hold their values", k_cache=k_cache)
        door.cache_scale("v_scale", v_scale, "v_cache", v_cache.dtype)
        if scales_slots(v_scale):
            written_scale("v_scale", v_scale, **read, k_scale=k_scale)
    size = door.sizes
    return Axes(
        size["tokens"],
        kv_heads=size["kv_heads"],
        head_dim=size["head_dim"],
        value_dim=size.get("value_dim", 0),
        pages=size["pages"],
        page_size=size["page_size"],
        x=size.get("x", 0),
    )


def check_merge(outs: Tensor, lses: Tensor, sinks: Tensor | None = None) -> Axes:
    """Check all that the host knows about a call of merge_states; returns the sizes of its axes."""
    door = Door()
    door.place("outs", outs, FLOAT)
    door.bind("outs", outs, ("n", "tokens", "heads", "head_dim"))
    door.place("lses", lses, FLOAT32)
    door.bind("lses", lses, ("n", "tokens", "heads"))
    if sinks is not None:
        door.tensor("sinks", sinks, ("heads",), FLOAT)
    size = door.sizes
    if size["n"] < 1:
        raise ValueError(f"outs must be [n, tokens, heads, head_dim] with n >= 1, got {list(outs.shape)}")
    return Axes(size["tokens"], heads=size["heads"], head_dim=size["head_dim"], parts=size["n"])


# ---- score_mod and score_mod_args ----------------------------------------------------------------

GIVEN = ("score", "query_pos", "key_pos", "head")  # parameters of a score_mod before score_mod_args


def check_score_mod(door: Door, function: Any, args: Any, in_torch: bool) -> dict[str, Tensor]:
    """Check a user's function and its further arguments; returns the tensors among these, by name.

    in_torch: plain torch makes the call, so the function may also be one of torch.
    """
    from ..launching.platform import under_triton  # this import looks for a GPU, which `import paged_attn` must not

    if function is None and isinstance(args, tuple) and not args:
        return {}
    if function is None:
        raise ValueError("score_mod_args must be () without a score_mod")
    of_triton = under_triton(function)
    if not of_triton and not in_torch:
        raise TypeError(f"score_mod must be a function under @triton.jit, got {kind(function)}")
    if not of_triton and not callable(function):
        raise TypeError(f"score_mod must be a function in torch or under @triton.jit, got {kind(function)}")
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"score_mod_args must be a tuple of tensors, floats and ints, got {kind(args)}")
    _check_parameters(function.fn if of_triton else function, len(args))
    tensors = {}
    for i, arg in enumerate(args):
        name = f"score_mod_args[{i}]"
        if isinstance(arg, Tensor):
            door.place(name, arg, POINTED)
            if not arg.is_contiguous():
                raise ValueError(f"{name} must be contiguous, got {list(arg.shape)} strides {list(arg.stride())}")
            tensors[name] = arg
        else:
            number(name, arg, "a tensor, a finite float or an int")
            if isinstance(arg, int):
                integer(name, arg, -INT32_MAX, "an int")
    return tensors


def _check_parameters(function: Callable[..., Any], count: int) -> None:
    """Check that the function takes GIVEN and `count` more arguments."""
    parameters = inspect.signature(function).parameters.values()
    if any(x.kind is x.VAR_POSITIONAL for x in parameters):
        return
    required = sum(x.default is x.empty for x in parameters)
    if not required <= len(GIVEN) + count <= len(parameters):
        raise ValueError(
            f"score_mod must take ({', '.join(GIVEN)}) and score_mod_args, {len(GIVEN) + count} arguments, "
            f"got one that takes {', '.join(x.name for x in parameters)}"
        )
