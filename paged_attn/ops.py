"""The public functions as operators of torch, which graphs of torch.compile hold unchanged: torch.ops.paged_attn.

`attention(...)` writes `out` and returns nothing.  `attention_lse(...)` also returns the log-sum-exp.  `write_kv(...)`
and `merge_states(outs, lses, sinks)` are as in api.py.  `copy_pages(...)` and `move_pages(...)` are as in pages.py,
with lists of tensors.  `gather_pages(...)` writes `out` and returns nothing.  `write_qkv(...)` takes qkv as a list of
one tensor or three, writes `q_out` and returns nothing.

Operators take the arguments of the functions, except `score_mod` and `score_mod_args`.  `out` is always given, and
scales are tensors.  A tensor given as `causal` becomes `causal_seqs`, with `causal` False.  A tensor given as
`window_size` becomes `head_windows`, with `window_size` (-1, -1).

Where torch traces `write_kv`, an operator for each cache replaces it: `write_keys` and, unless values lie in keys,
`write_values`.  torch.compile lets an operator change a buffer in place only once.  If one operator changed two views
of a buffer, torch would copy a view.  `write_qkv` becomes `write_projections`, one launch.  If both caches lie in one
buffer, it becomes `write_queries_keys` and `write_values` instead.  Scales by token, which a write changes, are
arguments of their own: `k_slot_scale` and `v_slot_scale`.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from .arguments import ARGUMENTS, OPTION, PLACES, SCALE, Options, Tensors, of_kind, scales_slots, schema
from .calls.untraced import at_first_call, from_text, listed, untraced
from .checks.argument_rows import check_options
from .checks.axes import values_apart
from .checks.kernel_tensors import INT4, refuse_gradient, watched
from .checks.options import boolean, choice, integer, number, scale_number
from .checks.projections import packed_shape, three, unpacked
from .checks.swapped import LAYOUTS
from .strides import lies_in, looks_within

attend = at_first_call("attend", ".calls.attend", globals())
write = at_first_call("write", ".calls.writes", globals())
fused_write = at_first_call("fused_write", ".calls.writes", globals())
merge = at_first_call("merge", ".calls.attend", globals())
move = at_first_call("move", ".calls.pages", globals())
gather = at_first_call("gather", ".calls.pages", globals())

WRITE = """(
    Tensor k, Tensor? v, Tensor{keys} k_cache, Tensor{values}? v_cache, Tensor slot_mapping,
    *, str kv_layout="NHD", Tensor? k_scale=None, Tensor? v_scale=None, bool? check=None,
    Tensor{key_scales}? k_slot_scale=None, Tensor{value_scales}? v_slot_scale=None
)"""
WRITE_QKV = """(
    Tensor[] qkv, Tensor(a!) k_cache, Tensor{values}? v_cache, Tensor slot_mapping, Tensor(c!) q_out, *,
    str kv_layout="NHD", Tensor? positions=None, Tensor? cos_sin=None, bool interleaved=False,
    int[]? mrope_sections=None, Tensor? q_norm=None, Tensor? k_norm=None, float eps=1e-6, float norm_offset=0.0,
    Tensor? k_scale=None, Tensor? v_scale=None, Tensor? q_scale=None, bool? check=None,
    Tensor(d!)? k_slot_scale=None, Tensor{value_scales}? v_slot_scale=None
)"""
CHANGED = ("keys", "values", "key_scales", "value_scales")
_library = torch.library.Library("paged_attn", "DEF")


# What `_attention` passes for each field of Tensors and Options, as text.  Operators have no score_mod, and graphs turn
# tuples into lists.
_NAMES = {name: name for name in (*Tensors._fields, *Options._fields)}
_NAMES |= {x.name: "None" for x in ARGUMENTS if x.schema is None and x.name != "return_lse"}
_NAMES["window_size"] = "tuple(window_size)"
_NAMES["shard"] = "shard and tuple(shard)"
_FIRST = (*PLACES, "out")
_NAMED = [x for x in ARGUMENTS if x.schema is not None and x.name not in _FIRST]

# Parameters have the schema's defaults, because torch leaves out arguments that equal their defaults.  A wrapper that
# adds the missing arguments would cost a microsecond.
_attention: Callable[..., Any] = untraced(from_text(f"""\
def _attention({listed(_FIRST)} {listed(f"{x.name}={x.default!r}" for x in _NAMED)} return_lse=False):
    result = attend(
        {listed(_FIRST)}
        ({listed(_NAMES[name] for name in Tensors._fields if name not in _FIRST)}),
        ({listed(_NAMES[name] for name in Options._fields)}),
        check,
    )
    return result[1] if return_lse else None
