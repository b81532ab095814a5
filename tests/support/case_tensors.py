"""Tensors of a case: random where a call may read, poison everywhere else."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paged_attn.records.key_bounds import key_bounds_of
from tests.support.formats import INT4, INT8, bits, is_fp8, is_scaled, stored, with_zero

if TYPE_CHECKING:
    from tests.support.cases import Case

BAD_PAGE = 2**31 - 1
# Forms of scales that are tensors -> function of (scales, number of sequences) that makes them.  Scales are one number,
# one for each KV head, one for each sequence and KV head, or by token.
SCALES = {
    "tensor": lambda x, seqs: x,
    "scalar": lambda x, seqs: x[0],
    "per_head": lambda x, seqs: x,
    "per_head, a row": lambda x, seqs: x[None],
    "per_head, expanded": lambda x, seqs: x.expand(seqs, -1),
    "per_seq": lambda x, seqs: x,
    "per_seq, turned": lambda x, seqs: x.t().contiguous().t(),
    "per_token": lambda x, seqs: x,
    "per_token, float16": lambda x, seqs: x,
}
# Factors on scales, 1 for fp8, with which normal numbers fill most of the range of int8 and of int4.
STEPS = {INT8: 1 / 32, INT4: 1 / 3}


def numbers(shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator, scale: Any = None) -> Tensor:
    """Return normal numbers divided by a scale, or by its mean, because a call multiplies stored numbers by it."""
    values = torch.randn(shape, generator=rng, device=rng.device)
    if scale is not None:
        values = values / (scale.mean() if isinstance(scale, Tensor) else scale)
    return values.to(dtype)


def nans(shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> Tensor:
    if is_scaled(dtype):  # 0x7F is NaN in fp8; int8 has no NaN, but 127 is far from the numbers of a case
        return torch.full(shape, 0x7F, dtype=torch.uint8, device=device).view(dtype)
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def scales_of(case: Case, rng: torch.Generator) -> dict[str, Any]:
    dtypes = {"q_scale": case.dtype, "k_scale": case.dtype_of_cache, "v_scale": case.dtype_of_cache}
    scales: dict[str, Any] = {name: 1.0 for name, dtype in dtypes.items() if is_scaled(dtype)}
    if case.scales == "float":
        scales = {name: {"q_scale": 0.5, "k_scale": 0.75, "v_scale": 1.25}[name] for name in scales}
    elif case.scales != "none":
        shape: tuple[int, ...] = (1,) if not case.scales.startswith(("per_head", "per_seq")) else (case.kv_heads,)
        if case.scales.startswith("per_seq"):
            shape = len(case.seq_lens), case.kv_heads
        scales = {name: 0.5 + torch.rand(shape, generator=rng, device=rng.device) for name in scales}
    scales = {name: STEPS.get(dtypes[name], 1) * scale for name, scale in scales.items()}
    if is_fp8(case.dtype_of_out):
        as_tensor = case.scales in SCALES
        scales["out_scale"] = torch.tensor([case.out_scale], device=rng.device) if as_tensor else case.out_scale
    return scales


def poisoned(case: Case, of_seqs: Tensor) -> Tensor:
    """Return `of_seqs` [seqs, n] with NaN in the rows of sequences without keys."""
    empty = torch.tensor([n <= 0 for n in case.seq_lens], dtype=torch.bool, device=of_seqs.device)
    return of_seqs.masked_fill(empty[:, None], torch.nan)


def slopes_of(case: Case) -> Tensor:
    """Return slopes [heads], or [seqs, heads] with NaN for sequences without keys; strided: a slice."""
    slopes = 2.0 ** -(8.0 * torch.arange(1, case.heads + 1) / case.heads)
    if not case.slopes_of_seqs:
        return slopes
    wide = torch.full((len(case.seq_lens), case.heads + case.strided), torch.nan)
    factor = 0.5 + torch.rand(len(case.seq_lens), 1, generator=torch.Generator().manual_seed(case.seed))
    wide[:, : case.heads] = poisoned(case, factor * slopes)
    return wide[:, : case.heads]


def positions_of(case: Case) -> Tensor:
    """Return query positions [tokens] int32: places, or for nodes of trees context + depth.

    A node's parent is one of the eight nodes before it, or none.  Every third sequence is not a tree.  Padding, and
    tokens that `only` leaves out, have poison.
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


def windows_of(case: Case, device: torch.device | str) -> Tensor:
    """Return the window of each head, [heads, 2]; strided: a slice of a wider tensor."""
    wider = torch.full((case.heads, 2 + case.strided), BAD_PAGE, dtype=case.integers)
    wider[:, :2] = torch.tensor(case.windows)
    return wider.to(device)[:, :2]


