"""One description of a call, and its random inputs: shared by the tests, the benchmarks and the GPU scripts.

`build(case)` makes the keyword arguments of `paged_attn.paged_attention`.  Everything that the call must not read is
poison: NaN in dead slots, free pages, padding tokens and `out`; page id 2^31 - 1 in table tails and left of windows.
`run(case)` calls the library and the reference and compares the results.  case_tensors.py, comparing.py and formats.py
do the work; this module exports the names that tests import from them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, make_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paged_attn.arguments import ARGUMENTS, OPTION
from tests.support.case_tensors import (
    BAD_PAGE,
    SCALES,
    caches_of,
    gate_of,
    mask_of,
    nans,
    new_of,
    numbers,
    poisoned,
    positions_of,
    ragged,
    scales_of,
    slopes_of,
    spans_of,
    token_scales_of,
    windows_of,
)
from tests.support.comparing import (
    FP8_NORM,
    LINE_NORM,
    LSE_TOLERANCES,
    TOLERANCES,
    asked_tokens,
    bound_of,
    compare,
    mod_of,
    problem_of,
    rounds_weights,
    worst_share,
)
from tests.support.formats import E4M3, E5M2, INT4, INT8, bits, is_fp8, is_scaled, widest
from tests.support.torch_ways import IN_TORCH

__all__ = [
    "BAD_PAGE",
    "E4M3",
    "E5M2",
    "FP8_NORM",
    "INT4",
    "INT8",
    "LINE_NORM",
    "LSE_TOLERANCES",
    "TOLERANCES",
    "Case",
    "asked_tokens",
    "bits",
    "bound_of",
    "build",
    "compare",
    "is_fp8",
    "is_scaled",
    "poison_scratch",
    "problem_of",
    "rounds_weights",
    "run",
    "spans_of",
    "widest",
    "worst_share",
]


@dataclass(frozen=True)
class _Written:
    """One call: ragged lengths (one entry per sequence), sizes, where the keys live, and which features are on."""

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 32
    value_dim: int | None = None  # dims of values and results; None: head_dim
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None  # None: dtype
    new_dtype: torch.dtype | None = None  # of k_new, v_new; None: `widest` of dtype and cache_dtype
    out_dtype: torch.dtype | None = None  # None: dtype, or bfloat16 beside an fp8 query
    layout: str = "NHD"  # "NHD" | "HND" | "x" (packed)
    x: int | None = None  # elements of the innermost axis of an x-packed K cache; None: 16 bytes of them, at most
    shared_buffer: bool = False  # K and V are views of one buffer
    latent: bool = False  # V is the first value_dim dims of K, and v_new is None
    run: int = 1  # pages of a run, which lie side by side in the cache; runs are in random order
    pages: int = 0  # least number of pages of the cache, live pages last; 0: a few free pages among the live ones
    new: bool = False  # the call's own keys and values come from k_new, v_new, and the cache does not hold them
    causal: bool = True
    causal_by_seq: bool = False  # causal is a tensor: `causal` for sequences 0, 2, ..., its opposite for the others
    window_size: tuple[int, int] = (-1, -1)
    head_windows: tuple[tuple[int, int], ...] = ()  # window_size is a tensor: heads have these windows in turn
    spans: int = 0  # maximum number of a sequence's spans (`spans_of`), which an empty one follows
    clip_spans: bool = False
    chunk: int | None = None
    prefix: int = 0  # prefix_lens are in turn: this, three times this, 0, 1, more than seq_len; 0: none
    softmax_scale: float | None = None
    softcap: float = 0.0
    alibi: bool = False
    alibi_symmetric: bool = False
    slopes_of_seqs: bool = False  # alibi_slopes are [seqs, heads]
    sinks: bool = False
    qq_bias: int = 0  # n of the [n, n] matrix; 0: none
    bias_of_seqs: bool = False  # qq_bias is [seqs, n, n]
    qq_mask: int = 0  # words of a query's mask (`mask_of`); 0: none
    tree: bool = False  # about half of qq_bias is -inf, as in tree decoding
    positions: str = ""  # query_positions: "slots" | "tree": depths in trees that qq_bias does not know; "": none
    score_mod: str = ""  # one of tests.support.score_mods.MODS
    gate: bool = False
    token_scales: bool = False  # q_scale is by token; with fp8 queries scaled by head, by token and KV head
    scales: str = "none"  # of fp8, int8 and int4 tensors: "none" (the default) | "float" | one of SCALES
    out_scale: float = 0.02  # used if `out` is fp8
    padding: int = 0  # tokens past cu_seqlens_q[-1]
    only: str | None = None
    batch_invariant: bool = False
    decode_form: bool = False  # cu_seqlens_q=None
    strided: bool = False  # q, k_new, v_new, out and page_table are slices of wider tensors
    integers: torch.dtype = torch.int32  # of page_table, seq_lens and cu_seqlens_q
    table: str = ""  # "": dense | "ragged" | "gaps": spare entries behind ragged rows | "views" of wider tensors
    bounds: bool = False  # pass max_seqlen_q and max_seqlen_k
    shard: tuple[int, int, int] | None = None  # the caches hold the keys of one rank
    slack: int = 0  # excess of max_seqlen_q and max_seqlen_k over the longest
    own_out: bool = False  # the call allocates its result, of q's dtype
    check: bool = False  # the checked call
    lse: bool = True  # ask for log-sum-exps
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    def __post_init__(self) -> None:
        if len(self.query_lens) != len(self.seq_lens) or self.heads % self.kv_heads:
            raise ValueError(f"{self.name}: lengths must pair up, and heads must be a multiple of kv_heads")
        if self.decode_form and (self.padding or set(self.query_lens) != {1}):
            raise ValueError(f"{self.name}: cu_seqlens_q=None means one query token per sequence and no padding")
        if self.own_out and (self.only or self.dtype_of_out != self.dtype):
            raise ValueError(f"{self.name}: `out` of the call's own is of q's type, and holds anything in other rows")
        if self.latent and (self.layout == "x" or self.value_width > self.head_dim):
            raise ValueError(f"{self.name}: values cannot lie in these keys")

    @property
    def context_lens(self) -> tuple[int, ...]:
        return tuple(seq - query for seq, query in zip(self.seq_lens, self.query_lens, strict=True))

    @property
    def windows(self) -> tuple[tuple[int, int], ...]:
        """The window of each head."""
        given = self.head_windows or (self.window_size,)
        return tuple([given[head % len(given)] for head in range(self.heads)])

    @property
    def value_width(self) -> int:
        return self.value_dim or self.head_dim

    @property
    def prefix_lens(self) -> tuple[int, ...]:
        if not self.prefix:
            return (0,) * len(self.seq_lens)
        return tuple([(self.prefix, 3 * self.prefix, 0, 1, n + 7)[i % 5] for i, n in enumerate(self.seq_lens)])

    @property
    def tokens(self) -> int:
        return sum(self.query_lens) + self.padding

    @property
    def dtype_of_cache(self) -> torch.dtype:
        return self.cache_dtype or self.dtype

    @property
    def dtype_of_new(self) -> torch.dtype:
        return self.new_dtype or widest(self.dtype, self.dtype_of_cache)

    @property
    def dtype_of_out(self) -> torch.dtype:
        return self.out_dtype or (torch.bfloat16 if is_fp8(self.dtype) else self.dtype)


if TYPE_CHECKING:
    Case = _Written
else:
    # A row of the table that reaches kernels as a modifier needs no field above.
    _OTHERS = [x for x in ARGUMENTS if x.kind == OPTION and x.mods and not hasattr(_Written, x.name)]
    Case = make_dataclass("Case", [(x.name, Any, x.default) for x in _OTHERS], bases=(_Written,), frozen=True)
    Case.__module__ = __name__

# Options of a call that a case has as fields with the same values.
OPTIONS = [x.name for x in ARGUMENTS if x.kind == OPTION and x.name != "score_mod" and hasattr(Case, x.name)]


def build(case: Case, device: str = "cpu", filled: bool = True) -> dict[str, Any]:
    """Return the keyword arguments of `paged_attention` for a case; the same case and device give the same numbers.

    filled: False if kernels are only compiled.  Then the memory of the caches is never touched, and costs nothing.
    """
    rng = torch.Generator(device).manual_seed(case.seed)
    scales = scales_of(case, rng)
    table, k_cache, v_cache = caches_of(case, scales, rng, filled)
    slots_q = case.heads + case.strided * 2 * case.kv_heads
    q = numbers((case.tokens, slots_q, case.head_dim), case.dtype, rng, scales.get("q_scale"))[:, : case.heads]
    real = sum(case.query_lens)
    bits(q)[real:] = bits(nans((1,), case.dtype, device))
    pages: Any = table if not case.table else ragged(case, table)
    inputs: dict[str, Any] = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "page_table": pages}
    inputs["seq_lens"] = torch.tensor(case.seq_lens, dtype=case.integers, device=device)
    if not case.decode_form:
        starts = torch.tensor((0, *case.query_lens)).cumsum(0)
        inputs["cu_seqlens_q"] = starts.to(device, case.integers)
    if case.new:
        inputs["k_new"], inputs["v_new"] = new_of(case, rng)

    inputs["kv_layout"] = "HND" if case.layout == "HND" else "NHD"
    inputs.update({name: getattr(case, name) for name in OPTIONS})
    if case.causal_by_seq:
        every_other = [case.causal == (seq % 2 == 0) for seq in range(len(case.query_lens))]
        inputs["causal"] = torch.tensor(every_other, dtype=torch.bool, device=device)
    if case.head_windows:
        inputs["window_size"] = windows_of(case, device)
    if case.spans:
        inputs["spans"] = torch.tensor(spans_of(case), dtype=case.integers, device=device)
    if case.prefix:
        inputs["prefix_lens"] = torch.tensor(case.prefix_lens, dtype=case.integers, device=device)
    inputs["return_lse"] = case.lse
    for name, scale in scales.items():
        of_all = name == "out_scale" or not isinstance(scale, Tensor)
        if case.scales.startswith("per_seq") and not of_all:
            scale = poisoned(case, scale)
        inputs[name] = scale if of_all else SCALES[case.scales](scale, len(case.seq_lens))
    if case.bounds:
        longest = max(case.query_lens, default=0), max(0, *case.seq_lens)
        inputs.update(max_seqlen_q=longest[0] + case.slack, max_seqlen_k=longest[1] + case.slack)
    if case.check:
        inputs["check"] = True
    small = torch.float32 if is_fp8(case.dtype) else case.dtype
    if case.alibi:
        inputs["alibi_slopes"] = slopes_of(case).to(device)
    if case.sinks:
        inputs["sinks"] = numbers((case.heads,), small, rng)
    if case.qq_bias:
        n = case.qq_bias
        bias = numbers((len(case.seq_lens), n, n) if case.bias_of_seqs else (n, n), small, rng)
        if case.tree:
            pruned = torch.rand(bias.shape, generator=rng, device=device) < 0.5
            bias = bias.masked_fill(pruned & ~torch.eye(n, dtype=torch.bool, device=device), -torch.inf)
        inputs["qq_bias"] = bias
    if case.qq_mask:
        inputs["qq_mask"] = mask_of(case, rng)
    if case.positions:
        inputs["query_positions"] = positions_of(case).to(device)
    if case.token_scales:
        inputs["q_scale"] = token_scales_of(case, inputs.get("q_scale", 1.0), rng)
    if case.gate:
        inputs["gate"] = gate_of(case, small, rng)
    if case.score_mod:
        mod = mod_of(case)
        in_torch = IN_TORCH and case.seed % 8  # a Triton function is interpreted, a hundred times slower
        inputs.update(score_mod=mod.torch if in_torch else mod.triton, score_mod_args=mod.args(case.heads, device))
    out_shape = (case.tokens, case.heads + case.strided, case.value_width)
    inputs["out"] = None if case.own_out else nans(out_shape, case.dtype_of_out, device)[:, : case.heads]
    return inputs


def run(case: Case, device: str = "cpu", on: str | None = None, **changes: Any) -> float:
    """Call the library and the reference on one case and compare; return the worst error as a share of its bound.

    on: the device on which the reference is computed; None: `device`.
    """
    import paged_attn

    inputs = {**build(case, device), **changes}
    poison_scratch()
    result = paged_attn.paged_attention(**inputs)
    out, lse = result if inputs["return_lse"] else (result, None)
    assert case.own_out or out.data_ptr() == inputs["out"].data_ptr(), f"{case.name}: the result is not in `out`"
    return compare(case, out, lse, inputs, on=on)


def poison_scratch() -> None:
    """Fill the states in scratch with NaN, because nothing that earlier calls have left there may reach a result."""
    from paged_attn.launching import scratch

    for room in scratch._rooms.values():
        if room.states is not None:
            room.states.fill_(math.nan)