""", globals()))  # fmt: skip


@untraced
def _write(
    k: Any, v: Any, k_cache: Any, v_cache: Any, slot_mapping: Any, kv_layout: Any = "NHD", k_scale: Any = None,
    v_scale: Any = None, check: Any = None, k_slot_scale: Any = None, v_slot_scale: Any = None, part: str | None = None,
) -> None:  # fmt: skip
    """Write both caches in one launch, or the cache of one `part`.

    Where torch traces the call, call an operator for each cache instead.
    """
    if part is None and watched(k, v, k_cache, v_cache, slot_mapping):
        if scales_slots(k_scale):
            k_scale, k_slot_scale = None, k_scale
        if scales_slots(v_scale):
            v_scale, v_slot_scale = None, v_scale
        operators = [torch.ops.paged_attn.write_keys, torch.ops.paged_attn.write_values]
        if v is None:
            _refuse_apart(v_cache, k_cache)
            v_cache, operators = None, operators[:1]
        for operator in operators:
            operator(
                k, v, k_cache, v_cache, slot_mapping, kv_layout=kv_layout, k_scale=k_scale, v_scale=v_scale,
                check=check, k_slot_scale=k_slot_scale, v_slot_scale=v_slot_scale,
            )  # fmt: skip
    else:
        k_scale = k_scale if k_slot_scale is None else k_slot_scale
        v_scale = v_scale if v_slot_scale is None else v_slot_scale
        write(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, kv_layout, check, part)


def _refuse_apart(v_cache: Any, k_cache: Any) -> None:
    """Refuse a v_cache that is no view of k_cache's first dims, if keys are written with the values in them.

    Only the first trace of a graph can tell whether v_cache is such a view.  A functionalised graph writes to a copy of
    k_cache, and v_cache is no view of the copy.
    """
    if isinstance(v_cache, FakeTensor) and isinstance(k_cache, FakeTensor):  # fake tensors have no addresses
        begins = [(x.untyped_storage()._cdata, x.storage_offset()) for x in (v_cache, k_cache)]
        inside = begins[0] == begins[1] and looks_within(v_cache, k_cache)
    else:
        inside = v_cache is None or isinstance(k_cache, FunctionalTensor) or lies_in(v_cache, k_cache)
    if not inside:
        raise values_apart(v_cache)


@untraced
def _write_qkv(qkv: Any, k_cache: Any, v_cache: Any, slot_mapping: Any, q_out: Any, **named: Any) -> None:
    """Write queries and both caches in one launch.

    Where torch traces the call, call `write_projections` instead.  If both caches lie in one buffer, call two
    operators, which change one cache each.
    """
    for name in ("k", "v"):
        if scales_slots(named.get(f"{name}_scale")):
            named[f"{name}_slot_scale"] = named.pop(f"{name}_scale")
    if not watched(*qkv, k_cache, v_cache, slot_mapping):
        _fused(qkv, k_cache, v_cache, slot_mapping, q_out, **named)
    elif v_cache is None or not _one_buffer(k_cache, v_cache):
        torch.ops.paged_attn.write_projections(qkv, k_cache, v_cache, slot_mapping, q_out, **named)
    else:
        torch.ops.paged_attn.write_queries_keys(qkv, k_cache, v_cache, slot_mapping, q_out, **named)
        k, v = unpacked(qkv[0], k_cache, named.get("kv_layout", "NHD"))[1:] if len(qkv) == 1 else qkv[1:]
        of_write = ("kv_layout", "k_scale", "v_scale", "check", "k_slot_scale", "v_slot_scale")
        named = {name: named[name] for name in of_write if name in named}
        torch.ops.paged_attn.write_values(k, v, k_cache, v_cache, slot_mapping, **named)


def _one_buffer(k_cache: Any, v_cache: Any) -> bool:
    """Whether two tensors, which a graph may wrap, lie in one buffer."""
    both = [torch._from_functional_tensor(x.elem) if isinstance(x, FunctionalTensor) else x for x in (k_cache, v_cache)]
    return bool(both[0].untyped_storage()._cdata == both[1].untyped_storage()._cdata)


@untraced
def _fused(
    qkv: Any, k_cache: Any, v_cache: Any, slot_mapping: Any, q_out: Any, kv_layout: Any = "NHD", positions: Any = None,
    cos_sin: Any = None, interleaved: Any = False, mrope_sections: Any = None, q_norm: Any = None, k_norm: Any = None,
    eps: Any = 1e-6, norm_offset: Any = 0.0, k_scale: Any = None, v_scale: Any = None, q_scale: Any = None,
    check: Any = None, k_slot_scale: Any = None, v_slot_scale: Any = None, part: str | None = None,
) -> None:  # fmt: skip
    k_scale = k_scale if k_slot_scale is None else k_slot_scale
    v_scale = v_scale if v_slot_scale is None else v_slot_scale
    sections = None if mrope_sections is None else tuple(mrope_sections)
    fused_write(
        qkv[0] if len(qkv) == 1 else qkv, k_cache, v_cache, slot_mapping,
        (positions, cos_sin, q_norm, k_norm, k_scale, v_scale, q_scale),
        (kv_layout, interleaved, sections, eps, norm_offset), q_out, check, part,
    )  # fmt: skip


@untraced
def _merge_states(outs: Any, lses: Any, sinks: Any = None) -> Any:
    return merge(outs, lses, sinks)


@untraced
def _copy_pages(caches: Any, src: Any, dst: Any, page_axis: Any = 0, check: Any = None) -> None:
    move(caches, None, src, dst, page_axis, check)


@untraced
def _move_pages(sources: Any, targets: Any, src: Any, dst: Any, page_axis: Any = 0, check: Any = None) -> None:
    move(sources, targets, src, dst, page_axis, check)


@untraced
def _gather_pages(
    cache: Any, page_table: Any, page_starts: Any, seq_lens: Any, out: Any, kv_layout: Any = "NHD", scale: Any = None,
    check: Any = None,
) -> None:  # fmt: skip
    gather(cache, page_table, page_starts, seq_lens, out, kv_layout, scale, check)


def _nothing(*args: Any) -> None:
    """Fake result of operators that only write."""


def _lse(q: Tensor, *args: Any) -> Tensor:
    """Fake log-sum-exp [tokens, heads] float32."""
    return q.new_empty(q.shape[:2], dtype=torch.float32)


def _state(outs: Tensor, lses: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Fake merged state (out, lse)."""
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])


