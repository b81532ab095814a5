"""Kernels that writes and calls over whole pages ask for and that were not prepared, for an H200.

Run as a program, since kernels are compiled ones there: `python -m tests.preparation.other_calls_asked NAME ...` prints
as JSON, for each of MODELS named, how many kernels are prepared and which ones calls ask for beside these.
"""

from __future__ import annotations

import functools
import json
import random
import sys
from typing import Any

import torch

import paged_attn
from paged_attn.launching.platform import Device
from paged_attn.preparation.model import Lengths, Model
from paged_attn.preparation.other_calls import WRITES
from paged_attn.preparation.processes import compile_call
from tests.preparation import keys
from tests.preparation.models import BF16, E4M3, LATENT, LLAMA

H200 = Device("sm90", 132)
INT8, INT4, HALF = torch.int8, torch.uint8, torch.float16
MODELS: dict[str, dict[str, Any]] = {
    "packed": dict(qkv="packed"),
    "norms": dict(qkv="packed", qk_norm=BF16, rotary_dim=64),
    "separate, pairs": dict(qkv="separate", interleaved=True, cos_sin=torch.float32),
    "nothing is rotated": dict(qkv="separate", rotary_dim=0, qk_norm=torch.float32),
    "sections": dict(qkv="packed", mrope_sections=(16, 24, 24)),
    "values of another width": dict(qkv="separate", head_dim=192, value_dim=128),
    "x-packed": dict(qkv="packed", kv_layout="x"),
    "side by side, HND": dict(qkv="packed", side_by_side=True, kv_layout="HND"),
    "separate, side by side, HND": dict(qkv="separate", side_by_side=True, kv_layout="HND"),
    "fp8": dict(qkv="packed", cache_dtype=E4M3),
    "fp8, scales in tensors": dict(qkv="packed", cache_dtype=E4M3, scales="tensor"),
    "fp8 by head": dict(qkv="separate", cache_dtype=E4M3, scales="per_head"),
    "fp8 by sequence": dict(qkv="packed", cache_dtype=E4M3, scales="per_seq"),
    "fp8 queries": dict(qkv="packed", dtype=E4M3, cache_dtype=E4M3),
    "int8 by token": dict(qkv="packed", cache_dtype=INT8, scales="per_token", kv_layout="HND", qk_norm=BF16),
    "fp8 by token": dict(qkv="separate", cache_dtype=E4M3, scales="per_token_float16"),
    "int4": dict(qkv="packed", cache_dtype=INT4, scales="per_token", qk_norm=BF16),
    "int4, HND": dict(qkv="separate", cache_dtype=INT4, scales="per_token", kv_layout="HND", head_dim=96),
    "latent": LATENT | dict(qkv="separate", qk_norm=BF16),
    "latent, int8 by token": LATENT | dict(qkv="separate", cache_dtype=INT8, scales="per_token"),
    "ragged table": dict(page_indices=torch.int32, qkv="packed"),
}  # fmt: skip


def model_of(name: str, **changes: Any) -> Model:
    return Model(**LLAMA | dict(pages=True) | MODELS[name] | changes)


def prepared(model: Model) -> set[keys.Key]:
    """What is compiled, as compiling processes do it, for some batch of the model."""
    return keys.asked(functools.partial(compile_call, model, Lengths(False, 3, 3, 1, 100), WRITES))


