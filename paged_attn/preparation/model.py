"""The calls of a model: which batches differ for the planner, and an example of each."""

from __future__ import annotations

import functools
import itertools
from collections import namedtuple
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..arguments import BY_ROWS, OF_MODELS, WITHIN, bound
from ..launching.platform import Device
from ..planning.dialects import dialect
from ..records.formats import INT4, is_scaled
from ..records.key_bounds import key_bounds_of
from .score_mod_ref import Named

if TYPE_CHECKING:
    from ..records.problem import Problem


class _Written(NamedTuple):
    """The fields of a model that this folder reads."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    out_dtype: torch.dtype
    kv_layout: str = "NHD"
    new: bool = False
    causal: bool = True
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: bool = False
    sinks: torch.dtype | None = None
    qq_bias: int = 0
    query_positions: bool = False
    gate: torch.dtype | None = None
    scales: str = "number"
    return_lse: bool = False
    integers: torch.dtype = torch.int32
    page_indices: torch.dtype | None = None
    score_mod: Named | None = None
    value_dim: int | None = None  # None: head_dim
    qq_mask: int = 0  # int32 words of each query; 0: no qq_mask
    token_scales: bool = False  # True: q_scale has a number for each token
    causal_seqs: bool = False
    latent: bool = False  # True: values are the first dims of keys
    prefix_lens: bool = False
    spans: int = 0
    head_windows: bool = False
    side_by_side: bool = False  # True: values of a slot lie after its keys, in one cache
    page_stride: int = 0  # slots from a page's first slot to the next page's first slot; 0: page_size
    qkv: str | None = None  # form of qkv in calls of write_qkv: "packed" or "separate"; None: there are no such calls
    rotary_dim: int | None = None  # columns of cos_sin; 0: nothing is rotated; None: the dims of q
    interleaved: bool = False
    mrope_sections: tuple[int, int, int] | None = None
    cos_sin: torch.dtype | None = None  # dtype of cos_sin; None: dtype of qkv
    qk_norm: torch.dtype | None = None  # dtype of q_norm and k_norm; None: no norms
    pages: bool = False  # True: whole pages are copied, moved and gathered

    @property
    def value_width(self) -> int:
        """Dims of values and results."""
        return self.value_dim or self.head_dim

    @property
    def slot_scale(self) -> torch.dtype | None:
        """Dtype of scales by token of the cache; None: the cache has other scales, or none."""
        kinds = {"per_token": torch.float32, "per_token_float16": torch.float16}
        return kinds.get(self.scales) if is_scaled(self.cache_dtype) else None

    @property
    def why_not_int4(self) -> str | None:
        """Why this model cannot have an int4 cache, in words; None: it can, or its cache has another dtype."""
        if self.cache_dtype != INT4:
            return None
        if self.scales != "per_token":
            return f"scales must be per_token over int4, got {self.scales}"
        if self.kv_layout == "x" or self.latent:
            return f"int4 caches are neither x-packed nor latent, got {'latent' if self.latent else 'x-packed'}"
        for name, dim in (("head_dim", self.head_dim), ("value_dim", self.value_width)):
            if dim % 4:
                return f"{name} must be a multiple of 4 over int4, got {dim}"
        return None


QKV = ("packed", "separate")
# Fields that only calls of write_qkv need.
OF_WRITE_QKV = ("qkv", "rotary_dim", "interleaved", "mrope_sections", "cos_sin", "qk_norm")
# Other options of calls that are fields of a model.  This folder passes them on to calls, and does not read them.
PASSED = {x.name: x.default for x in OF_MODELS if x.name not in _Written._fields}
if TYPE_CHECKING:
    Model = _Written
else:
    _Fields = namedtuple(
        "_Fields", [*_Written._fields, *PASSED], defaults=[*_Written._field_defaults.values(), *PASSED.values()]
    )

    class Model(_Fields):
        """What the calls of a model have in common.  Fields are named like arguments of prepare()."""

        __slots__ = ()
        value_width = _Written.value_width
        slot_scale = _Written.slot_scale
        why_not_int4 = _Written.why_not_int4


class Lengths(NamedTuple):
    """One batch, as far as a plan depends on it."""

    ragged: bool
    seqs: int
    tokens: int
    max_seqlen_q: int
    max_seqlen_k: int


def batches_up_to(
    max_seqs: int, max_tokens: int, max_seqlen: int, bucket: int = 1, decode: int = 1
) -> Iterator[Lengths]:
    """Batches of every kind: decodes, speculation, prefills and mixtures, with few keys and with many.

    bucket: bounds on keys are multiples of this, or max_seqlen.  decode: query tokens of a sequence in a decode.
    """
    bounds = sorted({min(-(-keys // bucket) * bucket, max_seqlen) for keys in spread(max_seqlen)})
    for seqs, keys in itertools.product(spread(max_seqs, past=max_seqs), bounds):
        yield Lengths(False, seqs, seqs, 1, keys)
        # With one sequence, plans depend on how full its blocks make the last round of programs.  From 3 to 3.2 rounds
        # are only 7% more tokens, so 16 sizes are tried from one power of two to the next.
        fine = spread(max_tokens, steps=16) if seqs == 1 else []
        for longest in {*spread(max_tokens, past=64), max(1, max_tokens // seqs), min(decode, max_tokens), *fine}:
            least, most = longest + seqs - 1, min(seqs * longest, max_tokens)
            between = int((least * most) ** 0.5)
            for tokens in {longest, least, between, most}:
                if longest <= tokens <= max_tokens:
                    yield Lengths(True, seqs, tokens, longest, keys)


def distinct(model: Model, batches: Iterable[Lengths], device: Device) -> list[Lengths]:
    """Return the batches that need a kernel which no earlier batch needs."""
    needed: set[Any] = set()
    chosen = []
    for batch in batches:
        variants = variants_of(model, batch, device)
        if not variants <= needed:
            needed |= variants
            chosen.append(batch)
    return chosen


def variants_of(model: Model, batch: Lengths, device: Device) -> set[Any]:
    """Return what identifies each kernel in a batch's plan: equal keys mean equal kernels, for one model and device."""
    from ..planning import planner  # needs Triton

    made = planner.plan.__wrapped__(problem_of(model, batch, device))
    return {
        tuple((x.dialect, *dialect(x.dialect).compiled(x), x.merge and x.merge[1:]) for x in launch.parts)
        for launch in made.launches
    } | ({("copies", made.copies.most < made.copies.seqs)} if made.copies is not None else set())


