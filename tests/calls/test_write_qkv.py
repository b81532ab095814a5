"""write_qkv against the reference: norms, rotations, layouts, formats, strides, skipped tokens, in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from paged_attn import reference, write_kv, write_qkv
from paged_attn.calls import call_cache
from tests.calls.test_write_kv import as_bytes, empty_caches
from tests.support.cases import E4M3, E5M2, INT4, Case
from tests.support.other_calls import check_nearest, run_write_qkv

HALF, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
SLOTS = [9, -1, 0, 14, -(2**40), 7]  # of 5 pages of 3 slots


class Call(NamedTuple):
    """A call: 6 tokens, of which two are skipped."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    value_dim: int | None = None  # None: head_dim
    rotary_dim: int | None = 32  # None: no rotary embedding
    dtype: torch.dtype = BF16
    cache: torch.dtype | None = None  # None: dtype
    layout: str = "NHD"
    packed: bool = True
    interleaved: bool = False
    norms: str = "qk"
    offset: float = 0.0
    table: torch.dtype = F32
    positions: str = "of tokens"  # "none", "sections"
    out: torch.dtype | None = None  # None: a new tensor
    per_head: bool = False  # scales
    integers: torch.dtype = torch.int64
    wide: bool = False  # gaps between heads and tokens


CALLS = {
    "packed, all of a head": Call(),
    "parts, half of a head": Call(packed=False, rotary_dim=16, dtype=HALF, table=HALF, wide=True),
    "pairs": Call(interleaved=True, dtype=F32, integers=torch.int32),
    "pairs, some of a head of 24": Call(interleaved=True, rotary_dim=12, head_dim=24, norms="k", table=BF16),
    "halves, some of a head of 33": Call(head_dim=33, rotary_dim=20, offset=1.0, packed=False, wide=True),
    "one pair of a head of 5": Call(head_dim=5, rotary_dim=2, heads=3, kv_heads=3, layout="HND"),
    "a row of the table for each token": Call(positions="none", norms=""),
    "sections": Call(positions="sections", norms="q", rotary_dim=24),
    "sections of pairs": Call(positions="sections", interleaved=True, rotary_dim=24, norms=""),
    "norms alone": Call(rotary_dim=None, layout="HND", dtype=F32),
    "nothing but the write": Call(rotary_dim=None, norms=""),
    "x-packed": Call(layout="x", head_dim=48),
    "x-packed e4m3": Call(layout="x", cache=E4M3, head_dim=64, rotary_dim=32, per_head=True),
    "e4m3, queries as well": Call(cache=E4M3, out=E4M3, dtype=HALF, per_head=True),
    "e5m2, queries in e4m3": Call(cache=E5M2, out=E4M3, dtype=F32, heads=6, kv_heads=2, layout="HND"),
    "values of another width": Call(packed=False, value_dim=16, cache=E4M3),
    "40 heads of 80, one KV head": Call(heads=40, kv_heads=1, head_dim=80, rotary_dim=80),
}


def caches_of(call: Call, device: str) -> tuple[Tensor, Tensor]:
    """Caches of random bytes: what is not written has to stay."""
    x = 16 if call.cache is not None else 8
    k, v = empty_caches(call.layout, call.cache or call.dtype, 5, 3, call.kv_heads, call.head_dim, device, x)
    return k, v if call.value_dim is None else v[..., : call.value_dim]


def heads_of(call: Call, device: str) -> Tensor | Sequence[Tensor]:
    """Random queries, keys and values of 6 tokens; those of a skipped token are NaN in keys and values."""
    width, kv = call.head_dim, call.kv_heads
    room = (6, (call.heads + 2 * kv) * (2 if call.wide else 1) + call.wide, width + 8 * call.wide)
    x = (2 * torch.randn(room, device=device)).to(call.dtype)
    x[1, call.heads * (2 if call.wide else 1) :] = torch.nan  # token 1 is skipped
    if call.packed:
        return x.flatten(1)
    parts = [
        y[..., :width] for y in x[:, :: 2 if call.wide else 1][:, : call.heads + 2 * kv].split([call.heads, kv, kv], 1)
    ]
    return (*parts[:2], parts[2][..., : call.value_dim])