def _register(schema: str, function: Callable[..., Any], looks: Callable[..., Any] | None) -> None:
    """Register an operator.  looks: makes fake results.  None: traces see the operators that `function` calls."""
    name = schema.split("(")[0]
    _library.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))
    if looks is None:
        _library.impl(name, function, "CompositeImplicitAutograd")
        return
    _library.impl(name, function, "CompositeExplicitAutograd")
    names = [x.name for x in getattr(torch.ops.paged_attn, name).default._schema.arguments]

    def fake(*args: Any, **options: Any) -> Any:
        """Refuse gradients, because calls of a compiled graph no longer see requires_grad; return fake results."""
        for name, value in (*zip(names, args), *options.items()):
            for x in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(x, Tensor):
                    refuse_gradient(name, x)
        return looks(*args)

    torch.library.register_fake(f"paged_attn::{name}", fake, lib=_library)


_register(f"attention{schema()} -> ()", _attention, _nothing)
_register(f"attention_lse{schema()} -> Tensor", functools.partial(_attention, return_lse=True), _lse)


def _written(name: str, *changed: str) -> str:
    """Schema of an operator that writes keys or values.  changed: the names in CHANGED whose tensors it writes."""
    marks = {x: f"({letter}!)" if x in changed else "" for x, letter in zip(CHANGED, "abcd")}
    return f"{name}{WRITE.format(**marks)} -> ()"


