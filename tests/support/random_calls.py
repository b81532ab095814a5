"""Random calls: a line for each argument, whose choices go from the plainest to the rarest.

`configuration` draws the fields for which kernels are compiled, `batch` the lengths and numbers of one call.  So many
batches of one configuration cost little.  The source of random numbers is `random.Random` or hypothesis's.  The latter
shrinks what it has drawn towards the first of several choices, False and small numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from paged_attn.arguments import ARGUMENTS, BY_NAME, OPTION, REFUSED
from tests.support.cases import E4M3, E5M2, INT4, INT8, Case, is_fp8, is_scaled
from tests.support.formats import FORMATS
from tests.support.random_batches import random_decodes, random_lengths

Fields = dict[str, Any]
Draw = Callable[[random.Random, Fields], Any]
FP16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


class Limits(NamedTuple):
    """The largest sizes of a case that a machine can afford."""

    heads: int  # of a case
    head_dim: int
    keys: float  # of a sequence, as a power of two


GPU = Limits(heads=64, head_dim=256, keys=11.5)
SIMULATOR = Limits(heads=16, head_dim=256, keys=9.5)
INTERPRETER = Limits(heads=8, head_dim=64, keys=6)
TORCH = Limits(heads=16, head_dim=128, keys=7.5)


def sometimes(rng: random.Random, share: float) -> bool:
    return rng.random() >= 1 - share


def one_of(*values: Any) -> Draw:
    return lambda rng, known: rng.choice(values)


def maybe(share: float) -> Draw:
    return lambda rng, known: sometimes(rng, share)


def refused(name: str, fields: Fields) -> bool:
    """Whether an argument is refused beside another argument that these fields of a case give."""
    others = [x.argument if x.beside == name else x.beside for x in REFUSED if name in (x.argument, x.beside)]
    return any(fields.get(field) for other in others for field in BY_NAME[other].model)


def _widths(fields: Fields, widths: tuple[int, ...], most: int) -> list[int]:
    """Return those of `widths`, up to `most`, that a cache may have."""
    step = 4 if fields["cache_dtype"] == INT4 else 1
    return [n for n in widths if n <= most and n % step == 0]


# Sizes and features of models that the Hopper kernels may get.  Later lines know what earlier lines have drawn.
SIZES: dict[str, Draw] = {
    "dtype": one_of(BF16, BF16, FP16, E4M3),
    "cache_dtype": lambda rng, f: E4M3 if f["dtype"] == E4M3 else rng.choice([f["dtype"]] * 3 + [E4M3, E5M2]),
    "head_dim": one_of(128, 128, 128, 64, 64, 40, 80, 96, 192, 256),
    "page_size": one_of(16, 16, 8, 24, 32, 64, 128, 544),
    "layout": one_of("NHD", "NHD", "HND", "x"),
    "new": maybe(0.2),
    "window_size": lambda rng, f: (rng.choice([-1, -1, -1, 0, 100, 1200]), -1),
    "chunk": one_of(None, None, None, None, None, 100, 1024),
    "softcap": one_of(0.0, 0.0, 0.0, 10.0, 25.0),
    "alibi": maybe(0.1),
}
# Windows of heads in turn: heads without a window beside heads with one, by KV head or within groups; only heads with
# windows; windows to both sides.
HEAD_WINDOWS = (
    ((-1, -1), (100, -1)), ((-1, -1), (-1, -1), (64, -1), (0, -1)), ((5, -1), (70, 3), (0, 0)), ((-1, 0), (63, 50)),
)  # fmt: skip
# (rank, world, stripe): one rank; stripes of one position, of parts of pages and tiles, of whole ones, of 5 and 200.
SHARDS = ((0, 1, 16), (1, 2, 1), (0, 4, 8), (2, 3, 5), (3, 4, 16), (1, 2, 200))
GROUPS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 20, 24, 32, 33, 40, 48, 64)
# The other fields of a case for the Hopper kernels.
OPTIONS: dict[str, Draw] = {
    "kv_heads": one_of(1, 2, 3, 4),
    "heads": lambda rng, f: f["kv_heads"] * rng.choice([n for n in GROUPS if n * f["kv_heads"] <= f["most_heads"]]),
    "causal": lambda rng, f: not sometimes(rng, 0.1),
    "causal_by_seq": maybe(0.1),
    "slopes_of_seqs": maybe(0.3),
    "alibi_symmetric": maybe(0.3),
    "head_windows": one_of(*[()] * 9, HEAD_WINDOWS[0]),
    "spans": one_of(*[0] * 9, 1, 3),
    "clip_spans": maybe(0.3),
    "prefix": one_of(*[0] * 9, 20, 100),
    "sinks": maybe(0.2),
    "lse": maybe(0.4),
    "strided": maybe(0.1),
    "scales": lambda rng, f: (
        rng.choice(["none", "float", "tensor", "per_head", "per_seq"])
        if is_scaled(f["cache_dtype"]) or is_fp8(f["dtype"])
        else "none"
    ),
    "batch_invariant": lambda rng, f: not refused("batch_invariant", f) and sometimes(rng, 0.1),
    "decode_form": maybe(0.2),
    "positions": one_of("", "", "", "", "slots", "tree"),
    "gate": maybe(0.1),
    "qq_mask": one_of(0, 0, 0, 0, 0, 1, 2),
    "token_scales": maybe(0.1),
    "table": one_of("", "", "", "", "ragged", "gaps", "views"),
    # what belongs to the results of all ranks is refused beside it
    "shard": lambda rng, f: (
        None
        if any(f[name] for name in ("new", "sinks", "gate", "batch_invariant"))
        else rng.choice([None] * 14 + [*SHARDS])
    ),
}
ELSEWHERE = {"score_mod", "softmax_scale", "only"}  # fields that ANYTHING alone has
# Options without a line above, which mostly have their defaults.
OPTIONS |= {
    x.name: one_of(*[x.default] * 9, *x.others)
    for x in ARGUMENTS
    if x.kind == OPTION and hasattr(Case, x.name) and x.name not in {*SIZES, *OPTIONS, *ELSEWHERE}
}
# Anything that is legal.
ANYTHING: dict[str, Draw] = {
    **SIZES,
    "dtype": one_of(BF16, FP16, F32, E4M3, E5M2),
    "cache_dtype": lambda rng, f: rng.choice(
        [E4M3, E5M2, INT8, INT4, FP16, BF16] if is_fp8(f["dtype"]) else [f["dtype"]] * 2 + [E4M3, E5M2, INT8, INT4]
    ),
    "head_dim": lambda rng, f: rng.choice(
        _widths(f, (64, 128, 16, 32, 80, 96, 192, 256, 1, 2, 20, 24, 40, 72, 136, 250), f["most_head_dim"])
    ),
    "value_dim": lambda rng, f: rng.choice([None] * 8 + _widths(f, (64, 128, 512, 1, 40), 2 * f["most_head_dim"])),
    "layout": lambda rng, f: rng.choice(["NHD", "NHD", "HND"] + ["x"] * (f["cache_dtype"] != INT4)),
    "page_size": one_of(16, 1, 8, 12, 32, 64, 7, 128, 544),
    "softcap": one_of(0.0, 0.0, 0.0, 10.0, 25.0, 3.0),
    "alibi": maybe(0.2),
    **OPTIONS,
    "scales": lambda rng, f: (
        "per_token"
        if f["cache_dtype"] == INT4
        else rng.choice(["per_token", "per_token", "per_token, float16", OPTIONS["scales"](rng, f)])
        if is_scaled(f["cache_dtype"])
        else OPTIONS["scales"](rng, f)
    ),
    "x": lambda rng, f: (
        rng.choice([None, None, *(n for n in (1, 2, 4, 8, 16) if f["head_dim"] % n == 0)])
        if f["layout"] == "x"
        else None
    ),
    "new_dtype": lambda rng, f: (
        rng.choice([BF16, FP16]) if is_fp8(f["dtype"]) and is_scaled(f["cache_dtype"]) else None
    ),
    "out_dtype": lambda rng, f: rng.choice([None] * 4 + [F32, BF16, FP16] + [E4M3, E5M2] * (f["shard"] is None)),
    "own_out": lambda rng, f: sometimes(rng, 0.1) and f["shard"] is None,
    "shared_buffer": maybe(0.2),
    "latent": lambda rng, f: (
        sometimes(rng, 0.15)
        and f["layout"] != "x"
        and f["cache_dtype"] != INT4
        and (f["value_dim"] or f["head_dim"]) <= f["head_dim"]
    ),
    "integers": one_of(torch.int32, torch.int32, torch.int32, torch.int64),
    "qq_bias": one_of(0, 0, 0, 1, 8, 64),
    "tree": maybe(0.5),
    "bias_of_seqs": maybe(0.5),
    "softmax_scale": one_of(None, None, None, 0.3, 0.05, -0.1, 0.0),
    "bounds": maybe(0.5),
    "only": lambda rng, f: None if f["own_out"] else rng.choice([None] * 8 + ["decode", "prefill"]),
    "score_mod": one_of(*[""] * 8, "alibi", "softcap", "relative"),
}


def of_formats(names: Sequence[str]) -> dict[str, Draw]:
    """ANYTHING over caches of these FORMATS: fp8 and int4 with scales by token, int8 with scales of any kind."""

    def scales(rng: random.Random, fields: Fields) -> str:
        found: str = ANYTHING["scales"](rng, fields)
        by_token = found.startswith("per_token") or not is_fp8(fields["cache_dtype"])
        return found if by_token else rng.choice(["per_token", "per_token, float16"])

    return ANYTHING | {"cache_dtype": lambda rng, f: rng.choice(FORMATS[rng.choice(names)]), "scales": scales}


# Fields that may differ between calls of one configuration, in addition to lengths.
BATCH: dict[str, Draw] = {
    "window_size": lambda rng, f: tuple(n if n < 0 else rng.choice([n, n, n, 0, 1, 63, 64]) for n in f["window_size"]),
    # numbers that kernels get as arguments, and are not compiled for
    "head_windows": lambda rng, f: f.get("head_windows") and rng.choice(HEAD_WINDOWS),
    "chunk": lambda rng, f: f.get("chunk") and rng.choice([f["chunk"], 2, 64, 65, 200]),
    "softmax_scale": lambda rng, f: (
        f.get("softmax_scale")
        if f.get("softmax_scale") in (-0.1, 0.0)
        else rng.choice([f.get("softmax_scale")] * 2 + [0.3, 0.05])
    ),
    "softcap": lambda rng, f: f["softcap"] and rng.choice([f["softcap"], f["softcap"], 10.0, 25.0]),
    "slack": one_of(0, 0, 0, 1, 40),
    "padding": lambda rng, f: 0 if f["decode_form"] else rng.choice([0, 0, 0, 1, 3, 130]),
    "seed": lambda rng, f: rng.randrange(1000),
}
# Whether to make the checked call, if the case is `checkable`.
CHECK = maybe(0.1)


def checkable(fields: Fields, lengths: list[tuple[int, int]]) -> bool:
    """Whether a checked call accepts these lengths, (queries, keys) of each sequence.

    If queries are among the keys, a sequence with several queries needs as many keys, or a negative length (padding).
    """
    own = fields.get("causal", True) or fields.get("causal_by_seq") or fields.get("new")
    return not own or all(queries < 2 or keys < 0 or keys >= queries for queries, keys in lengths)


def drawn(rng: random.Random, lines: dict[str, Draw], **known: Any) -> Fields:
    """Return the draws of all lines, in order; known: earlier draws, which the lines may look at."""
    known = dict(known)
    for name, draw in lines.items():
        known[name] = draw(rng, known)
    return {name: known[name] for name in lines}


def configuration(rng: random.Random, limits: Limits, lines: dict[str, Draw] = ANYTHING) -> Fields:
    """Draw all fields of a case for which kernels are compiled."""
    fields = drawn(rng, lines, most_heads=limits.heads, most_head_dim=limits.head_dim)
    if not fields["causal"]:
        fields["window_size"] = fields["window_size"][0], rng.choice([-1, 0, 50])
    if fields.get("own_out"):
        fields["out_dtype"] = fields["dtype"]
    if "only" in fields and fields["decode_form"]:
        fields["only"] = None
    return fields


def batch(rng: random.Random, fields: Fields, limits: Limits, lines: dict[str, Draw] = BATCH) -> Case:
    """Draw a call of a configuration, with any lengths."""
    most = min(limits.keys, rng.choice([6.0, 8.0, 10.0, limits.keys]))
    if fields["decode_form"]:
        lengths = random_decodes(rng, most=most)
    elif sometimes(rng, 0.3):
        lengths = random_decodes(rng, drafts=True, most=most)
    else:
        lengths = random_lengths(rng, even=most > 9 and sometimes(rng, 0.3), most=most)
    pairs = [_beside_a_border(rng, *pair) for pair in zip(lengths["query_lens"], lengths["seq_lens"])]
    lengths |= dict(query_lens=tuple(q for q, _ in pairs), seq_lens=tuple(n for _, n in pairs))
    fields = lengths | fields | drawn(rng, lines, **fields)
    if "only" in fields and checkable(fields, pairs):
        fields["check"] = CHECK(rng, fields)
    return Case("drawn", **fields)


def any_case(rng: random.Random, limits: Limits = GPU) -> Case:
    """Draw a case for the Hopper kernels."""
    fields = configuration(rng, limits, SIZES | OPTIONS)
    return batch(rng, fields, limits, {name: BATCH[name] for name in ("padding", "seed")})


def _beside_a_border(rng: random.Random, queries: int, keys: int) -> tuple[int, int]:
    """Move the end of every fourth sequence to a multiple of 64 keys, or a key before or behind; make some negative."""
    if keys <= 0 or keys < queries or not sometimes(rng, 0.25):
        return queries, -5 if keys == 0 and sometimes(rng, 0.05) else keys
    return queries, max(queries, round(keys / 64) * 64 + rng.choice([0, -1, 1]))
