"""The suite `writes`: norms of queries and keys, rotary embedding, and the write into the cache.

The library needs one launch, peers several.  A peer takes a Write, its inputs and caches, and returns a call.  Each
peer gets caches of its own.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import paged_attn
from benchmarks import measure, runner
from benchmarks.peers import OURS
from benchmarks.peers.cannot import Cannot
from paged_attn.records.formats import INT4
from paged_attn.reference.cache import whole
from paged_attn.reference.scales import scale_and_zero

HEADS, KV_HEADS, HEAD_DIM, PAGE, EPS = 32, 8, 128, 16, 1e-6
TOKENS = (1, 64, 4096, 16384)
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
LONGEST = 32768  # rows of the table of angles
# Bounds on the relative error in 2-norm: e4m3 has 4 significant bits, int4 16 numbers, and some peers round norms to 16
# bits before they rotate.
AGREE, AGREE_OF_INT4 = 4e-2, 6e-2
SCALE, SCALES = 1 / 16, ("k_scale", "v_scale")


def stored_dims(cache: torch.dtype) -> int:
    """Elements of a head in a cache of this dtype."""
    return HEAD_DIM // 2 if cache == INT4 else HEAD_DIM


class Write(NamedTuple):
    """One case: tokens of a step, the dtype of the cache, and whether its scales are by token."""

    tokens: int
    cache: torch.dtype
    by_token: bool = False

    @property
    def name(self) -> str:
        cache = "int4" if self.cache == INT4 else str(self.cache).removeprefix("torch.")
        return f"{self.tokens} tokens, {cache} cache" + ", by token" * self.by_token

    @property
    def bytes(self) -> int:
        """Bytes that must move for all tokens: projections, angles, positions, slots; queries, keys, values, scales."""
        read = (HEADS + 2 * KV_HEADS) * HEAD_DIM * 2 + HEAD_DIM * 4 + 16
        written = 2 * KV_HEADS * (stored_dims(self.cache) * self.cache.itemsize + 4 * self.by_token)
        return self.tokens * (read + HEADS * HEAD_DIM * 2 + written)

    @property
    def operations(self) -> int:
        """Operations of norm and rotation, 7 for each element: a square, a sum, two products, and 3 of the rotation."""
        return self.tokens * (HEADS + KV_HEADS) * HEAD_DIM * 7


CACHES = ((BF16, False), (E4M3, False), (E4M3, True), (torch.int8, True), (INT4, True))
CASES = tuple([Write(tokens, *cache) for cache in CACHES for tokens in TOKENS])


class Inputs(NamedTuple):
    """Tensors that all peers of a case read."""

    qkv: Tensor
    q_norm: Tensor
    k_norm: Tensor
    cos_sin: Tensor
    positions: Tensor
    slots: Tensor
    pages: int


class Stores(NamedTuple):
    """Caches that a peer writes, and their scales: those by token are written, too."""

    k_cache: Tensor
    v_cache: Tensor
    scales: dict[str, Any]  # k_scale and v_scale; {} over 16 bits

    @property
    def caches(self) -> tuple[Tensor, Tensor]:
        return self.k_cache, self.v_cache


Call = Callable[[], Tensor]  # returns the queries
Peer = Callable[[Write, Inputs, Stores], Call]


def inputs_of(case: Write, device: str) -> Inputs:
    """Return random projections, positions of sequences of up to 4096 tokens, and slots in pages in random order."""
    pages = -(-case.tokens // PAGE)
    angles = torch.arange(LONGEST)[:, None] * 10000.0 ** -(torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    order = torch.randperm(pages)[:, None] * PAGE + torch.arange(PAGE)
    q_norm, k_norm = torch.rand(2, HEAD_DIM, device=device).to(BF16)
    return Inputs(
        torch.randn(case.tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM, device=device).to(BF16),
        q_norm,
        k_norm,
        torch.cat([angles.cos(), angles.sin()], dim=1).to(device),
        (torch.arange(case.tokens) % 4096).to(device),
        order.flatten()[: case.tokens].to(device),
        pages,
    )


def stores_of(case: Write, inputs: Inputs) -> Stores:
    """Return a zeroed K and V cache, NHD, and their scales."""
    shape = (2, inputs.pages, PAGE, KV_HEADS, stored_dims(case.cache))
    k_cache, v_cache = torch.zeros(shape, device=inputs.qkv.device).to(case.cache)
    scales: dict[str, Any] = {} if case.cache == BF16 else dict.fromkeys(SCALES, SCALE)
    if case.by_token:
        scales = {name: torch.zeros(k_cache.shape[:3], device=k_cache.device) for name in SCALES}
    return Stores(k_cache, v_cache, scales)


def ours(case: Write, x: Inputs, stores: Stores) -> Call:
    named: dict[str, Any] = dict(positions=x.positions, cos_sin=x.cos_sin, q_norm=x.q_norm, k_norm=x.k_norm, eps=EPS)
    out = torch.empty(case.tokens, HEADS, HEAD_DIM, dtype=BF16, device=x.qkv.device)
    named |= stores.scales
    return lambda: paged_attn.write_qkv(x.qkv, *stores.caches, x.slots, **named, q_out=out)


def split(qkv: Tensor) -> tuple[Tensor, ...]:
    """Return views of queries, keys and values, [tokens, heads or kv_heads, head_dim]."""
    return qkv.unflatten(1, (-1, HEAD_DIM)).split([HEADS, KV_HEADS, KV_HEADS], dim=1)


def norm_and_rotate(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the RMS norm, rounded to 16 bits as models with separate operators do, rotated in halves."""
    wide = x.float()
    wide = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype) * weight
    a, b = wide.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def compiled(case: Write, x: Inputs, stores: Stores) -> Call:
    """Return a call of norm and rotary embedding by torch.compile, followed by `write_kv`."""

    def before(x: Inputs) -> tuple[Tensor, Tensor]:
        q, k, _ = split(x.qkv)
        cos, sin = (part[:, None] for part in x.cos_sin[x.positions].chunk(2, dim=-1))
        return norm_and_rotate(q, x.q_norm, cos, sin), norm_and_rotate(k, x.k_norm, cos, sin)

    function, v = torch.compile(before, fullgraph=True), split(x.qkv)[2]

    def call() -> Tensor:
        q, k = function(x)
        paged_attn.write_kv(k, v, *stores.caches, x.slots, **stores.scales)
        return q

    return call