_register(_written("write_kv", *CHANGED), _write, None)
_register(_written("write_keys", *CHANGED[::2]), functools.partial(_write, part="keys"), _nothing)
_register(_written("write_values", *CHANGED[1::2]), functools.partial(_write, part="values"), _nothing)
BOTH, KEYS = (WRITE_QKV.format(values=x, value_scales=y) for x, y in (("(b!)", "(e!)"), ("", "")))
_register(f"write_qkv{BOTH} -> ()", _write_qkv, None)
_register(f"write_projections{BOTH} -> ()", _fused, _nothing)
_register(f"write_queries_keys{KEYS} -> ()", functools.partial(_fused, part="keys"), _nothing)
_register("merge_states(Tensor outs, Tensor lses, Tensor? sinks=None) -> (Tensor, Tensor)", _merge_states, _state)

PAIRS = "Tensor src, Tensor dst, *, int page_axis=0, bool? check=None) -> ()"
_register(f"copy_pages(Tensor(a!)[] caches, {PAIRS}", _copy_pages, _nothing)
_register(f"move_pages(Tensor[] sources, Tensor(a!)[] targets, {PAIRS}", _move_pages, _nothing)
GATHER = """gather_pages(
    Tensor cache, Tensor page_table, Tensor? page_starts, Tensor seq_lens, Tensor(a!) out,
    *, str kv_layout="NHD", Tensor? scale=None, bool? check=None
) -> ()"""
_register(GATHER, _gather_pages, _nothing)


# ---- the public functions inside torch.compile and torch.export ----------------------------------

# torch traces these functions, which prepare the arguments and call the operators above.  They check options and
# numbers on the host, because a schema would convert their types.  They also refuse tensors that require grad, because
# operators cannot see this when the compiled graph runs.  Operators then check everything else.

OPTIONS = [x.name for x in ARGUMENTS if x.kind == OPTION and x.schema is not None]
SCALES = of_kind(SCALE)


def paged_attention(out: Tensor | None, check: bool | None, return_lse: bool, **given: Any) -> Any:
    """Call paged_attention as an operator.  given: the other arguments that operators have, by name."""
    check_options(**{name: given[name] for name in OPTIONS}, return_lse=return_lse)
    if check is not None:
        boolean("check", check, "True, False or None")
    _no_gradients(given | {"out": out})
    q = given["q"]
    out = _results_like(q, given["k_cache"], given["v_cache"]) if out is None else out
    tensors = [given.pop(name) for name in PLACES]
    given |= _scales({name: given[name] for name in SCALES}, q)
    if not return_lse:
        torch.ops.paged_attn.attention(*tensors, out, **given, check=check)
        return out
    return out, torch.ops.paged_attn.attention_lse(*tensors, out, **given, check=check)


