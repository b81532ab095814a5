"""write_kv, write_qkv and merge_states on the sizes of a case, against the reference."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import paged_attn
from paged_attn import reference
from paged_attn.records.formats import LARGEST
from tests.support.cases import (
    E4M3,
    E5M2,
    LSE_TOLERANCES,
    TOLERANCES,
    Case,
    bits,
    bound_of,
    build,
    is_fp8,
    is_scaled,
    worst_share,
)
from tests.support.formats import INT4, int4_numbers, stored

HALF_AN_ULP = 2**-23  # twice half an ulp of float32, in which x / scale is computed


def _places(case: Case, inputs: dict[str, Any], rng: torch.Generator) -> tuple[dict[str, Tensor], int, dict[str, Any]]:
    """Return (caches, number of tokens, arguments) of a write: each token has its own slot, some are skipped.

    The arguments are slot_mapping, kv_layout and scales.
    """
    caches = {name: inputs[name] for name in ("k_cache", "v_cache")[: 1 if case.latent else 2]}
    slots = len(caches["k_cache"]) * case.page_size
    tokens = min(case.tokens, slots)
    mapping = torch.randperm(slots, generator=rng)[:tokens]
    mapping[torch.rand(tokens, generator=rng) < 0.2] = -1 - case.seed
    if case.integers == torch.int32:
        mapping = mapping.to(torch.int32)
    given = {"slot_mapping": mapping.to(caches["k_cache"].device), "kv_layout": inputs["kv_layout"]}
    for name in {f"{cache[0]}_scale" for cache in caches} & inputs.keys():
        of_seqs = case.scales == "per_head, expanded" or case.scales.startswith("per_seq")
        # a write knows nothing of sequences
        given[name] = inputs[name][:1].nan_to_num(1.0) if of_seqs else inputs[name]
    return caches, tokens, given


def _dtype_of_new(case: Case) -> torch.dtype:
    kinds = torch.bfloat16, torch.float16, torch.float32
    return kinds[case.seed % 3] if is_scaled(case.dtype_of_cache) else case.dtype_of_cache


def run_write(case: Case, device: str = "cpu") -> None:
    """Write the case's query tokens as new keys and values, and compare with the reference.

    Each token has its own slot, some are skipped, and some numbers are NaN.  All other slots must not change.
    """
    rng = torch.Generator().manual_seed(case.seed)
    caches, tokens, given = _places(case, build(case, device), rng)
    widths = case.head_dim, case.value_width
    both = 100 * torch.randn(tokens, 2 * case.kv_heads, max(widths), generator=rng)
    both[torch.rand(both.shape, generator=rng) < 0.01] = torch.nan
    parts = both.to(device, _dtype_of_new(case)).split(case.kv_heads, dim=1)
    new = tuple(x[..., :width] for x, width in zip(parts, widths))
    if not case.strided:
        new = tuple(x.contiguous() for x in new)
    if case.latent:  # values lie in keys
        new = (new[0], None)
    if case.latent:
        given["v_cache"] = None
    if any(isinstance(x, Tensor) and x.ndim == 3 for x in given.values()):
        _check_scales_written(case, new, caches, given)
        return
    before = {name: bits(cache).clone() for name, cache in caches.items()}
    exact = {name: torch.zeros_like(cache, dtype=torch.float64) for name, cache in caches.items()}
    reference.write_kv(*new, **exact, **given)
    written = {name: torch.zeros_like(cache, dtype=torch.float64) for name, cache in caches.items()}
    plain = {name: given[name] for name in given.keys() & {"slot_mapping", "kv_layout", "v_cache"}}
    reference.write_kv(*(None if x is None else torch.ones_like(x) for x in new), **written, **plain)
    paged_attn.write_kv(*new, **caches, **given, check=case.check or None)
    for name, cache in caches.items():
        at = written[name] != 0
        same = _bytes(bits(cache)) == _bytes(before[name])
        assert same.all(-1)[~at].all(), f"{case.name}: {name} changed where nothing was to be written"
        _check_stored(f"{case.name}: {name}", cache, exact[name], at)


def run_write_qkv(case: Case, device: str = "cpu") -> None:
    """Write the case's query tokens as projections; its seed decides about norms, rotation, packing and q_out."""
    rng, draw = torch.Generator().manual_seed(case.seed), random.Random(case.seed)
    caches, tokens, given = _places(case, build(case, device), rng)
    width, value_width = case.head_dim - (case.value_width if case.latent else 0), case.value_width
    if not tokens or not width:  # latents without a part that is rotated
        return
    heads, kv_heads, dtype = case.heads, case.kv_heads, _dtype_of_new(case)
    gap = 3 if case.strided else 0

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng).to(device)

    sizes = (heads, width), (kv_heads, width), (kv_heads, value_width)
    q, k, v = (normal(tokens, n, size + gap).to(dtype)[..., :size] for n, size in sizes)
    packed = not case.latent and width == value_width and draw.random() < 0.5
    qkv: Any = torch.cat([q, k, v], dim=1).flatten(1) if packed else (q, v, k) if case.latent else (q, k, v)
    turned = _turned(draw, normal, tokens, width)
    if turned and turned["cos_sin"].shape[1] % 4 and case.dtype_of_cache == INT4:
        turned["interleaved"] = True  # halves of an odd number of dims would share a byte
    given |= turned
    for name, size in (("q_norm", 0 if case.latent else width), ("k_norm", value_width if case.latent else width)):
        if size and draw.random() < 0.5:
            given[name] = normal(size).to(draw.choice([dtype, torch.float32]))
    given |= dict(eps=draw.choice([1e-6, 1e-2]), norm_offset=draw.choice([0.0, 1.0]))
    out = draw.choice([None, E4M3, E5M2])
    if out is not None:
        given |= dict(q_out=normal(tokens, heads, width + gap).to(out)[..., :width], q_scale=draw.choice([0.02, 1.5]))
    v_cache = None if case.latent else caches["v_cache"]
    if any(isinstance(x, Tensor) and x.ndim == 3 for x in (given.get("k_scale"), given.get("v_scale"))):
        _check_scales_of_qkv(case, qkv, caches, v_cache, given)
        return
    exact = {name: torch.full_like(cache, torch.nan, dtype=torch.float64) for name, cache in caches.items()}
    before = {name: bits(cache).clone() for name, cache in caches.items()}
    plain = {name: x for name, x in given.items() if name != "q_out"}
    want = reference.write_qkv(qkv, exact["k_cache"], exact.get("v_cache"), **plain)
    got = paged_attn.write_qkv(qkv, caches["k_cache"], v_cache, **given, check=case.check or None)
    check_nearest(f"{case.name}: queries", got, want)
    for name, cache in caches.items():
        at = ~exact[name].isnan()
        same = _bytes(bits(cache)) == _bytes(before[name])
        assert same.all(-1)[~at].all(), f"{case.name}: {name} changed where nothing was to be written"
        largest = exact[name].nan_to_num().abs().max()
        check_nearest(f"{case.name}: {name}", cache[at], exact[name][at], largest)


