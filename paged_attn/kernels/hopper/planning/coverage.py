"""The calls that Hopper kernels can serve, their regimes and launches, and the scratch that a launch needs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ....launching.locks import FIRST
from ....launching.scratch import Need
from ....records.plan import Launch
from ....records.problem import Problem
from ...common.score_mod import ScoreMod
from .block_tiles import blocks_take
from .conditions import all_rows_are_few, blocks_are_parts
from .operands import packed_has_a_kernel, scaled_rows_are_columns
from .regimes import launches as launches_of
from .regimes import regime_of
from .shapes import in_boxes
from .whole_pages import copies, copies_in_16_bits
from .wide_heads import shares_take

__all__ = ["copies", "launches", "need_of", "regime", "uncovered"]

COUNTERS_PER_LAUNCH = 4  # counters before those of pieces: two of items taken, one of ended programs, one unused

# (condition, what a call asks for where the condition is false).  In later conditions, `itemsize > 2` lets caches of 32
# bits pass, because the first condition refuses them.
CONDITIONS: tuple[tuple[Callable[[Problem], bool], str], ...] = (
    (
        lambda p: p.compute in (torch.float16, torch.bfloat16) and p.query.itemsize <= 2 and p.cache.itemsize <= 2,
        "float32",
    ),
    (
        lambda p: not p.slot_scales or scaled_rows_are_columns(p) or copies_in_16_bits(p) is not None,
        "scales by token of latents, x-packed caches or beside new keys, of fp8 queries, or of copies beyond 1 GiB",
    ),
    (lambda p: p.query.itemsize != 1 or p.cache.itemsize == 1, "fp8 queries over a cache that is not"),
    (
        lambda p: not p.packed or p.cache.itemsize > 2 or p.batch_invariant or packed_has_a_kernel(p),
        "more than few rows or new keys over an x-packed cache, but by prefills over 16 bits in pages of 16 n tokens",
    ),
    (lambda p: not p.packed or not p.batch_invariant, "batch_invariant over an x-packed cache"),
    (
        lambda p: p.rows_per_page > 0 or p.cache.itemsize > 2 or (p.packed and not packed_has_a_kernel(p)),
        "a cache not in steps of 16 bytes",
    ),
    (in_boxes, "pages of other than a multiple of 8 tokens"),
    (
        lambda p: (p.head_dim % 8 == 0 and 32 < p.head_dim <= 256) or shares_take(p) or blocks_take(p),
        "a head_dim other than 40..256 in steps of 8",
    ),
    (lambda p: p.value_width == p.head_dim or shares_take(p) or blocks_take(p), "values of another width"),
    (
        lambda p: p.heads // p.kv_heads <= 64 or blocks_are_parts(p) or shares_take(p),
        "more than 64 heads on a KV head but by long prefills",
    ),
    (lambda p: not all_rows_are_few(p), "few queries of few keys"),
    (lambda p: not p.gap, "a prefix that stays visible behind a window or a chunk"),
    (lambda p: not p.head_windows or not p.latent, "windows by head over keys that hold their values"),
    (lambda p: p.kv_heads <= p.device.multiprocessors, "more KV heads than multiprocessors"),
    (
        lambda p: not p.new or p.new_box,
        "keys outside the cache of another type than those in it, or not in steps of 16 bytes",
    ),
    # the bank of results (`fold.make_bank`) would leave no shared memory for keys of larger heads
    (
        lambda p: not p.batch_invariant or (p.cache.itemsize == 2 and p.head_dim <= 128),
        "batch_invariant over an fp8 cache, or of head_dim above 128",
    ),
)


def uncovered(p: Problem) -> list[str]:
    """Return what a call asks for that the Hopper kernels do not have."""
    wanted = [asked for holds, asked in CONDITIONS if not holds(p)]
    if p.score_mod is not None and not wanted and (why := _why_not_compiled(p.score_mod)):
        wanted.append(f"a score_mod that Gluon does not compile ({why})")
    return wanted


def _why_not_compiled(asked: ScoreMod) -> str | None:
    """Return Gluon's message about a score_mod that it does not compile; None: it compiles."""
    with FIRST:
        from ..score_mod_trial import why_not  # Gluon is optional

    return why_not(asked)


def launches(p: Problem) -> tuple[Launch, ...]:
    """Return the launches of a call's regime."""
    return launches_of(p)


def regime(p: Problem) -> tuple[str, str]:
    """Return name and reason of a call's regime."""
    row = regime_of(p)
    return row.name, row.reason


def need_of(launch: Launch) -> Need:
    """Return the scratch of a launch; its size depends on the plan (so on bounds of lengths), not on lengths."""
    shape, pipe = launch.shape, launch.pipe
    slots = launch.slots if shape.SPLIT else 0
    states = slots * shape.LIVE * (shape.VALUE_PADDED + 2) + launch.cuts
    blocks = launch.programs if pipe.SHARES else slots  # maximum number that are cut at a time
    firsts = slots if pipe.GROUPED else 0  # a counter for the first piece of each group
    counters = COUNTERS_PER_LAUNCH + (blocks * pipe.CONSUMERS + firsts if launch.merge is None else 0)
    if launch.beside is not None:
        more = need_of(launch.beside)
        states, counters = states + more.states, counters + more.counters
    return Need(states, counters, launch.merge is not None)
