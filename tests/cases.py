"""One description of a call, and its random inputs: shared by the tests, the benchmarks and the GPU scripts.

`build(case)` makes the keyword arguments of `paged_attn.paged_attention`.  Everything that the call must not read is
poison: NaN in dead slots, free pages, padding tokens and `out`; page id 2^31 - 1 in table tails and left of windows.
`run(case)` calls the library and the reference and compares.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paged_attn.arguments import ARGUMENTS, OPTION

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BAD_PAGE = 2**31 - 1

# dtype: (compute, store).  The bound of an element is  compute * sum_j p_j |v_j|  +  store * |out|:
#   compute: rounding the weights p_j to the dtype of the dot, relative to the sum of the weighted magnitudes;
#   store: rounding the result to the dtype of `out`.
# An absolute tolerance is vacuous for long sequences, whose outputs shrink like 1 / sqrt(keys); this one shrinks too.
TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float32: (2e-5, 1e-6),  # sums of thousands of products, exp2 of scores up to 60
    torch.float16: (2**-10, 2**-11),  # 11 bits: half an ulp is 2^-11; twice that for p and the sum being rounded apart
    torch.bfloat16: (2**-7, 2**-7),  # 8 bits: half an ulp is 2^-8; a store in the interpreter truncates, a whole ulp
    E4M3: (2**-7, 2**-4),  # 4 bits: half an ulp is 2^-4; fp8 operands are exact in bfloat16, which bounds the dot
    E5M2: (2**-7, 2**-3),  # 3 bits: half an ulp is 2^-3
}
# Where queries and keys are fp8, Hopper's prefill rounds the weights to e4m3 as well: half an ulp is 2^-4.
FP8_WEIGHTS = 2**-4 + 2**-7
# Without log-sum-exps these come from a line through each octave: -8.0% to +6.5% with the rounding, of their sum as
# well: 7.3% of the magnitudes of values that are equally large, 8.0% beside a sink, which is exact.  No proof for any
# values: sum_j p_j e_j (v_j - out) / (1 + e) is at most 8.7% of the magnitudes and the result together.
LINE_WEIGHTS = 0.073 + 2**-7
# That much is relative to a weight, and holds above its type's smallest normal number.  Below, a weight is rounded to a
# multiple of the smallest subnormal: in float16 by up to 2^-25; in e4m3, where the largest weight is 2^5, by 2^-10 of
# that: 2^-15.  Row maxima have a weight of 1, so that no sum of weights is less, and a result is off by that much of
# sum_j |v_j|.  It shows where values of larger weights are zero.  bfloat16 and float32 end far below what sums keep.
WEIGHTS_END, FP8_WEIGHTS_END = {torch.float16: 2.0**-25}, 2.0**-15
# Of many results the errors' norm as a share of the results' (root mean squares of one weight: 2.7%, 3.1%): a tile that
# is lost, or a sum that is off, hides in bounds of single elements.
FP8_NORM, LINE_NORM, FP8_OUT_NORM = 0.035, 0.04, 0.03
MANY = 1 << 16
# Scales that are tensors: of one number, or one for each KV head; the shape [seqs, kv_heads] is theirs expanded.
SCALES = {
    "tensor": lambda x, seqs: x,
    "scalar": lambda x, seqs: x[0],
    "per_head": lambda x, seqs: x,
    "per_head, a row": lambda x, seqs: x[None],
    "per_head, expanded": lambda x, seqs: x.expand(seqs, -1),
}
# By dtype of q, relative to 1 + |lse|.  Products of inputs are exact and their sums float32, but fp8 tensor cores keep
# about 14 bits of a sum.
LSE_TOLERANCES: dict[torch.dtype, float] = {
    torch.float32: 2e-5,
    torch.float16: 1e-4,
    torch.bfloat16: 1e-4,
    E4M3: 2e-3,
    E5M2: 2e-3,
}


@dataclass(frozen=True)
class Case:
    """One call: ragged lengths (one entry per sequence), sizes, where the keys live, and which features are on."""

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 32
    value_dim: int | None = None  # of values and results; None: head_dim
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None  # None: dtype
    new_dtype: torch.dtype | None = None  # of k_new, v_new; None: the widest of dtype, cache_dtype, or bfloat16
    out_dtype: torch.dtype | None = None  # None: dtype, or bfloat16 beside an fp8 query
    layout: str = "NHD"  # "NHD" | "HND" | "x" (packed)
    x: int | None = None  # elements of the innermost axis of a packed K cache; None: 16 bytes of them
    shared_buffer: bool = False  # K and V are views of one buffer
    latent: bool = False  # V is the first value_dim dims of K, and v_new is None
    run: int = 1  # pages that lie side by side in the cache; then a run anywhere
    pages: int = 0  # at least so many pages in the cache, the live ones last; 0: a few free pages, mixed in
    new: bool = False  # the call's own keys and values come from k_new, v_new, and the cache does not hold them
    causal: bool = True
    causal_by_seq: bool = False  # causal is a tensor: every other sequence is as `causal` says, from the first on
    window_size: tuple[int, int] = (-1, -1)
    spans: int = 0  # so many of each sequence at most (`spans_of`), and one that is none
    clip_spans: bool = False
    chunk: int | None = None
    prefix: int = 0  # prefix_lens are this, three times it, none, one and more than there are, in turn
    softmax_scale: float | None = None
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    qq_bias: int = 0  # n of the [n, n] matrix; 0: off
    bias_of_seqs: bool = False  # qq_bias is a matrix of each sequence
    qq_mask: int = 0  # words of a mask in which about half of the bits are set, beside that of a query itself
    tree: bool = False  # about half of qq_bias is -inf, as in tree decoding
    positions: str = ""  # of queries: "slots" | "tree", depths in random trees unknown to qq_bias; "": none
    score_mod: str = ""  # one of tests.score_mods.MODS
    gate: bool = False
    token_scales: bool = False  # q_scale is one of each token, of fp8 queries that are scaled by head of each head
    scales: str = "none"  # of fp8 tensors: "none" (1.0) | "float" | one of SCALES
    out_scale: float = 0.02  # used where out is fp8
    padding: int = 0  # tokens past cu_seqlens_q[-1]
    only: str | None = None
    batch_invariant: bool = False
    decode_form: bool = False  # cu_seqlens_q=None
    strided: bool = False  # q, k_new, v_new, out and page_table are slices of wider tensors
    integers: torch.dtype = torch.int32  # of page_table, seq_lens and cu_seqlens_q
    table: str = ""  # of pages: "ragged" | "gaps", spare entries behind rows | "views" of wider tensors; "": dense
    bounds: bool = False  # pass max_seqlen_q and max_seqlen_k
    slack: int = 0  # by how much these are above what is there
    own_out: bool = False  # the call makes `out`, of q's type
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


# Options of a call that a case has as they are.
OPTIONS = [x.name for x in ARGUMENTS if x.kind == OPTION and x.name != "score_mod" and hasattr(Case, x.name)]


def is_fp8(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 1


def widest(query: torch.dtype, cache: torch.dtype) -> torch.dtype:
    """The first of the two that is not fp8, else bfloat16: the type of k_new, and of P in P V."""
    return next((dtype for dtype in (query, cache) if not is_fp8(dtype)), torch.bfloat16)


def build(case: Case, device: str = "cpu", filled: bool = True) -> dict[str, Any]:
    """The keyword arguments of `paged_attention` for a case; the same case and device give the same numbers.

    filled: False where kernels are only compiled: memory of the caches is never touched, and costs nothing.
    """
    rng = torch.Generator(device).manual_seed(case.seed)
    scales = _scales(case, rng)
    table, k_cache, v_cache = _cache(case, scales, rng, filled)
    slots_q = case.heads + case.strided * 2 * case.kv_heads
    q = _random((case.tokens, slots_q, case.head_dim), case.dtype, rng, scales.get("q_scale"))[:, : case.heads]
    real = sum(case.query_lens)
    bits(q)[real:] = bits(_nans((1,), case.dtype, device))
    pages: Any = table if not case.table else _ragged(case, table)
    inputs: dict[str, Any] = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "page_table": pages}
    inputs["seq_lens"] = torch.tensor(case.seq_lens, dtype=case.integers, device=device)
    if not case.decode_form:
        starts = torch.tensor((0, *case.query_lens)).cumsum(0)
        inputs["cu_seqlens_q"] = starts.to(device, case.integers)
    if case.new:
        inputs["k_new"], inputs["v_new"] = _new(case, rng)

    inputs["kv_layout"] = "HND" if case.layout == "HND" else "NHD"
    inputs.update({name: getattr(case, name) for name in OPTIONS})
    if case.causal_by_seq:
        every_other = [case.causal == (seq % 2 == 0) for seq in range(len(case.query_lens))]
        inputs["causal"] = torch.tensor(every_other, dtype=torch.bool, device=device)
    if case.spans:
        inputs["spans"] = torch.tensor(spans_of(case), dtype=case.integers, device=device)
    if case.prefix:
        inputs["prefix_lens"] = torch.tensor(case.prefix_lens, dtype=case.integers, device=device)
    inputs["return_lse"] = case.lse
    for name, scale in scales.items():
        of_all = name == "out_scale" or not isinstance(scale, Tensor)
        inputs[name] = scale if of_all else SCALES[case.scales](scale, len(case.seq_lens))
    if case.bounds:
        longest = max(case.query_lens, default=0), max(0, *case.seq_lens)
        inputs.update(max_seqlen_q=longest[0] + case.slack, max_seqlen_k=longest[1] + case.slack)
    if case.check:
        inputs["check"] = True
    small = torch.float32 if is_fp8(case.dtype) else case.dtype
    if case.alibi:
        slopes = 2.0 ** -(8.0 * torch.arange(1, case.heads + 1) / case.heads)
        inputs["alibi_slopes"] = slopes.to(device, torch.float32)
    if case.sinks:
        inputs["sinks"] = _random((case.heads,), small, rng)
    if case.qq_bias:
        n = case.qq_bias
        bias = _random((len(case.seq_lens), n, n) if case.bias_of_seqs else (n, n), small, rng)
        if case.tree:
            pruned = torch.rand(bias.shape, generator=rng, device=device) < 0.5
            bias = bias.masked_fill(pruned & ~torch.eye(n, dtype=torch.bool, device=device), -torch.inf)
        inputs["qq_bias"] = bias
    if case.qq_mask:
        inputs["qq_mask"] = _bits(case, rng)
    if case.positions:
        inputs["query_positions"] = _positions(case).to(device)
    if case.token_scales:
        inputs["q_scale"] = _token_scales(case, inputs.get("q_scale", 1.0), rng)
    if case.gate:
        inputs["gate"] = _gate(case, small, rng)
    if case.score_mod:
        mod = _mod(case)
        inputs.update(score_mod=mod.triton, score_mod_args=mod.args(case.heads, device))
    out_shape = (case.tokens, case.heads + case.strided, case.value_width)
    inputs["out"] = None if case.own_out else _nans(out_shape, case.dtype_of_out, device)[:, : case.heads]
    return inputs


def run(case: Case, device: str = "cpu", on: str | None = None, **changes: Any) -> float:
    """Call the library and the reference on one case and compare; returns the worst error as a share of its bound.

    on: where the reference is computed, if not there as well.
    """
    import paged_attn

    inputs = {**build(case, device), **changes}
    poison_scratch()
    result = paged_attn.paged_attention(**inputs)
    out, lse = result if inputs["return_lse"] else (result, None)
    assert case.own_out or out.data_ptr() == inputs["out"].data_ptr(), f"{case.name}: the result is not in `out`"
    return compare(case, out, lse, inputs, on=on)


def spans_of(case: Case) -> list[list[list[int]]]:
    """[seqs, spans + 1, 2]: one across the first query, one at the end or past it, others anywhere, and one of none.

    None of them meets another, as no two images do.
    """
    rng = random.Random(case.seed)
    found = []
    for context, seq_len in zip(case.context_lens, case.seq_lens, strict=True):
        borders = {rng.randint(0, max(0, context)), max(0, context) + rng.randint(0, 40)}
        borders |= {rng.randint(0, max(0, seq_len)) for _ in range(2 * case.spans)}
        at = sorted(borders | {seq_len + rng.choice([0, 9])})[: 2 * case.spans]
        ranges = [list(pair) for pair in zip(at[::2], at[1::2])]
        ranges += [[-1, -1]] * (case.spans + 1 - len(ranges))
        rng.shuffle(ranges)
        found.append(ranges)
    return found


def poison_scratch() -> None:
    """Nothing that earlier calls have left in the memory between programs may reach a result."""
    from paged_attn.launching import scratch

    for room in scratch._rooms.values():
        if room.states is not None:
            room.states.fill_(math.nan)


def compare(
    case: Case, out: Tensor, lse: Tensor | None, inputs: dict[str, Any], more: float = 0.0, on: str | None = None
) -> float:
    """Assert that out and lse are right for these inputs: close, 0 where nothing was seen, untouched where not asked.

    more: by how much weights may be off beside their rounding.  on: where to compute, if not where the tensors are.
    Returns the worst error as a share of its bound.
    """
    from paged_attn import reference

    problem = problem_of(inputs)
    of_e4m3 = case.dtype == case.dtype_of_cache == E4M3 and rounds_weights(problem)
    if on is not None:
        inputs = {name: _moved(x, on) for name, x in inputs.items()}
        out, lse = out.to(on), lse if lse is None else lse.to(on)
    if case.score_mod:
        inputs = {**inputs, "score_mod": _mod(case).torch}
    given = {**inputs, "out": None, "return_lse": True}
    both, want_lse = reference.paged_attention(**_with_magnitudes(given))
    want, weighted = both.chunk(2, dim=2)
    if is_fp8(out.dtype):
        want = want.clamp(-torch.finfo(out.dtype).max, torch.finfo(out.dtype).max)

    asked = asked_tokens(case).to(out.device)
    got = out.double()
    assert got[~asked].isnan().all(), f"{case.name}: rows that `only` leaves out were written"

    dot = widest(case.dtype, case.dtype_of_cache)
    compute = TOLERANCES[dot][0]
    if of_e4m3:
        compute = LINE_WEIGHTS if lse is None else FP8_WEIGHTS
        if asked.sum() * want[0].numel() >= MANY:
            norm = math.hypot(LINE_NORM if lse is None else FP8_NORM, FP8_OUT_NORM * is_fp8(out.dtype))
            off = float((got - want)[asked].norm() / want[asked].norm())
            assert off <= norm, f"{case.name}: results are {off:.3f} off in all, at most {norm:.3f} expected"
    bound = bound_of(want, weighted, compute + 2 * more, out.dtype)  # a weight and the sum of all
    least = FP8_WEIGHTS_END if of_e4m3 else WEIGHTS_END.get(problem.compute, 0.0)
    if least and not ((got - want).abs() <= bound)[asked].all():
        bound = bound + least * _sums_of_magnitudes(given)
    worst = worst_share(f"{case.name}: out", got, want, bound, asked)
    if lse is None:
        return worst
    assert (lse.dtype, lse.shape) == (torch.float32, want_lse.shape), f"{case.name}: lse is {lse.dtype} {lse.shape}"
    lse_bound = LSE_TOLERANCES[case.dtype] * (1 + want_lse.abs())
    return max(worst, worst_share(f"{case.name}: lse", lse.double(), want_lse, lse_bound, asked))


def _with_magnitudes(given: dict[str, Any]) -> dict[str, Any]:
    """A call of the reference whose values are followed by their magnitudes, as further dims: one pass over scores."""
    dims = {"v_cache": 2 if given["k_cache"].dim() == 5 else 3, "v_new": 2}
    if given.get("k_new") is not None and given["v_new"] is None:
        given = given | {"v_new": given["k_new"][..., : given["v_cache"].shape[3]]}
    values = {name: given[name] for name in dims if given.get(name) is not None}
    doubled = {name: torch.cat([bits(v), bits(_magnitude(v))], dims[name]).view(v.dtype) for name, v in values.items()}
    gate = given.get("gate")
    return given | doubled | ({} if gate is None else {"gate": torch.cat([gate, gate], 2)})


def _sums_of_magnitudes(given: dict[str, Any]) -> Tensor:
    """sum_j |v_j| over the keys that each query sees: of equal weights, times their number."""
    from paged_attn import reference

    bias = given.get("qq_bias")
    if bias is not None:
        bias = torch.where(bias == -torch.inf, bias, 0.0)
    mod = given.get("score_mod")
    hides = None if mod is None else lambda *args: torch.where(mod(*args) == -torch.inf, -torch.inf, 0.0)
    equal: dict[str, Any] = dict(
        softmax_scale=0.0, softcap=0.0, alibi_slopes=None, sinks=None, qq_bias=bias, score_mod=hides
    )
    both, log_number = reference.paged_attention(**_with_magnitudes(given | equal))
    return both.chunk(2, dim=2)[1] * log_number.exp()[..., None]


def _mod(case: Case) -> Any:
    from tests.score_mods import MODS  # which imports Triton

    return MODS[case.score_mod]


def _moved(x: Any, device: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(_moved(y, device) for y in x)
    return x.to(device) if isinstance(x, Tensor) else x


def bound_of(want: Tensor, weighted: Tensor, compute: float, out: torch.dtype) -> Tensor:
    """The largest error of each element (TOLERANCES); weighted: the same attention over the magnitudes of values."""
    smallest = torch.finfo(out).smallest_normal * torch.finfo(out).eps
    bound = compute * weighted + TOLERANCES[out][1] * want.abs() + smallest
    return bound.where(weighted != 0, 0.0)  # nothing seen, or only the sink: exactly 0


def problem_of(inputs: dict[str, Any], device: Any = None) -> Any:
    """What the planner is told of a call, on a device that need not be there."""
    from paged_attn.arguments import bound
    from paged_attn.checks import arguments as check
    from paged_attn.launching import backend
    from paged_attn.records import posed

    given, options = bound(inputs)
    check.check_attention(given, options)
    return posed.problem_of(given, options, device or backend.device_of(given.q.device), backend.INTERPRET)


def rounds_weights(problem: Any) -> bool:
    """Whether the kernels of a call multiply fp8 weights."""
    from paged_attn.planning import plan

    return any(x.pipe is not None and x.pipe.FP8_PRODUCTS for x in plan.plan(problem).launches)


def asked_tokens(case: Case) -> Tensor:
    """[tokens] bool: the rows that the call must write; padding counts where `only` is not given."""
    wanted = {None: lambda n: True, "decode": lambda n: n == 1, "prefill": lambda n: n != 1}[case.only]
    per_sequence = torch.tensor([wanted(n) for n in case.query_lens], dtype=torch.bool)
    rows = per_sequence.repeat_interleave(torch.tensor(case.query_lens, dtype=torch.long))
    return torch.cat([rows, torch.full((case.padding,), case.only is None)])


def bits(tensor: Tensor) -> Tensor:
    """An fp8 tensor as its bytes, which every device can index and fill; any other tensor as it is."""
    return tensor.view(torch.uint8) if is_fp8(tensor.dtype) else tensor


def worst_share(what: str, got: Tensor, want: Tensor, bound: Tensor, asked: Tensor) -> float:
    """The largest |got - want| / bound over the asked rows; asserts that it is at most 1."""
    got, want, bound = got[asked], want[asked], bound[asked]
    if got.numel() == 0:
        return 0.0
    error = torch.where(got == want, 0.0, (got - want).abs())  # equal infinities differ by nothing
    share = torch.where(error == 0, 0.0, error / bound).nan_to_num(nan=torch.inf, posinf=torch.inf)
    worst = int(share.argmax())
    where = tuple(int(i) for i in torch.unravel_index(share.argmax(), share.shape))
    token = int(asked.nonzero()[where[0]])
    assert share.flatten()[worst] <= 1, (
        f"{what}{[token, *where[1:]]} is {got[where]:.6g}, want {want[where]:.6g} within {bound[where]:.3g}; "
        f"{int((share > 1).sum())} of {share.numel()} elements are off"
    )
    return float(share.flatten()[worst])


def _magnitude(tensor: Tensor) -> Tensor:
    return (bits(tensor) & 0x7F).view(tensor.dtype) if is_fp8(tensor.dtype) else tensor.abs()


def _random(shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator, scale: Any = None) -> Tensor:
    """Normal numbers / scale, for the call sees stored value * scale."""
    values = torch.randn(shape, generator=rng, device=rng.device)
    if scale is not None:
        values = values / (scale.mean() if isinstance(scale, Tensor) else scale)
    return values.to(dtype)


def _nans(shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> Tensor:
    if is_fp8(dtype):
        return torch.full(shape, 0x7F, dtype=torch.uint8, device=device).view(dtype)
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def _scales(case: Case, rng: torch.Generator) -> dict[str, Any]:
    dtypes = {"q_scale": case.dtype, "k_scale": case.dtype_of_cache, "v_scale": case.dtype_of_cache}
    scales: dict[str, Any] = {name: 1.0 for name, dtype in dtypes.items() if is_fp8(dtype)}
    if case.scales == "float":
        scales = {name: {"q_scale": 0.5, "k_scale": 0.75, "v_scale": 1.25}[name] for name in scales}
    elif case.scales != "none":
        n = case.kv_heads if case.scales.startswith("per_head") else 1
        scales = {name: 0.5 + torch.rand(n, generator=rng, device=rng.device) for name in scales}
    if is_fp8(case.dtype_of_out):
        as_tensor = case.scales in SCALES
        scales["out_scale"] = torch.tensor([case.out_scale], device=rng.device) if as_tensor else case.out_scale
    return scales


def _positions(case: Case) -> Tensor:
    """[tokens] int32: places in the sequence, or of nodes at their depths; poison in padding and where not asked.

    A node's parent is one of the eight before it, or nobody.  Every third sequence is no tree.
    """
    rng = random.Random(case.seed)
    positions = [BAD_PAGE] * case.tokens
    token = 0
    for seq, (context, queries) in enumerate(zip(case.context_lens, case.query_lens, strict=True)):
        depths = list(range(queries))
        if case.positions == "tree" and seq % 3 < 2:
            for i in range(queries):
                parent = rng.randint(max(-1, i - 8), i - 1)
                depths[i] = 0 if parent < 0 else depths[parent] + 1
        if case.only is None or (case.only == "decode") == (queries == 1):
            positions[token : token + queries] = [context + depth for depth in depths]
        token += queries
    return torch.tensor(positions, dtype=torch.int32)


def _bits(case: Case, rng: torch.Generator) -> Tensor:
    """[tokens, words] int32: about half of all, and that of a query itself where it has one."""
    shape, least = (case.tokens, case.qq_mask), -(2**31)
    bits = torch.randint(least, -least, shape, generator=rng, device=rng.device, dtype=torch.int32)
    index = torch.cat([torch.arange(n) for n in (*case.query_lens, case.padding)])
    for token, i in enumerate(index.tolist()):
        if i < 32 * case.qq_mask:
            bits[token, i // 32] |= least if i % 32 == 31 else 1 << i % 32
    wider = torch.randint(least, -least, (case.tokens, case.qq_mask + 1), generator=rng, device=rng.device)
    wider[:, : case.qq_mask] = bits
    return wider.int()[:, : case.qq_mask] if case.strided else bits


def _token_scales(case: Case, scale: Any, rng: torch.Generator) -> Tensor:
    """A temperature of each token, times the scale of fp8 queries; poison in padding, and where a sequence is empty."""
    of_token = 0.5 + torch.rand((case.tokens, 1), generator=rng, device=rng.device)
    seen = [n > 0 for n, queries in zip(case.seq_lens, case.query_lens) for _ in range(queries)]
    of_token[~torch.tensor(seen + [False] * case.padding, dtype=torch.bool)] = torch.nan
    if not is_fp8(case.dtype):
        return of_token if case.strided else of_token.flatten()
    if not isinstance(scale, Tensor):
        return of_token * scale
    return of_token * scale.reshape(-1)[: case.kv_heads]  # of all heads one, or one each


def _gate(case: Case, dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    """[tokens, heads, value_dim] of any size; poison in padding, and where a sequence is empty."""
    heads = case.heads * (1 + case.strided)
    gate = 3 * _random((case.tokens, heads, case.value_width), dtype, rng)[:, : case.heads]
    seen = [n > 0 for n, queries in zip(case.seq_lens, case.query_lens) for _ in range(queries)]
    gate[~torch.tensor(seen + [False] * case.padding, dtype=torch.bool)] = torch.nan
    return gate


def _new(case: Case, rng: torch.Generator) -> tuple[Tensor, Tensor | None]:
    """k_new [tokens, kv_heads, head_dim] and v_new, NaN in padding and before position 0."""
    pos = torch.cat([torch.arange(c, c + n) for c, n in zip(case.context_lens, case.query_lens, strict=True)])
    live = torch.cat([pos >= 0, torch.zeros(case.padding, dtype=torch.bool)]).to(rng.device)
    widest = max(case.head_dim, case.value_width)
    both = _random((case.tokens, 2 * case.kv_heads, widest), case.dtype_of_new, rng)
    bits(both)[~live] = bits(_nans((1,), both.dtype, rng.device))
    k, v = both.split(case.kv_heads, dim=1)
    k, v = k[..., : case.head_dim], v[..., : case.value_width]
    if case.latent:
        return (k if case.strided else k.contiguous()), None
    return (k, v) if case.strided else (k.contiguous(), v.contiguous())


def _cache(case: Case, scales: dict[str, Any], rng: torch.Generator, filled: bool) -> tuple[Tensor, Tensor, Tensor]:
    """page_table [seqs, columns], K and V caches: random keys in live slots, poison elsewhere."""
    page, device = case.page_size, rng.device
    query_lens, contexts = torch.tensor(case.query_lens), torch.tensor(case.context_lens)
    held = (contexts if case.new else torch.tensor(case.seq_lens)).clamp(min=0)  # keys in the cache
    first = (contexts - case.window_size[0]).clamp(min=0) if case.window_size[0] >= 0 else torch.zeros_like(held)
    if case.chunk is not None:
        first = first.maximum(contexts // case.chunk * case.chunk)
    if case.spans and not case.clip_spans:
        for seq, ranges in enumerate(spans_of(case)):
            first[seq] = max(0, min([int(first[seq]), *[a for a, b in ranges if a <= case.context_lens[seq] < b]]))
    first = torch.where(query_lens == 0, held, first)  # nobody asks, so nothing need exist
    columns = torch.arange(int((held + page - 1).max()) // page + 2)  # two columns past the longest
    live = (columns >= first[:, None] // page) & (first < held)[:, None]
    live |= (columns * page < torch.tensor(case.prefix_lens)[:, None]) & (query_lens > 0)[:, None]
    live &= columns * page < held[:, None]
    _, column = live.nonzero(as_tuple=True)
    left = (held[:, None] - columns * page)[live]  # live slots from the start of each live page

    num_live = len(column)
    num_pages = max(num_live + 2 + case.run, case.pages)
    places = num_live if case.pages else num_pages
    order = torch.randperm(places // case.run, generator=torch.Generator().manual_seed(case.seed))
    placed = (order[:, None] * case.run + torch.arange(case.run)).flatten()
    placed = torch.cat([placed, torch.arange(len(placed), places)])
    ids = (placed + (num_pages - num_live) * bool(case.pages))[:num_live]
    table = torch.full((len(held), len(columns) * (2 if case.strided else 1)), BAD_PAGE, dtype=case.integers)
    table[:, : len(columns)][live] = ids.to(case.integers)

    dead = (torch.arange(page) >= left[:, None]).to(device)
    caches = _empty_caches(case, num_pages, device, _nans if filled else _memory)
    named = (("k_scale", case.head_dim), ("v_scale", case.value_width))
    for cache, (name, dim) in list(zip(caches, named))[: filled and 2 - case.latent]:
        keys = torch.randn(num_live, page, case.kv_heads, dim, generator=rng, device=device)
        scale = scales.get(name, 1.0)
        keys = keys / (scale[:, None] if isinstance(scale, Tensor) else scale)
        keys = keys.masked_fill_(dead[:, :, None, None], torch.nan).to(cache.dtype)
        if cache.dim() == 5:  # packed K as [pages, page_size, kv_heads, head_dim // x, x]
            bits(cache).permute(0, 3, 1, 2, 4)[ids.to(device)] = bits(keys).unflatten(-1, (-1, cache.shape[4]))
        else:
            order = {"NHD": (0, 1, 2, 3), "HND": (0, 2, 1, 3), "x": (0, 3, 1, 2)}[case.layout]
            bits(cache).permute(order)[ids.to(device)] = bits(keys)
    return table.to(device)[:, : len(columns)], *caches


def _ragged(case: Case, table: Tensor) -> tuple[Tensor, Tensor]:
    """(indptr, indices) of a page table: poison where its rows have it, and behind the last one."""
    held = torch.tensor(case.context_lens if case.new else case.seq_lens).clamp(min=0)
    counts = [-(-int(keys) // case.page_size) for keys in held]
    rng, nobodys = random.Random(case.seed), torch.full((3,), BAD_PAGE, dtype=table.dtype)
    spare = [rng.randrange(3) * (case.table == "gaps") for _ in counts]
    rows = [
        torch.cat([row[:count], nobodys[:more]]) for row, count, more in zip(table.cpu(), counts, spare, strict=True)
    ]
    indices = torch.cat([*rows, nobodys])
    indptr = torch.tensor([0, *map(len, rows)]).cumsum(0)
    if case.table != "views":
        return indptr.to(table.device, case.integers), indices.to(table.device)
    both = indptr, indices.to(torch.int32 if case.integers == torch.int64 else torch.int64)
    wide = [torch.stack([x, torch.full_like(x, BAD_PAGE)], dim=1).to(table.device) for x in both]
    return wide[0][:, 0], wide[1][:, 0]


def _memory(shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _empty_caches(
    case: Case, num_pages: int, device: Any, made: Callable[..., Tensor] = _nans
) -> tuple[Tensor, Tensor]:
    """K and V caches of the case's layout, all NaN; of a shared buffer every page holds its K and its V."""
    dtype, heads, page = case.dtype_of_cache, case.kv_heads, case.page_size
    dim, value_dim = case.head_dim, case.value_width
    x = case.x or math.gcd(dim, 16 // dtype.itemsize)
    shapes = {
        "NHD": tuple((num_pages, page, heads, n) for n in (dim, value_dim)),
        "HND": tuple((num_pages, heads, page, n) for n in (dim, value_dim)),
        "x": ((num_pages, heads, dim // x, page, x), (num_pages, heads, value_dim, page)),
    }[case.layout]
    if case.latent:
        k = made((*shapes[0][:3], dim + 16 * case.shared_buffer), dtype, device)[..., :dim]  # wider rows if shared
        return k, k[..., :value_dim]
    if not case.shared_buffer:
        return made(shapes[0], dtype, device), made(shapes[1], dtype, device)
    if case.layout == "x":
        buffer = made((num_pages, heads * (dim + value_dim) * page), dtype, device)
        k, v = buffer.split([heads * dim * page, heads * value_dim * page], dim=1)
        return k.unflatten(1, shapes[0][1:]), v.unflatten(1, shapes[1][1:])
    k, v = made((*shapes[0][:3], dim + value_dim), dtype, device).split([dim, value_dim], dim=3)
    return k, v