def _check_scales_of_qkv(
    case: Case, qkv: Any, caches: dict[str, Tensor], v_cache: Tensor | None, given: dict[str, Any]
) -> None:
    """Assert that scales by token and the stored numbers are the reference's, up to float32 errors and a rounding."""
    scales = {name: given[name] for name in ("k_scale", "v_scale") if getattr(given.get(name), "ndim", 0) == 3}
    tensors = caches | scales
    wanted = {name: x.clone() for name, x in tensors.items()}
    before = {name: bits(x).clone() for name, x in tensors.items()}
    options = {name: x for name, x in given.items() if name not in ("q_out", *scales)}
    other = None if v_cache is None else wanted["v_cache"]
    want = reference.write_qkv(qkv, wanted["k_cache"], other, **options, **{name: wanted[name] for name in scales})
    got = paged_attn.write_qkv(qkv, caches["k_cache"], v_cache, **given, check=case.check or None)
    check_nearest(f"{case.name}: queries", got, want)
    for name, x in scales.items():
        torch.testing.assert_close(
            x, wanted[name], rtol=2.0**-10 if x.dtype == torch.float16 else 2.0**-18, atol=1e-7, equal_nan=True
        )
        cache = f"{name[0]}_cache"
        same = _bytes(bits(wanted[cache])) == _bytes(before[cache])
        assert (_bytes(bits(caches[cache])) == _bytes(before[cache]))[same.all(-1)].all(), f"{case.name}: {cache}"
        # minus zero points: where one is rounded otherwise, all stored numbers of its head move with it
        if caches[cache].dtype == INT4:
            found, expected = int4_numbers(caches[cache], x)[0], int4_numbers(wanted[cache], wanted[name])[0]
        else:
            found, expected = caches[cache].double(), wanted[cache].double()
        step = 2.0**-2 * expected.abs() + 2.0**-6 if is_fp8(caches[cache].dtype) else 1.0
        off = (found - expected).abs().nan_to_num()
        assert not (off > step).any(), f"{case.name}: {cache} is {float(off.max())} off"
        assert int((off > 0).sum()) <= 2 + off.numel() / 100, f"{case.name}: {cache} is often rounded otherwise"