def write_kv(
    k: Tensor, v: Tensor | None, k_cache: Tensor, v_cache: Tensor | None, slot_mapping: Tensor, kv_layout: str,
    k_scale: Any, v_scale: Any, check: bool | None,
) -> None:  # fmt: skip
    choice("kv_layout", kv_layout, tuple(LAYOUTS))
    if check is not None:
        boolean("check", check, "True, False or None")
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    _no_gradients({"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, **scales})
    by_slot = {f"{name[0]}_slot_scale": scale for name, scale in scales.items() if scales_slots(scale)}
    others = {name: scale for name, scale in scales.items() if not scales_slots(scale)}
    torch.ops.paged_attn.write_kv(
        k, v, k_cache, v_cache, slot_mapping, kv_layout=kv_layout, check=check, **_scales(others, k), **by_slot
    )


def write_qkv(
    qkv: Any, k_cache: Tensor, v_cache: Tensor | None, slot_mapping: Tensor, tensors: tuple[Any, ...],
    options: tuple[Any, ...], q_out: Tensor | None, check: bool | None,
) -> Tensor:  # fmt: skip
    kv_layout, interleaved, sections, eps, norm_offset = options
    choice("kv_layout", kv_layout, tuple(LAYOUTS))
    boolean("interleaved", interleaved)
    number("eps", eps, "a finite number >= 0", 0)
    number("norm_offset", norm_offset, "a finite number")
    if check is not None:
        boolean("check", check, "True, False or None")
    for i, size in enumerate(() if sections is None else sections):
        integer(f"mrope_sections[{i}]", size, 0, "an int")
    parts = [qkv] if isinstance(qkv, Tensor) else [*three(qkv)]
    given = dict(zip(("positions", "cos_sin", "q_norm", "k_norm", "k_scale", "v_scale", "q_scale"), tensors))
    names = ("qkv",) if len(parts) == 1 else ("q", "k", "v") if v_cache is not None else ("q_rope", "latent", "k_rope")
    _no_gradients(dict(zip(names, parts)) | {"k_cache": k_cache, "v_cache": v_cache, "q_out": q_out} | given)
    scales = {name: given.pop(name) for name in ("k_scale", "v_scale", "q_scale")}
    given |= {f"{name[0]}_slot_scale": scale for name, scale in scales.items() if scales_slots(scale)}
    given |= _scales({name: scale for name, scale in scales.items() if not scales_slots(scale)}, parts[0])
    if q_out is None:
        q = parts[0]
        q_out = q.new_empty(packed_shape(q, k_cache, kv_layout) if len(parts) == 1 else q.shape)
    torch.ops.paged_attn.write_qkv(
        parts, k_cache, v_cache, slot_mapping, q_out, kv_layout=kv_layout, interleaved=interleaved,
        mrope_sections=sections, eps=eps, norm_offset=norm_offset, check=check, **given,
    )  # fmt: skip
    return q_out


def merge_states(outs: Tensor, lses: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    _no_gradients({"outs": outs, "lses": lses, "sinks": sinks})
    out, lse = torch.ops.paged_attn.merge_states(outs, lses, sinks)
    return out, lse


def _results_like(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    """An uninitialised `out`, [tokens, heads, value_dim].  The operator will refuse a v_cache that is not 4-D."""
    if v_cache.ndim != 4:
        return torch.empty_like(q, memory_format=torch.contiguous_format)
    dims = v_cache.shape[2 if k_cache.ndim == 5 else 3] * (2 if v_cache.dtype == INT4 else 1)
    if dims == q.shape[-1]:
        return torch.empty_like(q, memory_format=torch.contiguous_format)
    return q.new_empty((*q.shape[:-1], dims))


def _no_gradients(given: dict[str, Any]) -> None:
    for name, value in given.items():
        if isinstance(value, Tensor):
            refuse_gradient(name, value)


def _scales(given: dict[str, Any], like: Tensor) -> dict[str, Any]:
    """Scales with numbers turned into tensors, because a schema has no type for both."""
    made = dict(given)
    for name, value in given.items():
        if value is not None and not isinstance(value, Tensor):
            scale_number(name, value)
            made[name] = torch.full((1,), value, dtype=torch.float32, device=like.device)
    return made