def problem_of(model: Model, batch: Lengths, device: Device, **options: Any) -> Problem:
    """The planner's Problem for a batch.  options: arguments of calls that are no fields of a model."""
    keys = key_bounds_of(model).most_own(batch.max_seqlen_k)
    return _problem_of(model, device, **options).of_batch(*batch._replace(max_seqlen_k=keys))


@functools.lru_cache(maxsize=64)
def _problem_of(model: Model, device: Device, **options: Any) -> Problem:
    """The planner's Problem for an example: decodes of two sequences."""
    from ..records import problem

    example = call_of(model, Lengths(False, 2, 2, 1, 1)) | options
    return problem.problem_of(*bound(example), device, interpreted=False)


def call_of(model: Model, batch: Lengths) -> dict[str, Any]:
    """Arguments of paged_attention for a batch: tensors on the CPU whose memory is never written or read."""
    k_cache, v_cache, of_slots = caches(model, 2 if model.page_stride else 1)
    kv_heads, head_dim = model.kv_heads, model.head_dim
    call: dict[str, Any] = dict(
        q=torch.empty(batch.tokens, model.heads, head_dim, dtype=model.dtype),
        k_cache=k_cache,
        v_cache=v_cache,
        page_table=_page_table(model, batch),
        seq_lens=torch.empty(batch.seqs, dtype=model.integers),
        max_seqlen_q=batch.max_seqlen_q,
        max_seqlen_k=batch.max_seqlen_k,
        kv_layout="NHD" if model.kv_layout == "x" else model.kv_layout,
        **{x.name: getattr(model, x.name) for x in OF_MODELS},
        out=torch.empty(batch.tokens, model.heads, model.value_width, dtype=model.out_dtype),
        check=False,
    )
    if batch.ragged:
        call["cu_seqlens_q"] = torch.empty(batch.seqs + 1, dtype=model.integers)
    if model.new:
        call["k_new"], call["v_new"] = new_rows(model, batch.tokens)
    call |= _by_rows(model, batch)
    if model.score_mod is not None:
        call["score_mod"], call["score_mod_args"] = model.score_mod.function, model.score_mod.score_mod_args()
    shape = {"number": None, "per_head": (kv_heads,), "per_seq": (batch.seqs, kv_heads)}.get(model.scales, (1,))
    scale = 1.0 if shape is None else torch.empty(shape)
    for name, dtype in dict(q=model.dtype, k=model.cache_dtype, v=model.cache_dtype, out=model.out_dtype).items():
        if is_scaled(dtype):
            one = name == "out" and model.scales != "number"
            call[f"{name}_scale"] = torch.empty(1) if one else of_slots.get(name, scale)
    if model.token_scales:
        call["q_scale"] = torch.empty(batch.tokens, 1)
    return call