def flashinfer(case: Write, x: Inputs, stores: Stores) -> Call:
    """Return FlashInfer's call: norms, then rotary embedding and append, which over e4m3 are one fused kernel.

    The fused kernel also quantises queries: it writes half of the bytes for queries.
    """
    import flashinfer

    if case.by_token:
        raise Cannot("no scales by token")
    q, k, v = split(x.qkv)
    indptr = torch.tensor([0, x.pages], dtype=torch.int32, device=q.device)
    indices = (x.slots[::PAGE] // PAGE).int()  # one sequence of all tokens, in the order of its pages
    batch, place = torch.zeros_like(x.slots).int(), torch.arange(case.tokens, device=q.device).int()
    last = torch.tensor([case.tokens - (x.pages - 1) * PAGE], dtype=torch.int32, device=q.device)

    def normed() -> tuple[Tensor, Tensor]:
        return flashinfer.norm.rmsnorm(q, x.q_norm, EPS), flashinfer.norm.rmsnorm(k, x.k_norm, EPS)

    def append() -> Tensor:
        q_rows, k_rows = normed()
        flat = q_rows.flatten(1), k_rows.flatten(1)
        flashinfer.rope.apply_rope_with_cos_sin_cache_inplace(x.positions, *flat, HEAD_DIM, x.cos_sin)
        flashinfer.page.append_paged_kv_cache(k_rows, v, batch, place, stores.caches, indices, indptr, last)
        return q_rows

    def fused() -> Tensor:
        out, _ = flashinfer.rope.rope_quantize_fp8_append_paged_kv_cache(
            *normed(), None, None, v, x.cos_sin, x.positions, stores.caches, indices, indptr, batch, place,
            quantize_dtype=E4M3, quant_scale_kv=1 / SCALE, page_size=PAGE, enable_pdl=True,
        )  # fmt: skip
        queries: Tensor = out
        return queries

    return append if case.cache == BF16 else fused


def sglang(case: Write, x: Inputs, stores: Stores) -> Call:
    """Return SGLang's call of two launches: norms, then rotary embedding and write.

    Over e4m3, the first launch also rotates, and the second only writes.  The launches change queries and keys in
    place, so later calls start from what earlier calls have left.
    """
    if case.by_token:
        raise Cannot("no scales by token")
    from sglang.kernels.ops.attention.rope import apply_rope_inplace_with_kvcache
    from sglang.kernels.ops.attention.table_qk_norm_rope import table_qk_norm_rope_
    from sglang.kernels.ops.kvcache.fused_fp8_qkv_kv_cache import fused_fp8_qkv_kv_cache
    from sglang.kernels.ops.layernorm.norm import fused_inplace_qknorm

    qkv = x.qkv.clone()
    q, k, v = split(qkv)
    rows = [cache.view(-1, KV_HEADS * HEAD_DIM) for cache in stores.caches]
    scale = torch.tensor([SCALE], device=qkv.device)

    def whole() -> Tensor:
        fused_inplace_qknorm(q, k, x.q_norm, x.k_norm, EPS)
        apply_rope_inplace_with_kvcache(q, k, v, *rows, x.cos_sin, x.positions, x.slots, is_neox=True)
        return q

    def quantised() -> Tensor:
        table_qk_norm_rope_(qkv, x.positions, x.q_norm, x.k_norm, x.cos_sin, HEADS, KV_HEADS, HEAD_DIM, EPS)
        fused_fp8_qkv_kv_cache(None, k, v, *rows, x.slots, scale, scale)
        return q

    return whole if case.cache == BF16 else quantised


PEERS: dict[str, Peer] = {OURS: ours, "torch.compile": compiled, "flashinfer": flashinfer, "sglang": sglang}


def written(q: Tensor, stores: Stores) -> list[Tensor]:
    """Return queries, keys and values in float64, the latter times their scales by token."""
    found = [q.double()]
    for cache, scale in zip(stores.caches, [stores.scales.get(name) for name in SCALES]):
        if not isinstance(scale, Tensor):
            found.append(cache.double())
        elif cache.dtype == INT4:
            by, zeros = scale_and_zero(scale)
            found.append((whole(cache) - zeros[..., None]) * by[..., None])
        else:
            found.append(cache.double() * scale.double()[..., None])
    return found


def error_of(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """Return the largest relative error, in 2-norm, of queries, keys and values."""
    return max(float((x - y).norm() / y.norm()) for x, y in zip(got, want))


def agreeing(case: Write, x: Inputs, peers: Mapping[str, Peer]) -> Iterator[tuple[str, Call | str, float]]:
    """Yield (peer, its call or why it is left out, its relative error against the library)."""
    want: list[Tensor] | None = None
    for name, peer in peers.items():
        stores = stores_of(case, x)
        try:
            call = peer(case, x, stores)
            got = written(call(), stores)
        except Cannot as reason:
            yield name, str(reason), 0.0
            continue
        except Exception as reason:  # a peer may fail in any way; the run goes on and says so
            yield name, f"{type(reason).__name__}: {runner.first_line(reason)}", 0.0
            continue
        if want is None:
            if name != OURS:
                yield name, f"nothing to compare with: {OURS} failed", 0.0
                continue
            want = got
        error = error_of(got, want)
        agrees = error <= (AGREE_OF_INT4 if case.cache == INT4 else AGREE)
        yield name, call if agrees else f"differs from {OURS}: relative error {error:.2g}", error


def measured(case: Write, rounds: int, device: str, peers: Mapping[str, Peer] = PEERS) -> dict[str, Any]:
    """Time a case: return seconds of every peer whose results agree with the library's, and why others were skipped."""
    calls: dict[str, Call] = {}
    errors, skipped = {}, {}
    for name, call, error in agreeing(case, inputs_of(case, device), peers):
        if isinstance(call, str):
            skipped[name] = call
        else:
            calls[name], errors[name] = call, error
    graphs = {name: measure.capture(call) for name, call in calls.items()} if OURS in calls else {}
    times = measure.samples(graphs, rounds) if graphs else {}
    seconds = {name: statistics.median(x) for name, x in times.items()}
    spread = {name: measure.spread(x) for name, x in times.items()}
    calls.clear()
    graphs.clear()
    gc.collect()
    work = {"bytes": case.bytes, "operations": case.operations}
    return {"case": case.name, **work, "seconds": seconds, "spread": spread, "errors": errors, "skipped": skipped}


def run(rounds: int, output: Path, quick: bool, shown: Callable[[str], object]) -> dict[str, Any]:
    """Measure the suite; write its JSON after every case."""
    about: dict[str, Any] = {"suite": "writes", **runner.versions(), "ceilings": measure.ceilings(), "rounds": rounds}
    about["results"] = []
    cases = CASES[1::4] if quick else CASES
    for number, case in enumerate(cases, 1):
        about["results"].append(measured(case, rounds, runner.device()))
        about |= {"totals": runner.totals(about["results"]), "losses": runner.losses(about["results"])}
        runner.write(about, output)
        shown(f"writes {number}/{len(cases)}  {runner.summary(about['results'][-1])}")
    return about
