"""write_kv and merge_states on the sizes of a case, against the reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import paged_attn
from paged_attn import reference
from tests.support.cases import LSE_TOLERANCES, TOLERANCES, Case, bits, bound_of, build, is_fp8, worst_share

HALF_AN_ULP = 2**-23  # of float32, in which x / scale is computed, twice


def run_write(case: Case, device: str = "cpu") -> None:
    """The case's query tokens as new keys: each in a slot of its own, some skipped, some not a number; others stay."""
    rng = torch.Generator().manual_seed(case.seed)
    inputs = build(case, device)
    caches = {name: inputs[name] for name in ("k_cache", "v_cache")[: 1 if case.latent else 2]}
    slots = len(caches["k_cache"]) * case.page_size
    tokens = min(case.tokens, slots)
    mapping = torch.randperm(slots, generator=rng)[:tokens]
    mapping[torch.rand(tokens, generator=rng) < 0.2] = -1 - case.seed
    kinds = torch.bfloat16, torch.float16, torch.float32
    dtype = kinds[case.seed % 3] if is_fp8(case.dtype_of_cache) else case.dtype_of_cache
    widths = case.head_dim, case.value_width
    both = 100 * torch.randn(tokens, 2 * case.kv_heads, max(widths), generator=rng)
    both[torch.rand(both.shape, generator=rng) < 0.01] = torch.nan
    parts = both.to(device, dtype).split(case.kv_heads, dim=1)
    new = tuple(x[..., :width] for x, width in zip(parts, widths))
    if not case.strided:
        new = tuple(x.contiguous() for x in new)
    if case.latent:  # values lie in keys
        new = (new[0], None)
    given: dict[str, Any] = {"slot_mapping": mapping.to(device), "kv_layout": inputs["kv_layout"]}
    for name in {f"{cache[0]}_scale" for cache in caches} & inputs.keys():
        of_seqs = case.scales == "per_head, expanded" or case.scales.startswith("per_seq")
        # a write knows nothing of sequences
        given[name] = inputs[name][:1].nan_to_num(1.0) if of_seqs else inputs[name]
    if case.integers == torch.int32:
        given["slot_mapping"] = given["slot_mapping"].to(torch.int32)

    if case.latent:
        given["v_cache"] = None
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


def _check_stored(what: str, got: Tensor, exact: Tensor, at: Tensor) -> None:
    """As near as the nearest number of the cache's type, up to the rounding of a quotient beside a tie."""
    if is_fp8(got.dtype):
        largest = torch.finfo(got.dtype).max
        exact = exact.clamp(-largest, largest)
    found, wanted, exact = got.double()[at], exact.to(got.dtype).double()[at], exact[at]
    assert torch.equal(found.isnan(), exact.isnan()), f"{what} holds NaN elsewhere than what was written"
    more = HALF_AN_ULP * exact.abs() if is_fp8(got.dtype) else 0.0
    off = ((found - exact).abs() > (wanted - exact).abs() + more) & ~exact.isnan()
    assert not off.any(), f"{what} holds {found[off][0]} for {exact[off][0]}; {int(off.sum())} of {off.numel()} are off"


def run_merge(case: Case, device: str = "cpu") -> None:
    """As many parts as the case has sequences, of its query tokens and heads; some saw nothing and hold NaN."""
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
    """The bytes of each element, as a last axis."""
    return x.contiguous()[..., None].view(torch.uint8)