def _by_rows(model: Model, batch: Lengths) -> dict[str, torch.Tensor]:
    """Tensors that fields of the model ask for: a field is True, a dtype, or the size of an axis."""
    sizes = dict(seqs=batch.seqs, tokens=batch.tokens, heads=model.heads, value_dim=model.value_width) | {"2": 2}
    dtypes = dict(integer=model.integers, bool=torch.bool, float32=torch.float32, int32=torch.int32)
    found = {}
    for x in BY_ROWS:
        told = getattr(model, x.model[0])
        if told:
            dtype = told if isinstance(told, torch.dtype) else dtypes.get(x.dtypes, model.dtype)
            found[WITHIN.get(x.name, x.name)] = torch.empty([sizes.get(axis, told) for axis in x.axes], dtype=dtype)
    return found


def _page_table(model: Model, batch: Lengths) -> Any:
    pages = -(-batch.max_seqlen_k // model.page_size)
    if model.page_indices is None:
        return torch.empty(batch.seqs, pages, dtype=model.integers)
    return torch.empty(batch.seqs + 1, dtype=model.integers), torch.empty(batch.seqs * pages, dtype=model.page_indices)


def caches(model: Model, pages: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """(k_cache, v_cache, scales by token as {"k": ..., "v": ...}), not filled; {} if the model has no such scales."""
    page, kv_heads, dim, value_dim = model.page_size, model.kv_heads, model.head_dim, model.value_width
    if model.cache_dtype == INT4:
        dim, value_dim = dim // 2, value_dim // 2
    if model.kv_layout == "x":
        x = 16 // model.cache_dtype.itemsize
        shapes: tuple[tuple[int, ...], ...] = ((kv_heads, dim // x, page, x), (kv_heads, value_dim, page))
    else:
        slots = (page, kv_heads) if model.kv_layout == "NHD" else (kv_heads, page)
        shapes = ((*slots, dim), (*slots, value_dim))
    if model.side_by_side:
        tail = 0 if model.slot_scale is None else model.slot_scale.itemsize
        parts = (dim, tail, value_dim, tail)
        both = torch.empty(pages, *shapes[0][:-1], sum(parts), dtype=model.cache_dtype)
        k, k_tail, v, v_tail = both.split(parts, -1)
        if model.slot_scale is None:
            return k, v, {}
        return k, v, {name: x.view(model.slot_scale)[..., 0] for name, x in (("k", k_tail), ("v", v_tail))}
    k, v = (_pages(model, pages, shape) for shape in shapes)
    scales = {}
    if model.slot_scale is not None:
        by_slot = (pages, page, kv_heads) if model.kv_layout == "NHD" else (pages, kv_heads, page)
        scales = {name: torch.empty(by_slot, dtype=model.slot_scale) for name in "kv"}
    return k, k[..., :value_dim] if model.latent else v, scales


def _pages(model: Model, pages: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Pages [pages, *shape], page_stride slots apart, not filled."""
    like = torch.empty(shape, dtype=model.cache_dtype, device="meta")
    stride = like.numel() // model.page_size * (model.page_stride or model.page_size)
    return torch.empty_strided((pages, *shape), (stride, *like.stride()), dtype=model.cache_dtype)


def new_rows(model: Model, tokens: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys and values outside the cache, not filled.  Latent values are part of the keys, so they are None."""
    k, v = (torch.empty(tokens, model.kv_heads, n, dtype=new_dtype(model)) for n in (model.head_dim, model.value_width))
    return k, None if model.latent else v


def new_dtype(model: Model) -> torch.dtype:
    """Dtype of keys and values outside the cache: the first of the model's dtypes of 16 bits or more, or bfloat16."""
    wide = [x for x in (model.dtype, model.cache_dtype, model.out_dtype) if not is_scaled(x)]
    return wide[0] if wide else torch.bfloat16


def spread(most: int, past: int = 0, steps: int = 2) -> list[int]:
    """Sizes 1, 2, 3, 4, 6, 8, 12 ... most, ascending: powers of two, and sizes between them, where plans may change.

    past: the neighbours of powers up to this number, power - 1 and power + 1, are sizes, too.  steps: number of sizes
    from one power to the next.
    """
    powers = [1 << power for power in range(most.bit_length())]
    sizes = {size for power in powers if power <= past for size in (power - 1, power + 1) if size > 0}
    sizes |= {power * (steps + step) // steps for power in powers for step in range(steps)}
    return sorted({size for size in sizes if size < most} | {most})
