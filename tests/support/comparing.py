"""Error bounds of results, and the comparison of a call's results with the reference's."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from tests.support.formats import E4M3, E5M2, INT4, bits, int4_numbers, is_fp8, widest
from tests.support.torch_ways import IN_TORCH

if TYPE_CHECKING:
    from tests.support.cases import Case

# dtype: (compute, store).  The bound of an element is  compute * sum_j p_j |v_j|  +  store * |out|:
#   compute: rounding the weights p_j to the dtype of the dot, relative to the sum of the weighted magnitudes;
#   store: rounding the result to the dtype of `out`.
# An absolute tolerance is vacuous for long sequences, whose outputs shrink like 1 / sqrt(keys); this one shrinks, too.
TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float32: (2e-5, 1e-6),  # sums of thousands of products, exp2 of scores up to 60
    torch.float16: (2**-10, 2**-11),  # 11 bits: half an ulp is 2^-11; twice that, as p and the sum are rounded apart
    torch.bfloat16: (2**-7, 2**-7),  # 8 bits: half an ulp is 2^-8; a store in the interpreter truncates, a whole ulp
    E4M3: (2**-7, 2**-4),  # 4 bits: half an ulp is 2^-4; fp8 operands are exact in bfloat16, which bounds the dot
    E5M2: (2**-7, 2**-3),  # 3 bits: half an ulp is 2^-3
}
# `compute` if queries and keys are e4m3 and the Hopper kernels round weights to e4m3, too: half an ulp is 2^-4.
FP8_WEIGHTS = 2**-4 + 2**-7
# Without log-sum-exps, the exponential of such weights is linear in each octave.  With the rounding, weights are off by
# -8.0% to +6.5%, and so may be their sum.  Results of equally large values are off by up to 7.3% of the magnitudes, or
# 8.0% beside a sink, which is exact.  This bound is not proved for any values: the error, which is
# sum_j p_j e_j (v_j - out) / (1 + e), is at most 8.7% of the magnitudes and the result together.
LINE_WEIGHTS = 0.073 + 2**-7
# The errors above are relative to a weight, and hold from its dtype's smallest normal number on.  Smaller weights are
# rounded to multiples of the smallest subnormal: float16 weights by up to 2^-25; e4m3 weights, which are scaled by 2^5,
# by up to 2^-10 / 2^5 = 2^-15.  The row maximum has weight 1, so the sum of weights is at least 1, and a result is off
# by up to this error times sum_j |v_j|.  The error is visible only if the values of larger weights are zero.
WEIGHTS_END, FP8_WEIGHTS_END = {torch.float16: 2.0**-25}, 2.0**-15
# Subnormal weights of bfloat16 and float32 are multiples of 2^-149 at least.  Times values, and summed over keys, their
# errors are far below this number.
SUBNORMAL = 2.0**-139
# Upper bounds of the norm of errors divided by the norm of results, for MANY results or more: with e4m3 weights, with
# linear ones, and by fp8 results.  (Root mean square errors of one weight: 2.7% and 3.1%.)  Bounds of single elements
# would hide a lost tile or a wrong sum.
FP8_NORM, LINE_NORM, FP8_OUT_NORM = 0.035, 0.04, 0.03
MANY = 1 << 16
# Tolerances of log-sum-exps by dtype of q, relative to 1 + |lse|.  Products of inputs are exact and summed in float32,
# but fp8 tensor cores keep only about 14 bits of a sum.
LSE_TOLERANCES: dict[torch.dtype, float] = {
    torch.float32: 2e-5,
    torch.float16: 1e-4,
    torch.bfloat16: 1e-4,
    E4M3: 2e-3,
    E5M2: 2e-3,
}


def compare(
    case: Case, out: Tensor, lse: Tensor | None, inputs: dict[str, Any], more: float = 0.0, on: str | None = None
) -> float:
    """Assert that out and lse are right: close to the reference, 0 where no key is seen, untouched where not asked for.

    more: relative error of weights in addition to their rounding.  on: the device of the comparison; None: that of the
    tensors.  Return the worst error as a share of its bound.
    """
    from paged_attn import reference

    problem = None if IN_TORCH else problem_of(inputs)
    of_e4m3 = problem is not None and case.dtype == case.dtype_of_cache == E4M3 and rounds_weights(problem)
    if on is not None:
        inputs = {name: _moved(x, on) for name, x in inputs.items()}
        out, lse = out.to(on), lse if lse is None else lse.to(on)
    if case.score_mod:
        inputs = {**inputs, "score_mod": mod_of(case).torch}
    given = {**inputs, "out": None, "return_lse": True}
    both, want_lse = reference.paged_attention(**_with_magnitudes(given))
    copies = None if problem is None else copies_of_scaled(problem)
    if copies is not None:
        rounded, rounded_lse = reference.paged_attention(**_with_magnitudes(_in_16_bits(given, copies.dtype)))
        lengths = torch.tensor(case.query_lens + (case.padding,), device=out.device)
        of_copies = (lengths >= copies.shortest).repeat_interleave(lengths)
        both = torch.where(of_copies[:, None, None], rounded, both)
        want_lse = torch.where(of_copies[:, None], rounded_lse, want_lse)
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
            off, most = float((got - want)[asked].norm()), norm * float(want[asked].norm())  # 0 if no query sees a key
            assert off <= most, f"{case.name}: results are {off:.3g} off in all, at most {most:.3g} expected"
    bound = bound_of(want, weighted, compute + 2 * more, out.dtype)  # errors of a weight, and of the sum of weights
    least = FP8_WEIGHTS_END if of_e4m3 else 0.0 if problem is None else WEIGHTS_END.get(problem.compute, 0.0)
    if least and not ((got - want).abs() <= bound)[asked].all():
        bound = bound + least * _sums_of_magnitudes(given)
    worst = worst_share(f"{case.name}: out", got, want, bound, asked)
    if lse is None:
        return worst
    assert (lse.dtype, lse.shape) == (torch.float32, want_lse.shape), f"{case.name}: lse is {lse.dtype} {lse.shape}"
    lse_bound = LSE_TOLERANCES[case.dtype] * (1 + want_lse.abs())
    return max(worst, worst_share(f"{case.name}: lse", lse.double(), want_lse, lse_bound, asked))


def copies_of_scaled(problem: Any) -> Any:
    """Return a call's copies of cached numbers times their scales by token, rounded to 16 bits; None: no copies."""
    from paged_attn.planning import planner

    copies = planner.plan(problem).copies
    return copies if copies is not None and copies.dtype != problem.cache else None