class Layer:
    """Caches of a model of 7 pages, their scales, and calls over them."""

    def __init__(self, model: Model, pages: int = 7) -> None:
        self.model, self.pages = model, pages
        page, heads, together = model.page_size, model.kv_heads, 2 if model.cache_dtype == INT4 else 1
        dim, value_dim = model.head_dim // together, model.value_width // together
        slots = (heads, page) if model.kv_layout == "HND" else (page, heads)
        empty = functools.partial(torch.empty, dtype=model.cache_dtype)
        if model.kv_layout == "x":
            x = 16 // model.cache_dtype.itemsize
            self.k, self.v = empty(pages, heads, dim // x, page, x), empty(pages, heads, dim, page)
        elif model.side_by_side:
            self.k, self.v = empty(pages, *slots, dim + value_dim).split((dim, value_dim), -1)
        else:
            self.k, self.v = empty(pages, *slots, dim), empty(pages, *slots, value_dim)
        self.scales: list[Any] = [None, None]
        if model.cache_dtype.itemsize == 1:
            by_slot = functools.partial(torch.empty, pages, *slots)
            made = dict(
                number=lambda: 0.25, tensor=lambda: torch.empty(1), per_head=lambda: torch.empty(heads),
                per_seq=lambda: torch.empty(1, heads), per_token=by_slot,
                per_token_float16=functools.partial(by_slot, dtype=HALF),
            )[model.scales]  # fmt: skip
            self.scales = [made(), made()]
        if model.latent:
            self.scales[1] = None

    def write(self, tokens: int, form: str) -> None:
        """A call of write_qkv.  form: where queries go."""
        model = self.model
        heads, kv_heads, dim, value_dim = model.heads, model.kv_heads, model.head_dim, model.value_width
        dim -= value_dim if model.latent else 0
        widths = heads * dim, kv_heads * dim, kv_heads * value_dim
        packed = torch.empty(tokens, sum(widths), dtype=BF16)
        q, k, v = (x.unflatten(1, (n, -1)) for x, n in zip(packed.split(widths, 1), (heads, kv_heads, kv_heads)))
        qkv: Any = packed if model.qkv == "packed" else (q, v, k) if model.latent else (q, k, v)
        turned = dim if model.rotary_dim is None else model.rotary_dim
        options: dict[str, Any] = dict(kv_layout="HND" if model.kv_layout == "HND" else "NHD", k_scale=self.scales[0])
        if turned:
            shape = tokens if model.mrope_sections is None else (3, tokens)
            options["positions"] = torch.zeros(shape, dtype=torch.int64)
            options["cos_sin"] = torch.empty(131072, turned, dtype=model.cos_sin or BF16)
            options |= dict(interleaved=model.interleaved, mrope_sections=model.mrope_sections)
        if model.qk_norm is not None:
            options["k_norm"] = torch.empty(value_dim if model.latent else dim, dtype=model.qk_norm)
            options |= {} if model.latent else dict(q_norm=torch.empty(dim, dtype=model.qk_norm))
            options |= dict(eps=1e-5, norm_offset=1.0)
        if not model.latent:
            options["v_scale"] = self.scales[1]
        if model.dtype == E4M3:
            options |= dict(q_out=torch.empty(q.shape, dtype=E4M3), q_scale=0.5)
        elif form != "new":
            options["q_out"] = q if form == "in place" else torch.empty(q.shape, dtype=BF16)
        slots = torch.full((tokens,), -1, dtype=torch.int64)
        v_cache = None if model.latent else self.v
        paged_attn.write_qkv(qkv, self.k, v_cache, slots, **options, check=False)
        if model.side_by_side:  # as a graph of torch.compile does it
            out = options.pop("q_out", torch.empty(q.shape, dtype=BF16))
            graph = torch.ops.paged_attn
            graph.write_queries_keys(
                [qkv] if qkv is packed else [*qkv], self.k, self.v, slots, out, **options, check=False
            )
            graph.write_values(k, v, self.k, self.v, slots, kv_layout=options["kv_layout"], check=False)

    def whole_pages(self, rng: random.Random) -> None:
        """Copies, moves and gathers of some pages, in some layers."""
        model, pairs = self.model, rng.randint(1, 40)
        ids = torch.zeros(pairs, dtype=torch.int32)
        layers = [Layer(model, self.pages) for _ in range(rng.randint(1, 3))]
        caches = [x for layer in layers for x in (layer.k, layer.v)[: 1 if model.latent else 2]]
        paged_attn.copy_pages(caches, ids, ids, check=False)
        paged_attn.move_pages(caches, [torch.empty_like(x) for x in caches], ids, ids, check=False)
        seqs, tokens = rng.randint(1, 9), rng.randint(1, 300)
        table: Any = torch.zeros(seqs, 20, dtype=torch.int32)
        if model.page_indices is not None:
            table = torch.zeros(seqs + 1, dtype=torch.int32), table.flatten()
        for cache, scale in ((self.k, self.scales[0]), (self.v, self.scales[1])):
            layout = "HDN" if model.kv_layout == "x" and cache is self.v else model.kv_layout
            paged_attn.gather_pages(
                cache, table, torch.zeros(seqs, dtype=torch.int32), kv_layout="NHD" if layout == "x" else layout,
                tokens=tokens, dtype=BF16 if cache.dtype.itemsize == 1 else None,
                scale=self.scales[0] if model.latent else scale, check=False,
            )  # fmt: skip


def main() -> None:
    keys.pose_as(H200)
    for name in sys.argv[1:]:
        name, _, other = name.partition(" as ")
        model, rng, asked = model_of(name), random.Random(0), set()
        ready = prepared(model_of(other) if other else model)
        layer = Layer(model)
        for tokens in (1, 2, 7, 16, 33, 1200, 1201):  # the last two are more than a call of few tokens has
            for form in ("new", "given", "in place"):
                asked |= keys.asked(functools.partial(layer.write, tokens, form))
            asked |= keys.asked(functools.partial(layer.whole_pages, rng))
        missing = [f"{kernel}: {key}" for kernel, key in sorted(asked - ready)]
        print(json.dumps(dict(name=name, kernels=sorted({kernel for kernel, _ in asked}), missing=missing)), flush=True)


if __name__ == "__main__":
    main()