def options_of(call: Call, device: str) -> dict[str, Any]:
    given: dict[str, Any] = dict(kv_layout="HND" if call.layout == "HND" else "NHD")
    if call.rotary_dim is not None:
        angles = 6.3 * torch.rand(6 if call.positions == "none" else 11, call.rotary_dim // 2, device=device)
        given |= dict(cos_sin=torch.cat([angles.cos(), angles.sin()], 1).to(call.table), interleaved=call.interleaved)
        pos = torch.tensor([[10, 2**31 - 1, 0, 3, -5, 7], [0, 1, 2, 3, 4, 5], [9, 9, 1, 8, 0, 2]], device=device)
        if call.positions == "sections":
            given |= dict(positions=pos.to(call.integers), mrope_sections=(3, call.rotary_dim // 2 - 5, 2))
        elif call.positions == "of tokens":
            given |= dict(positions=pos[0].to(call.integers))
    for name in call.norms:
        given[f"{name}_norm"] = torch.randn(call.head_dim, device=device).to(F32 if name == "q" else call.dtype)
    if call.norms:
        given |= dict(eps=1e-2, norm_offset=call.offset)
    if call.cache is not None:
        of_heads = torch.linspace(0.03, 0.3, call.kv_heads, device=device)
        given |= (
            dict(k_scale=of_heads, v_scale=of_heads.flip(0)[None])
            if call.per_head
            else dict(k_scale=0.02, v_scale=torch.full((1,), 0.3, device=device))
        )
    if call.out is not None:
        given["q_out"] = torch.zeros(6, call.heads, call.head_dim, device=device).to(call.out)
        given["q_scale"] = given["k_scale"] if call.per_head else 0.04
    return given


def stored(cache: Tensor, layout: str) -> Tensor:
    """A cache as [pages, page_size, kv_heads, dims]."""
    if cache.ndim == 5:
        return cache.permute(0, 3, 1, 2, 4).flatten(3)
    return cache.permute({"NHD": (0, 1, 2, 3), "HND": (0, 2, 1, 3), "x": (0, 3, 1, 2)}[layout])


def check(call: Call, qkv: Any, given: dict[str, Any], device: str, slots: Sequence[int] = SLOTS) -> Tensor:
    """Make a call and compare results, slots that are written and slots that are not."""
    mapping = torch.tensor(slots, device=device).to(call.integers if min(slots) > -(2**31) else torch.int64)
    caches = caches_of(call, device)
    before = [x.clone() for x in caches]
    exact = [torch.zeros_like(x, dtype=torch.float64) for x in caches]
    without = {name: x for name, x in given.items() if name != "q_out"}
    queries = reference.write_qkv(qkv, *exact, mapping, **without)
    written = torch.zeros(15, dtype=torch.bool, device=device)
    written[mapping[mapping >= 0]] = True
    got = write_qkv(qkv, *caches, mapping, **given)
    check_nearest("queries", got, queries)
    for name, cache, was, wanted in zip("kv", caches, before, exact, strict=True):
        now, was, wanted = (stored(x, call.layout).flatten(0, 1) for x in (cache, was, wanted))
        check_nearest(f"{name}_cache", now, wanted, at=written[:, None, None].expand(now.shape))
        assert torch.equal(as_bytes(now)[~written], as_bytes(was)[~written]), (
            f"{name}_cache changed where nothing was to be written"
        )
    return got


@pytest.mark.parametrize("name", CALLS)
def test_a_call_does_what_the_reference_does(name: str, device: str) -> None:
    """Twice, for the second call is a kept one."""
    call = CALLS[name]
    qkv, given = heads_of(call, device), options_of(call, device)
    call_cache.clear()
    first, again = (check(call, qkv, given, device).clone() for _ in range(2))
    assert torch.equal(as_bytes(first), as_bytes(again))
    assert first.dtype == (call.out or call.dtype)


def assert_equal_bits(write: Callable[[], Sequence[Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a call with programs of many heads, then of few: all tensors that `write` returns have equal bits."""
    launched = pytest.importorskip("paged_attn.calls.launched")
    grids, qkv_step, found = [], launched._qkv_step, []

    def noted(*args: Any) -> Any:
        step = qkv_step(*args)
        grids.append(step.grid)
        return step

    monkeypatch.setattr(launched, "_qkv_step", noted)
    for few in (0, 1 << 40):
        monkeypatch.setattr(launched, "FEW_WRITE_ELEMENTS", few)
        call_cache.clear()
        found.append(write())
    call_cache.clear()
    assert all(torch.equal(as_bytes(x), as_bytes(y)) for x, y in zip(*found, strict=True))
    assert grids == [] or grids[0] < grids[1]  # none in plain torch


FORMATS: list[tuple[str, torch.dtype | None]] = [
    *((name, dtype) for name in CALLS for dtype in (None, torch.int8)),
    *((name, INT4) for name, call in CALLS.items() if call.layout != "x" and call.head_dim % 4 == 0),
]


@pytest.mark.parametrize("name, by_token", FORMATS, ids=str)
def test_small_and_large_calls_write_equal_bits(
    name: str, by_token: torch.dtype | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits do not depend on the number of heads of a program.  On a GPU, threads add squares in another order."""
    call = CALLS[name]._replace(heads=96, kv_heads=16)
    if by_token:
        call = call._replace(cache=by_token)
    qkv, given = heads_of(call, device), options_of(call, device)
    caches, slots = caches_of(call, device), torch.tensor(SLOTS, device=device)
    if by_token == INT4:
        caches = (caches[0][..., : caches[0].shape[-1] // 2], caches[1][..., : caches[1].shape[-1] // 2])

    def write() -> Sequence[Tensor]:
        written, scales = [x.clone() for x in caches], {}
        if by_token:
            shape = (5, 3, 16) if call.layout == "NHD" else (5, 16, 3)
            scales = {f"{x}_scale": torch.zeros(shape, device=device) for x in "kv"}
        return write_qkv(qkv, *written, slots, **given | scales).clone(), *written, *scales.values()

    assert_equal_bits(write, monkeypatch)


@pytest.mark.parametrize("norm", [True, False])
def test_small_and_large_calls_write_equal_bits_of_latents(
    norm: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k_rope, latent = (torch.randn(6, *size, device=device).to(BF16) for size in ((64, 64), (1, 64), (1, 512)))
    given: dict[str, Any] = dict(cos_sin=torch.rand(8, 64, device=device), positions=torch.arange(6, device=device))
    given |= dict(k_norm=torch.rand(512, device=device)) if norm else {}
    slots = torch.tensor(SLOTS, device=device)

    def write() -> Sequence[Tensor]:
        cache = torch.zeros(5, 3, 1, 576, dtype=BF16, device=device)
        return write_qkv((q, latent, k_rope), cache, None, slots, **given).clone(), cache

    assert_equal_bits(write, monkeypatch)


@pytest.mark.parametrize("name", ["packed, all of a head", "parts, half of a head", "pairs, some of a head of 24"])
def test_queries_may_be_rotated_in_place(name: str, device: str) -> None:
    call = CALLS[name]
    given = options_of(call, device)
    call_cache.clear()
    for _ in range(3):
        qkv = heads_of(call, device)
        copy = qkv.clone() if call.packed else tuple([x.clone() for x in qkv])
        q = qkv[:, : call.heads * call.head_dim].view(6, call.heads, call.head_dim) if call.packed else qkv[0]
        others = qkv[:, call.heads * call.head_dim :].clone() if call.packed else qkv[1].clone()
        caches, theirs = caches_of(call, device), caches_of(call, device)
        slots = torch.tensor(SLOTS, device=device)
        assert write_qkv(qkv, *caches, slots, **given, q_out=q) is q
        assert torch.equal(as_bytes(q), as_bytes(write_qkv(copy, *theirs, slots, **given)))
        now = qkv[:, call.heads * call.head_dim :] if call.packed else qkv[1]
        assert torch.equal(as_bytes(now), as_bytes(others))


def test_without_norm_and_rotation_it_is_write_kv_bit_by_bit(device: str) -> None:
    call = CALLS["nothing but the write"]
    qkv, slots = heads_of(call, device), torch.tensor(SLOTS, device=device)
    caches, theirs = caches_of(call, device), caches_of(call, device)
    for mine, other in zip(caches, theirs):
        other.copy_(mine)
    q, k, v = qkv.view(6, -1, call.head_dim).split([call.heads, call.kv_heads, call.kv_heads], dim=1)
    assert torch.equal(as_bytes(write_qkv(qkv, *caches, slots)), as_bytes(q.contiguous()))
    write_kv(k, v, *theirs, slots)
    assert all(torch.equal(as_bytes(x), as_bytes(y)) for x, y in zip(caches, theirs))


def places(dtype: torch.dtype, scale: torch.dtype, layout: str, heads: int, dims: int, device: str) -> tuple[Any, Any]:
    """(cache, scales by token) of 5 pages of 3 slots, of random bytes."""
    shape = (5, 3, heads) if layout == "NHD" else (5, heads, 3)
    dims //= 2 if dtype == INT4 else 1
    cache = torch.randint(0, 100, (*shape, dims), dtype=torch.uint8, device=device).view(dtype)
    return cache, torch.rand(shape, device=device).to(scale)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    "dtype, scale", [(INT4, F32), *((x, y) for x in (torch.int8, E4M3, E5M2) for y in (F32, HALF))], ids=str
)
def test_without_norm_and_rotation_scales_by_token_are_those_of_write_kv(
    dtype: torch.dtype, layout: str, scale: torch.dtype, device: str
) -> None:
    """One of the heads is zero, one has a NaN, and two tokens are skipped."""
    call = Call(rotary_dim=None, norms="", packed=False)
    q, k, v = heads_of(call, device)
    k[0, 1], v[2, 0, 3] = 0.0, torch.nan
    slots = torch.tensor(SLOTS, device=device)
    mine = [*places(dtype, scale, layout, 2, 32, device), *places(dtype, scale, layout, 2, 32, device)]
    theirs = [x.clone() for x in mine]
    for _ in range(2):
        write_qkv((q, k, v), mine[0], mine[2], slots, kv_layout=layout, k_scale=mine[1], v_scale=mine[3])
        write_kv(k, v, theirs[0], theirs[2], slots, kv_layout=layout, k_scale=theirs[1], v_scale=theirs[3])
        assert all(torch.equal(as_bytes(x), as_bytes(y)) for x, y in zip(mine, theirs))


@pytest.mark.parametrize("name", ["packed, all of a head", "parts, half of a head", "pairs, some of a head of 24"])
def test_int4_has_the_bits_of_write_kv_after_the_same_norm_and_rotation(name: str, device: str) -> None:
    """write_kv gets the float32 keys and values that write_qkv stores."""
    call = CALLS[name]._replace(dtype=F32)
    qkv, given = heads_of(call, device), options_of(call, device)
    heads, dims, slots = call.kv_heads, call.head_dim, torch.tensor(SLOTS, device=device)
    dense = [torch.zeros(5, 3, heads, dims, device=device) for _ in "kv"]
    write_qkv(qkv, *dense, slots, **given)
    k, v = (x.flatten(0, 1)[slots.clamp(min=0)] for x in dense)
    k[slots < 0] = v[slots < 0] = torch.nan
    mine = [*places(INT4, F32, "NHD", heads, dims, device), *places(INT4, F32, "NHD", heads, dims, device)]
    theirs = [x.clone() for x in mine]
    write_qkv(qkv, mine[0], mine[2], slots, k_scale=mine[1], v_scale=mine[3], **given)
    write_kv(k, v, theirs[0], theirs[2], slots, k_scale=theirs[1], v_scale=theirs[3])
    assert all(torch.equal(as_bytes(x), as_bytes(y)) for x, y in zip(mine, theirs))


@pytest.mark.parametrize("dtype", [torch.int8, E4M3], ids=str)
def test_a_latent_and_its_rotated_part_have_one_scale_by_token(dtype: torch.dtype, device: str) -> None:
    q, k_rope = (torch.randn(6, heads, 16, device=device).to(BF16) for heads in (6, 1))
    latent = torch.randn(6, 1, 48, device=device).to(BF16)
    k_rope[0] *= 9  # the largest number of token 0 lies there
    slots = torch.tensor(SLOTS, device=device)
    cache, scale = places(dtype, F32, "NHD", 1, 64, device)
    theirs, of_theirs = cache.clone(), scale.clone()
    write_qkv((q, latent, k_rope), cache, None, slots, k_scale=scale)
    write_kv(torch.cat([latent, k_rope], 2), None, theirs, None, slots, k_scale=of_theirs)
    assert torch.equal(as_bytes(cache), as_bytes(theirs))
    assert torch.equal(scale, of_theirs)


BY_TOKEN: dict[str, dict[str, Any]] = {
    "int8": dict(cache_dtype=torch.int8),
    "e4m3, HND, float16": dict(cache_dtype=E4M3, layout="HND", scales="per_token, float16"),
    "x-packed e5m2": dict(cache_dtype=E5M2, layout="x", head_dim=64),
    "latents": dict(cache_dtype=torch.int8, latent=True, kv_heads=1, head_dim=96, value_dim=64),
    "int4": dict(cache_dtype=INT4),
    "int4, HND, values of another width": dict(cache_dtype=INT4, layout="HND", head_dim=24, value_dim=40),
    "int8, one scale": dict(cache_dtype=torch.int8, scales="float"),
    "int8, by head": dict(cache_dtype=torch.int8, scales="per_head"),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", BY_TOKEN)
def test_normed_and_rotated_heads_have_the_scales_of_the_reference(name: str, seed: int, device: str) -> None:
    sizes: dict[str, Any] = dict(heads=4, kv_heads=2, head_dim=32, page_size=4, dtype=BF16, scales="per_token")
    run_write_qkv(Case(name, (3, 1, 9), (20, 7, 9), **sizes | BY_TOKEN[name], seed=seed), device)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, of infinity times 0 in the interpreter
def test_a_nan_of_one_head_stays_in_its_head(device: str) -> None:
    call = CALLS["packed, all of a head"]
    qkv, given = heads_of(call, device), options_of(call, device)
    caches, slots = caches_of(call, device), torch.arange(6, device=device)
    qkv = qkv.nan_to_num()
    qkv[2, call.head_dim + 3] = torch.nan  # token 2, query head 1
    qkv[3, call.heads * call.head_dim] = torch.inf  # token 3, KV head 0
    q = write_qkv(qkv, *caches, slots, **given)
    assert q.isnan().any(-1).nonzero().tolist() == [[2, 1]]
    keys = caches[0].flatten(0, 1)[:6]
    assert keys.isnan().any(-1).nonzero().tolist() == [[3, 0]]
    assert not caches[1].flatten(0, 1)[:6].isnan().any()


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_no_tokens_write_nothing(packed: bool, check: bool, device: str) -> None:
    call = Call(packed=packed)
    qkv, given = heads_of(call, device), options_of(call, device)
    qkv = qkv[:0] if packed else tuple([x[:0] for x in qkv])
    given["positions"] = given["positions"][:0]
    caches = caches_of(call, device)
    before = [as_bytes(x).clone() for x in caches]
    q = write_qkv(qkv, *caches, torch.zeros(0, dtype=torch.int32, device=device), check=check, **given)
    assert q.shape == (0, 4, 32)
    assert all(torch.equal(as_bytes(x), y) for x, y in zip(caches, before))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("cache_dtype", [BF16, E4M3], ids=str)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_latents_are_normed_and_written_before_their_rotated_part(
    layout: str, cache_dtype: torch.dtype, interleaved: bool, device: str
) -> None:
    q, k_rope = (torch.randn(5, heads, 16, device=device).to(BF16) for heads in (6, 1))
    latent, weight = torch.randn(5, 1, 48, device=device).to(BF16), torch.randn(48, device=device).to(BF16)
    angles, slots = torch.rand(9, 8, device=device), torch.tensor([3, 0, -1, 11, 5], device=device)
    shape = (3, 4, 1, 64) if layout == "NHD" else (3, 1, 4, 64)
    cache = torch.zeros(shape, device=device).to(cache_dtype)
    exact = torch.zeros(shape, dtype=torch.float64, device=device)
    given: dict[str, Any] = dict(
        cos_sin=torch.cat([angles.cos(), angles.sin()], 1), positions=torch.tensor([3, 8, 0, 1, 1], device=device),
        k_norm=weight, interleaved=interleaved, kv_layout=layout, k_scale=0.02 if cache_dtype == E4M3 else None,
    )  # fmt: skip
    want = reference.write_qkv((q, latent, k_rope), exact, None, slots, **given)
    for _ in range(2):
        check_nearest("queries", write_qkv((q, latent, k_rope), cache, None, slots, **given), want)
        check_nearest("cache", cache, exact)


def test_a_score_depends_on_the_distance_of_two_positions_alone(device: str) -> None:
    q, k = torch.randn(2, 1, 1, 8, device=device).expand(2, 2, 1, 8)
    angles = torch.arange(50, device=device)[:, None] * torch.tensor([1.0, 0.5, 0.1, 0.01], device=device)
    table, slots = torch.cat([angles.cos(), angles.sin()], 1), torch.tensor([0, 1], device=device)
    scores = []
    for at in (0, 7, 40):
        k_cache, v_cache = torch.zeros(2, 2, 1, 1, 8, device=device)
        there = torch.tensor([at, at + 5], device=device)
        rotated = write_qkv((q, k, k), k_cache, v_cache, slots, positions=there, cos_sin=table)
        scores.append((rotated[1] * k_cache[0, 0]).sum())
    assert (torch.stack(scores) - scores[0]).abs().max() < 1e-4
    assert (scores[0] - (q[0] * k[0]).sum()).abs() > 1e-2