def _in_16_bits(given: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return a call over caches that hold numbers times their scales by token, rounded to dtype."""
    changed: dict[str, Any] = {}
    of_keys = given["k_scale"]
    for name, scale in (("k", of_keys), ("v", of_keys if given.get("v_scale") is None else given["v_scale"])):
        cache, changed[f"{name}_scale"] = given[f"{name}_cache"].float(), scale
        if given[f"{name}_cache"].dtype == INT4:
            numbers, steps = int4_numbers(given[f"{name}_cache"], scale)
            cache, changed[f"{name}_scale"] = numbers.float() * steps.float(), 1.0
        elif isinstance(scale, Tensor) and scale.ndim == 3:
            cache, changed[f"{name}_scale"] = cache * scale.float()[..., None], 1.0
        changed[f"{name}_cache"] = cache.to(dtype)
    return given | changed


def _with_magnitudes(given: dict[str, Any]) -> dict[str, Any]:
    """Return a call whose values have their magnitudes as further dims, so the reference computes scores only once."""
    dims = {"v_cache": 2 if given["k_cache"].dim() == 5 else 3, "v_new": 2}
    magnitudes: dict[str, Tensor] = {}
    if given["v_cache"].dtype == INT4:
        # Magnitudes may not fit int4.  Kernels sum stored numbers and zero points separately, so add a step to each.
        numbers, scale = int4_numbers(given["v_cache"], given["v_scale"])
        given = given | {"v_cache": numbers * scale, "v_scale": 1.0}
        magnitudes["v_cache"] = (numbers.abs() + 1) * scale
    if given.get("k_new") is not None and given["v_new"] is None:
        given = given | {"v_new": given["k_new"][..., : given["v_cache"].shape[3]]}
    values = {name: given[name] for name in dims if given.get(name) is not None}
    magnitudes = {name: _magnitude(v) for name, v in values.items()} | magnitudes
    doubled = {
        name: torch.cat([bits(v), bits(magnitudes[name])], dims[name]).view(v.dtype) for name, v in values.items()
    }
    gate = given.get("gate")
    return given | doubled | ({} if gate is None else {"gate": torch.cat([gate, gate], 2)})


def _sums_of_magnitudes(given: dict[str, Any]) -> Tensor:
    """Return sum_j |v_j| over the keys that each query sees: the mean with equal weights, times their number."""
    from paged_attn import reference

    bias = given.get("qq_bias")
    if bias is not None:
        bias = torch.where(bias == -torch.inf, bias, 0.0)
    mod = given.get("score_mod")
    hides = None if mod is None else lambda *args: torch.where(mod(*args) == -torch.inf, -torch.inf, 0.0)
    equal: dict[str, Any] = dict(
        softmax_scale=0.0, softcap=0.0, alibi_slopes=None, sinks=None, qq_bias=bias, score_mod=hides
    )
    scale = given.get("k_scale") if given.get("v_scale") is None else given["v_scale"]
    if isinstance(scale, Tensor) and scale.ndim == 3:  # weights are multiples of the largest scale, or up to twice that
        equal["v_scale"] = 2 * float(scale[scale.isfinite()].max())
        if given["v_cache"].dtype == INT4:
            equal["v_cache"] = int4_numbers(given["v_cache"], scale)[0]
    both, log_number = reference.paged_attention(**_with_magnitudes(given | equal))
    return both.chunk(2, dim=2)[1] * log_number.exp()[..., None]


def mod_of(case: Case) -> Any:
    pytest.importorskip("triton", reason="a score_mod of tests is a function under @triton.jit")
    from tests.support.score_mods import MODS

    return MODS[case.score_mod]


def _moved(x: Any, device: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(_moved(y, device) for y in x)
    return x.to(device) if isinstance(x, Tensor) else x


def bound_of(want: Tensor, weighted: Tensor, compute: float, out: torch.dtype) -> Tensor:
    """Return the bound of each element's error (TOLERANCES); weighted: the same attention over magnitudes of values."""
    smallest = max(torch.finfo(out).smallest_normal * torch.finfo(out).eps, SUBNORMAL)
    bound = compute * weighted + TOLERANCES[out][1] * want.abs() + smallest
    return bound.where(weighted != 0, 0.0)  # no key seen, or only the sink: exactly 0


def problem_of(inputs: dict[str, Any], device: Any = None) -> Any:
    """Return the problem that the planner gets for a call, on a device that need not exist; None: that of q."""
    from paged_attn.arguments import bound
    from paged_attn.checks import argument_rows as check
    from paged_attn.launching import platform
    from paged_attn.records import problem

    given, options = bound(inputs)
    check.check_attention(given, options)
    return problem.problem_of(given, options, device or platform.device_of(given.q.device), platform.INTERPRET)


def rounds_weights(problem: Any) -> bool:
    """Whether the kernels of a call round weights to fp8 for their products."""
    from paged_attn.planning import planner

    return any(x.pipe is not None and x.pipe.FP8_PRODUCTS for x in planner.plan(problem).launches)


def asked_tokens(case: Case) -> Tensor:
    """Return [tokens] bool: the rows that the call must write.  They include padding unless `only` is given."""
    wanted = {None: lambda n: True, "decode": lambda n: n == 1, "prefill": lambda n: n != 1}[case.only]
    per_sequence = torch.tensor([wanted(n) for n in case.query_lens], dtype=torch.bool)
    rows = per_sequence.repeat_interleave(torch.tensor(case.query_lens, dtype=torch.long))
    return torch.cat([rows, torch.full((case.padding,), case.only is None)])


def worst_share(what: str, got: Tensor, want: Tensor, bound: Tensor, asked: Tensor) -> float:
    """Return the largest |got - want| / bound over the asked rows; assert that it is at most 1."""
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