def mask_of(case: Case, rng: torch.Generator) -> Tensor:
    """Return a `qq_mask` [tokens, words] int32: half of the bits are set, and each query's own bit if it has one."""
    shape, least = (case.tokens, case.qq_mask), -(2**31)
    bits = torch.randint(least, -least, shape, generator=rng, device=rng.device, dtype=torch.int32)
    index = torch.cat([torch.arange(n) for n in (*case.query_lens, case.padding)])
    for token, i in enumerate(index.tolist()):
        if i < 32 * case.qq_mask:
            bits[token, i // 32] |= least if i % 32 == 31 else 1 << i % 32
    wider = torch.randint(least, -least, (case.tokens, case.qq_mask + 1), generator=rng, device=rng.device)
    wider[:, : case.qq_mask] = bits
    return wider.int()[:, : case.qq_mask] if case.strided else bits


def token_scales_of(case: Case, scale: Any, rng: torch.Generator) -> Tensor:
    """Return a random scale of each token, times the scale of fp8 queries; NaN in padding and for empty sequences."""
    of_token = 0.5 + torch.rand((case.tokens, 1), generator=rng, device=rng.device)
    seen = [n > 0 for n, queries in zip(case.seq_lens, case.query_lens) for _ in range(queries)]
    of_token[~torch.tensor(seen + [False] * case.padding, dtype=torch.bool)] = torch.nan
    if not is_fp8(case.dtype):
        return of_token if case.strided else of_token.flatten()
    if not isinstance(scale, Tensor):
        return of_token * scale
    if case.scales.startswith("per_seq"):
        seq = [seq for seq, queries in enumerate(case.query_lens) for _ in range(queries)] + [0] * case.padding
        return of_token * scale[torch.tensor(seq, dtype=torch.int64, device=rng.device)]
    return of_token * scale.reshape(-1)[: case.kv_heads]  # one for all heads, or one for each KV head


def gate_of(case: Case, dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    """Return a gate [tokens, heads, value_dim] of normal numbers times 3; NaN in padding and for empty sequences."""
    heads = case.heads * (1 + case.strided)
    gate = 3 * numbers((case.tokens, heads, case.value_width), dtype, rng)[:, : case.heads]
    seen = [n > 0 for n, queries in zip(case.seq_lens, case.query_lens) for _ in range(queries)]
    gate[~torch.tensor(seen + [False] * case.padding, dtype=torch.bool)] = torch.nan
    return gate


def new_of(case: Case, rng: torch.Generator) -> tuple[Tensor, Tensor | None]:
    """Return k_new [tokens, kv_heads, head_dim] and v_new (latent: None), with NaN in padding and before position 0."""
    pos = torch.cat([torch.arange(c, c + n) for c, n in zip(case.context_lens, case.query_lens, strict=True)])
    live = torch.cat([pos >= 0, torch.zeros(case.padding, dtype=torch.bool)]).to(rng.device)
    widest = max(case.head_dim, case.value_width)
    both = numbers((case.tokens, 2 * case.kv_heads, widest), case.dtype_of_new, rng)
    bits(both)[~live] = bits(nans((1,), both.dtype, rng.device))
    k, v = both.split(case.kv_heads, dim=1)
    k, v = k[..., : case.head_dim], v[..., : case.value_width]
    if case.latent:
        return (k if case.strided else k.contiguous()), None
    return (k, v) if case.strided else (k.contiguous(), v.contiguous())


def caches_of(case: Case, scales: dict[str, Any], rng: torch.Generator, filled: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return page_table [seqs, columns], K and V caches: random numbers in live slots, poison elsewhere.

    Scales by token are added to `scales`.  filled: False leaves the caches uninitialised.
    """
    page, device = case.page_size, rng.device
    query_lens, contexts = torch.tensor(case.query_lens), torch.tensor(case.context_lens)
    held = (contexts if case.new else torch.tensor(case.seq_lens)).clamp(min=0)  # keys in the cache
    lefts = [left for left, _ in case.windows]
    first = key_bounds_of(case)._replace(left=max(lefts) if min(lefts) >= 0 else -1).first_key(contexts)
    if case.spans and not case.clip_spans:
        for seq, ranges in enumerate(spans_of(case)):
            first[seq] = max(0, min([int(first[seq]), *[a for a, b in ranges if a <= case.context_lens[seq] < b]]))
    own = key_bounds_of(case).own_before
    first, held, prefix = own(first), own(held), own(torch.tensor(case.prefix_lens))
    first = torch.where(query_lens == 0, held, first)  # without queries no page has to be live
    columns = torch.arange(int((held + page - 1).max()) // page + 2)  # two columns past the longest
    live = (columns >= first[:, None] // page) & (first < held)[:, None]
    live |= (columns * page < prefix[:, None]) & (query_lens > 0)[:, None]
    live &= columns * page < held[:, None]
    seq, column = live.nonzero(as_tuple=True)
    left = (held[:, None] - columns * page)[live]  # keys from the start of each live page to the end

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
    caches = _empty_caches(case, num_pages, device, nans if filled else _memory)
    named = (("k_scale", case.head_dim), ("v_scale", case.value_width))
    by_slot = case.scales.startswith("per_token") and is_scaled(case.dtype_of_cache)
    for cache, (name, dim) in list(zip(caches, named))[: 2 - case.latent]:
        scale = scales.get(name, 1.0)
        if by_slot:
            slots = (num_live, page, case.kv_heads)
            scale = scale * (0.5 + torch.rand(slots, generator=rng, device=device))
            if cache.dtype == INT4:
                scale = with_zero(scale, torch.randint(16, slots, generator=rng, device=device))
            scales[name] = slot_scales(case, num_pages, ids, scale, dead)
            scale = scale.to(scales[name].dtype).float()[..., None]
        if not filled:
            continue
        zero: Any = 0
        if cache.dtype == INT4:
            words = scale.view(torch.int32)
            scale, zero = (words & -16).view(torch.float32), words & 15
        keys = torch.randn(num_live, page, case.kv_heads, dim, generator=rng, device=device)
        if isinstance(scale, Tensor) and not by_slot:
            scale = scale[:, None] if scale.ndim == 1 else scale[seq.to(device), None, :, None]
        keys = keys / scale + zero
        keys = stored(
            keys.masked_fill_(dead[:, :, None, None], 127.0 if cache.dtype in STEPS else torch.nan), cache.dtype
        )
        if cache.dim() == 5:  # packed K as [pages, page_size, kv_heads, head_dim // x, x]
            bits(cache).permute(0, 3, 1, 2, 4)[ids.to(device)] = bits(keys).unflatten(-1, (-1, cache.shape[4]))
        else:
            order = {"NHD": (0, 1, 2, 3), "HND": (0, 2, 1, 3), "x": (0, 3, 1, 2)}[case.layout]
            bits(cache).permute(order)[ids.to(device)] = bits(keys)
    if by_slot and case.latent:  # the scales of keys are those of values, too
        scales["v_scale"] = None
    return table.to(device)[:, : len(columns)], *caches


def slot_scales(case: Case, num_pages: int, ids: Tensor, scale: Tensor, dead: Tensor) -> Tensor:
    """Return scales by token of all pages: `scale` [live pages, page_size, kv_heads] in pages `ids`, NaN elsewhere.

    For a strided case they are a slice of a wider tensor.
    """
    dtype = torch.float16 if case.scales.endswith("float16") else torch.float32
    rows = scale.masked_fill(dead[:, :, None], torch.nan).to(dtype)
    rows = rows if case.layout == "NHD" else rows.transpose(1, 2)
    wide = nans((num_pages, *rows.shape[1:-1], rows.shape[-1] + 3 * case.strided), dtype, scale.device)
    found = wide[..., : rows.shape[-1]]
    found[ids.to(scale.device)] = rows
    return found


def ragged(case: Case, table: Tensor) -> tuple[Tensor, Tensor]:
    """Return (indptr, indices) of a page table, its poison included; more poison is behind the last row.

    With `gaps`, poison is behind other rows, too.
    """
    held = key_bounds_of(case).own_before(torch.tensor(case.context_lens if case.new else case.seq_lens).clamp(min=0))
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


def _empty_caches(case: Case, num_pages: int, device: Any, made: Callable[..., Tensor] = nans) -> tuple[Tensor, Tensor]:
    """Return K and V caches of the case's layout, made by `made`; in a shared buffer each page holds its K and V."""
    dtype, heads, page = case.dtype_of_cache, case.kv_heads, case.page_size
    dim, value_dim = case.head_dim, case.value_width
    x = case.x or math.gcd(dim, 16 // dtype.itemsize)
    if dtype == INT4:
        dim, value_dim = dim // 2, value_dim // 2
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


def spans_of(case: Case) -> list[list[list[int]]]:
    """Return spans [seqs, spans + 1, 2]: disjoint ranges of positions, some across the first query, and an empty one.

    A span may end past the last key.  Empty spans are [-1, -1].
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