def _turned(draw: random.Random, normal: Callable[..., Tensor], tokens: int, width: int) -> dict[str, Any]:
    """Draw the arguments of a rotary embedding of heads of `width` dims; {}: none."""
    rotary_dim = draw.choice([0, *[size for size in (2, 16, width // 2 * 2) if 2 <= size <= width]])
    if not rotary_dim:
        return {}
    how = draw.choice(["tokens", "positions", "sections"])
    table = normal(tokens if how == "tokens" else 40, rotary_dim)
    given: dict[str, Any] = dict(cos_sin=table.to(draw.choice([torch.float32, torch.bfloat16])))
    given["interleaved"] = draw.random() < 0.5
    if how != "tokens":
        positions = [[draw.randrange(40) for _ in range(tokens)] for _ in range(3)]
        given["positions"] = torch.tensor(positions if how == "sections" else positions[0], device=table.device)
    if how == "sections":
        ends = sorted(draw.randint(0, rotary_dim // 2) for _ in range(2))
        given["mrope_sections"] = (ends[0], ends[1] - ends[0], rotary_dim // 2 - ends[1])
    return given


def check_nearest(
    what: str, got: Tensor, exact: Tensor, largest: Tensor | None = None, at: Tensor | None = None
) -> None:
    """Assert that results are the numbers nearest to the exact ones, up to a float32 error of the head's largest.

    largest: the magnitude of the largest; None: along the last axis of `exact`.  at: elements to compare; None: all.
    """
    most = exact.abs().nan_to_num().amax(-1, keepdim=True) if largest is None else largest
    if got.dtype in LARGEST:
        exact = exact.clamp(-LARGEST[got.dtype], LARGEST[got.dtype])
    found, wanted = got.double(), stored(exact, got.dtype).double()
    off = ~((found - exact).abs() <= (wanted - exact).abs() + 2.0**-20 * most)
    off = off if at is None else off & at
    assert not off.any(), f"{what}: {found[off][0]} for {exact[off][0]}; {int(off.sum())} of {off.numel()} are off"


def _check_scales_written(case: Case, new: Any, caches: dict[str, Tensor], given: dict[str, Any]) -> None:
    """Assert that scales by token and the stored numbers have the reference's bits everywhere; NaNs are equal."""
    tensors = caches | {name: x for name, x in given.items() if isinstance(x, Tensor) and x.ndim == 3}
    wanted = {name: x.clone() for name, x in tensors.items()}
    reference.write_kv(*new, **given | wanted)
    paged_attn.write_kv(*new, **given | caches, check=case.check or None)
    for name, got in tensors.items():
        if name in caches:
            assert torch.equal(bits(got), bits(wanted[name])), f"{case.name}: {name}"
        else:
            torch.testing.assert_close(got, wanted[name], rtol=0, atol=0, equal_nan=True)


def _check_stored(what: str, got: Tensor, exact: Tensor, at: Tensor) -> None:
    """Assert that numbers are stored as the nearest of the cache's dtype, up to the rounding of a quotient at a tie."""
    if is_scaled(got.dtype):
        exact = exact.clamp(-LARGEST[got.dtype], LARGEST[got.dtype])
    if not got.dtype.is_floating_point:
        exact = exact.nan_to_num(nan=0.0)
    found, wanted, exact = got.double()[at], stored(exact, got.dtype).double()[at], exact[at]
    assert torch.equal(found.isnan(), exact.isnan()), f"{what} holds NaN elsewhere than what was written"
    more = HALF_AN_ULP * exact.abs() if is_scaled(got.dtype) else 0.0
    off = ((found - exact).abs() > (wanted - exact).abs() + more) & ~exact.isnan()
    assert not off.any(), f"{what} holds {found[off][0]} for {exact[off][0]}; {int(off.sum())} of {off.numel()} are off"


def run_merge(case: Case, device: str = "cpu") -> None:
    """Merge as many parts as the case has sequences, with its query tokens and heads, and compare with the reference.

    Some rows saw no key and hold NaN; some have an infinite log-sum-exp.
    """
    rng = torch.Generator().manual_seed(case.seed)
    dtype = torch.bfloat16 if is_fp8(case.dtype) else case.dtype
    rows = len(case.seq_lens), min(case.tokens, 40), case.heads
    outs = torch.randn(*rows, case.head_dim, generator=rng)
    lses = (3.0, 10.0, 30.0)[case.seed % 3] * torch.randn(rows, generator=rng)
    gone = torch.rand(rows, generator=rng) < 0.2
    outs[gone], lses[gone] = torch.nan, -torch.inf
    sunk = torch.rand(rows, generator=rng) < 0.02
    outs[sunk], lses[sunk] = 0.0, torch.inf
    outs, lses = outs.to(device, dtype), lses.to(device)
    if case.strided:
        outs, lses = torch.stack([outs, outs], -1)[..., 0], torch.stack([lses, lses], -1)[..., 0]
    out, lse = paged_attn.merge_states(outs, lses)
    want, want_lse = reference.merge_states(outs, lses)
    weighted, _ = reference.merge_states(outs.abs(), lses)
    everything = torch.ones(rows[1], dtype=torch.bool, device=device)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    bound = bound_of(want, weighted, TOLERANCES[dtype][0], dtype)
    worst_share(f"{case.name}: out", out.double(), want, bound, everything)
    bound = LSE_TOLERANCES[torch.float32] * (1 + want_lse.abs())
    worst_share(f"{case.name}: lse", lse.double(), want_lse, bound, everything)


def _bytes(x: Tensor) -> Tensor:
    """View the bytes of each element as a last axis."""
    return x.contiguous()[..., None].view(torch.uint8)
