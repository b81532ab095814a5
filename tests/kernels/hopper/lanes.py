"""Rows of a warp as a product's lanes hold them, and what assembly that weighs scores makes of these."""

from __future__ import annotations

import numpy as np

from paged_attn.kernels.hopper.asm.weights import _AGAIN, _PAIRS, CAPS, MAX_NEGLIGIBLE_EXPONENT
from tests.simulator import assembly
from tests.simulator.assembly import LANES

ROWS = 16  # of a warp; lane i has rows i // 4 and i // 4 + 8
UNIT, NOTHING = np.float32(1.3), np.float32(-np.inf)
CAPPED_UNIT = np.float32(50.0 * np.log2(np.e))


def by_lane(scores: np.ndarray) -> np.ndarray:
    """[ROWS, N] as a product's lanes have them: [pairs of a lane, 2, 32], its two rows in turn."""
    pairs = np.arange(scores.shape[1] // 4)[:, None]
    row = LANES // 4 + 8 * (pairs % 2)
    column = pairs // 2 * 8 + LANES % 4 * 2
    return np.stack([scores[row, column], scores[row, column + 1]], 1)


def numbers(words: np.ndarray, dtype: str = "bf16") -> np.ndarray:
    """The two numbers of 16 bits of each word."""
    if dtype == "fp16":
        return words[..., None].view(np.float16).astype(np.float32)
    return np.stack([words << 16, words & np.uint32(0xFFFF0000)], -1).view(np.float32)


def by_row(words: np.ndarray, dtype: str) -> np.ndarray:
    """The other way around, of words [pairs, 32]."""
    words = numbers(words, dtype)
    found = np.full((ROWS, 4 * len(words)), np.nan, np.float32)
    for pair, word in enumerate(words):
        for half in (0, 1):
            column = pair // 2 * 8 + LANES % 4 * 2 + half
            found[LANES // 4 + 8 * (pair % 2), column] = word[:, half]
    return found


def of_lanes(halves: np.ndarray) -> np.ndarray:
    """`by_lane` the other way around, of all even numbers, then all odd ones."""
    halves = halves.reshape(2, -1, 32)
    pair = np.arange(halves.shape[1])[:, None]
    found = np.full((ROWS, 4 * halves.shape[1]), np.nan, np.float32)
    for half in (0, 1):
        found[LANES // 4 + 8 * (pair % 2), pair // 2 * 8 + LANES % 4 * 2 + half] = halves[half]
    return found


def of_rows(values: np.ndarray) -> np.ndarray:
    """[2, 32] of lanes as [ROWS, 4]."""
    return values.reshape(2, 8, 4).reshape(ROWS, 4)


def weigh(
    scores: np.ndarray,
    maxima: np.ndarray,
    shift: float,
    relative: bool,
    results: np.ndarray,
    any_size: bool = False,
    capped: tuple[int, float] = (0, 0.0),
    dtype: str = "bf16",
) -> tuple[np.ndarray, ...]:
    """What `weigh_pairs` and `weigh_again` make of scores [ROWS, N] and results [ROWS, some N].

    (weights [ROWS, N], sums by lane, maxima, decays [ROWS, 4], results).
    capped: (terms of a polynomial for tanh(score * a), a); 0: scores are not.
    """
    pairs = scores.shape[1] // 4
    x, shifts = by_lane(scores), np.full(32, shift, np.float32)
    terms, inner = capped
    row = np.arange(pairs)[:, None] % 2 * 8 + LANES // 4
    tops = maxima[row]
    base = np.where(tops > NOTHING, tops, 0).astype(np.float32) - shifts
    units = np.full(32, CAPPED_UNIT if terms else UNIT)
    offsets = [shifts] * pairs
    coefficients, known = [units], []
    if terms:
        cap, largest = CAPS[terms], CAPPED_UNIT * np.float32(CAPS[terms].largest)
        coefficients = [units * np.float32(y * inner ** (2 * i + 1)) for i, y in enumerate(cap.coefficients)]
        known = [
            np.full(32, y, np.float32)
            for y in (inner, -MAX_NEGLIGIBLE_EXPONENT - largest, largest)
            for _ in range(pairs)
        ]
    if relative:
        x, units = (x * UNIT - base[:, None]).astype(np.float32), np.ones(32, np.float32)
        offsets = [y + shifts for y in base]
    words, sums = [], np.zeros((2, 32), np.float32)
    for k in range(pairs):
        more = [] if relative else [*coefficients, -base[k]]
        word, added, *_ = assembly.run(_PAIRS[dtype, max(0, len(more) - 1)], [None, None, x[k, 0], x[k, 1], *more])
        words.append(word)
        sums[k % 2] += added.view(np.float32)
    unwritten = [None] * (3 * pairs)
    before = [*by_lane(results).swapaxes(0, 1).reshape(-1, 32)]  # even ones and odd ones
    many = [sums[k % 2] for k in range(pairs)]
    inputs = [*words, *x[:, 0], *x[:, 1], *many, *tops, *[units] * pairs, *offsets, *before, *known]
    text, constraints = _AGAIN[dtype, pairs, len(before) // pairs, any_size, terms]
    assert len(constraints.split(",")) == len(words) + len(unwritten) + len(before) + len(inputs)
    found = assembly.run(text, [*words, *unwritten, *before, *inputs])
    rest = (np.stack(found[n * pairs : n * pairs + 2]).view(np.float32) for n in (1, 2, 3))
    after = np.stack(found[4 * pairs : 4 * pairs + len(before)]).view(np.float32)
    return by_row(np.stack(found[:pairs]), dtype), *map(of_rows, rest), of_lanes(after)


def rows_of_scores(columns: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(scores, maxima so far): ordinary rows, and in some each what may be wrong with one."""
    random = np.random.default_rng(seed)
    scores = random.normal(size=(ROWS, columns)).astype(np.float32) * 1.5
    maxima = random.normal(size=ROWS).astype(np.float32) + 3
    maxima[1] = NOTHING  # sees its first keys
    maxima[2], scores[2] = NOTHING, NOTHING  # has seen none, and sees none
    scores[3] = NOTHING  # sees none now
    scores[4, 7] = 60  # one key that stands out
    scores[13] += 40  # all of them
    scores[5] += 3  # higher than before, and not by far
    maxima[6] = 50  # nothing to speak of
    maxima[7], scores[7] = NOTHING, NOTHING
    scores[7, 9] = -300
    maxima[10] = np.inf  # beside such a sink nothing counts
    scores[8, 3], scores[9, 1] = np.nan, np.inf
    return scores, maxima
