"""Assembly that decides, against what it is to compute, instruction by instruction."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import paged_attn.kernels.hopper.asm
from paged_attn.kernels.hopper.asm import caps, narrowing, registers
from paged_attn.kernels.hopper.asm.maxima import _RAISE, _RAISE_FP8, FP8_SLACK, SLACK
from paged_attn.kernels.hopper.asm.numbers import _LOGISTIC
from paged_attn.kernels.hopper.asm.weights import _AGAIN, _PAIRS, MAX_SUM_PER_THREAD, weigh_again, weigh_pairs
from paged_attn.kernels.hopper.consuming import softmax
from tests.simulator import COMPILER, assembly
from tests.simulator.assembly import LANES

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

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
        cap, largest = caps.CAPS[terms], CAPPED_UNIT * np.float32(caps.CAPS[terms].largest)
        coefficients = [units * np.float32(y * inner ** (2 * i + 1)) for i, y in enumerate(cap.coefficients)]
        known = [
            np.full(32, y, np.float32)
            for y in (inner, -caps.MAX_NEGLIGIBLE_EXPONENT - largest, largest)
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


@pytest.mark.parametrize("text", [registers._BESIDE_BF16.value, registers._BESIDE_F16.value])
def test_results_of_neighbouring_lanes_change_places(text: str) -> None:
    """Of 16 dims a lane has 2 t, 2 t + 1 and those 8 further, and then four that are neighbours."""
    row, t = LANES // 4, LANES % 4
    values = (16 * row + 2 * t)[None] + np.array([0, 1, 8, 9])[:, None]  # which 16 bits hold
    words = np.stack(assembly.run(text, [None, None, *values.astype(np.float32)])[:2], 1)
    found = numbers(words) if "bf16" in text else words.view(np.float16)
    first = 16 * row + 8 * (t % 2) + 4 * (t // 2)
    assert (found.reshape(32, 4) == first[:, None] + np.arange(4)).all()


@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize("shift", [0.0, -7.5])
@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("any_size", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_rows_are_weighed_again_where_their_maximum_was_too_small(
    columns: int, shift: float, relative: bool, any_size: bool, seed: int
) -> None:
    scores, maxima = rows_of_scores(columns, seed)
    before = np.random.default_rng(seed).normal(size=(ROWS, columns // 2 << seed)).astype(np.float32)
    weights, sums, tops, decays, after = weigh(scores, maxima, shift, relative, before, any_size)
    np.testing.assert_array_equal(after, before * decays[:, :1])
    exact = scores.astype(np.float64) * UNIT + shift
    for row in range(ROWS):
        top = tops[row, 0]
        assert (tops[row] == top).all()
        assert (decays[row] == decays[row, 0]).all()
        if row in (8, 9):  # a key that is not a number, or infinite, gives none
            assert np.isnan(weights[row]).any()
            continue
        if row in (1, 4, 7, 13):  # above by far, or the first
            assert top == pytest.approx(exact[row].max(), rel=1e-6)
            assert decays[row, 0] == pytest.approx(np.exp2(float(maxima[row]) - float(top)), rel=1e-5)
        else:
            assert top == maxima[row]
            assert decays[row, 0] == 1
        want = np.exp2(exact[row] - (top if top > NOTHING else 0))
        # rounded to bfloat16; what is below 1e-30 float32 may not hold
        np.testing.assert_allclose(weights[row], want, rtol=2.0**-8, atol=1e-30)
        assert sums[row].sum() == pytest.approx(want.sum(), rel=1e-5)
        assert weights[row].max() <= MAX_SUM_PER_THREAD


@pytest.mark.parametrize(("terms", "error"), [(3, 2.0**-11), (5, 2.0**-21.4)])
def test_polynomials_cap_what_they_hold_for(terms: int, error: float) -> None:
    """And are too large, and rise, from there on: no weight that is small enough comes of a larger score."""
    coefficients, largest = caps.CAPS[terms]
    x = np.linspace(1e-6, 30, 1_000_001)
    found = x * np.polyval(coefficients[::-1], x * x)
    held = np.tanh(x) <= largest
    assert np.abs(found / np.tanh(x) - 1)[held].max() <= error
    assert (np.diff(found) > 0).all()
    assert coefficients[-1] > 0, "also of a masked score, whose square is infinite"


@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize(("dtype", "half"), [("bf16", 2.0**-8), ("fp16", 2.0**-11)])
@pytest.mark.parametrize("terms", caps.CAPS)
@pytest.mark.parametrize("seed", range(3))
def test_rows_are_capped_exactly_where_a_polynomial_does_not_hold(
    columns: int, dtype: str, half: float, terms: int, seed: int
) -> None:
    """half: half an ulp of a weight, relative to it."""
    random = np.random.default_rng(seed)
    inner = 1 / 50.0
    scores = random.normal(size=(ROWS, columns)).astype(np.float32) * 4
    maxima = random.normal(size=ROWS).astype(np.float32) + 15
    scores[1, 5] = 300  # far beyond, above all before
    scores[2, 6], maxima[2] = 60, 61  # beyond, below the largest so far
    scores[3], maxima[3] = -80 - scores[3], -68  # a row of which all are far below
    scores[4, 7] = -300  # one that is
    scores[5, ::3] = NOTHING
    scores[8], maxima[8] = scores[8] + 15, 5  # above all before by 2^13 and more, for which float16 has no room
    scores[6], maxima[6] = NOTHING, NOTHING
    maxima[7] = NOTHING  # sees its first keys
    scores[9, 3], scores[10, 4] = np.nan, np.inf
    # far below zero, and some keys so far that the shorter polynomial would make a fifth less of what they weigh, 2^-16
    maxima[11], scores[11], scores[11, ::2] = -39, -30.5, -50
    before = random.normal(size=(ROWS, columns)).astype(np.float32)
    weights, sums, tops, decays, after = weigh(scores, maxima, 0.0, False, before, capped=(terms, inner), dtype=dtype)
    np.testing.assert_array_equal(after, before * decays[:, :1])
    exact = float(CAPPED_UNIT) * np.tanh(scores.astype(np.float64) * inner)
    exact[scores == NOTHING] = -np.inf
    off = 2.0**-11 * 50 if terms == 3 else 1e-4  # of a score
    for row in range(ROWS):
        top = tops[row, 0]
        assert (tops[row] == top).all()
        if row == 9:
            assert np.isnan(weights[row]).any()
            continue
        if row in (1, 7, 8, 10):
            assert top == pytest.approx(exact[row].max(), abs=2 * off)
            assert decays[row, 0] == pytest.approx(np.exp2(float(maxima[row]) - float(top)), rel=1e-5)
        elif row not in (3, 11):  # whose maxima may rise by less
            assert top == maxima[row]
            assert decays[row, 0] == 1
        want = np.exp2(exact[row] - (top if top > NOTHING else 0))
        # rounding, and what tanh may be off; polynomials may lose what weighs 2^-24 of the maximum
        np.testing.assert_allclose(weights[row], want, rtol=half + off, atol=2.0**-24)
        assert sums[row].sum() == pytest.approx(want.sum(), rel=off + 1e-5, abs=columns * 2.0**-24)
    assert weights.max() <= MAX_SUM_PER_THREAD or np.isnan(weights).any()
    assert weights[3].sum() > 0.1, "what is far below zero counts where nothing else is there"


@pytest.mark.parametrize("magnitude", [2.0**14, 2.0**25, 2.0**31, 2.0**100])
def test_equal_scores_of_any_size_weigh_the_same(magnitude: float) -> None:
    """As the largest so far, above it or below, whichever way its product was rounded."""
    random = np.random.default_rng(0)
    equal = (random.uniform(1, 2, size=ROWS) * magnitude * random.choice([-1, 1], size=ROWS)).astype(np.float32)
    scores = np.repeat(equal[:, None], 64, 1)
    scores[2::4, ::3] *= np.float32(-1)  # one of both weighs nothing
    largest = scores.max(1)
    maxima = (largest * UNIT).astype(np.float32)  # rounded, as those of first tiles are
    maxima[::5] = NOTHING
    maxima[1::5] -= np.float32(1.5) * magnitude  # so that they rise
    weights, sums, tops, _, _ = weigh(scores, maxima, 0.0, False, np.zeros((ROWS, 32), np.float32), True)
    np.testing.assert_array_equal(tops, np.repeat((largest * UNIT)[:, None], 4, 1))
    np.testing.assert_array_equal(weights, scores == largest[:, None])
    np.testing.assert_array_equal(sums.sum(1), (scores == largest[:, None]).sum(1))


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("any_size", [False, True])
def test_a_row_gets_what_it_gets_alone(relative: bool, any_size: bool) -> None:
    scores, maxima = rows_of_scores(128, 0)
    maxima[11], maxima[12] = 2.0**14, 2.0**20
    results = np.random.default_rng(1).normal(size=(ROWS, 128)).astype(np.float32)
    together = weigh(scores, maxima, 0.0, relative, results, any_size)
    for row in range(ROWS):
        others = np.delete(np.arange(ROWS), row)
        alone, before = scores.copy(), maxima.copy()
        alone[others], before[others] = 0.0, 0.0  # of which none is weighed again
        for got, want in zip(weigh(alone, before, 0.0, relative, results, any_size), together):
            np.testing.assert_array_equal(got[row], want[row])


NAN, INF = np.float32(np.nan), np.float32(np.inf)


def test_bfloat16_numbers_are_sums_of_two_in_e4m3() -> None:
    """Exactly from 2^-9 of the largest on, which is below 2^8; smaller ones to half of e4m3's smallest number."""
    random = np.random.default_rng(0)
    x = random.uniform(1, 2, size=(4, 32)) * 2.0 ** random.integers(-12, 8, size=(4, 32))
    x[:, 0], x[:, 1] = (255, -255, 0, -0.0), (INF, -INF, NAN, 1)
    x = torch.from_numpy(x * random.choice([-1, 1], size=x.shape)).to(torch.bfloat16).float().numpy()
    words = np.stack(assembly.run(narrowing._IN_TWO.value, [None, None, *x])[:2])
    parts = torch.from_numpy(words.copy().view(np.uint8)).view(torch.float8_e4m3fn).double().numpy()
    found = parts.reshape(2, 32, 4).sum(0).T
    assert np.isnan(found[:3, 1]).all(), "what is no number is none, and infinity no large one"
    x[:3, 1] = found[:3, 1] = 0
    exact = np.abs(x) >= 2.0**-2
    np.testing.assert_array_equal(found[exact], x[exact])
    np.testing.assert_allclose(found, x, rtol=0, atol=2.0**-10)
    assert 40 < exact.sum() < 88


@pytest.mark.parametrize("fp8", [False, True])
def test_maxima_are_raised_by_the_row_and_by_more_than_the_slack(fp8: bool) -> None:
    """Two rows of a thread, four threads a row; others of the warp keep theirs."""
    slack = FP8_SLACK if fp8 else SLACK
    before = np.zeros((2, 32), np.float32)
    top = np.full((2, 32), slack, np.float32)  # not more than that
    top[0, 5] = 20  # of row 1 one thread's
    before[1, 8:12] = NOTHING
    top[1, 8:12] = [3, NOTHING, -7, 4]
    before[0, 12:16], top[0, 12:16] = NOTHING, NOTHING
    if fp8:
        top[0, 18], top[1, 21], before[1, 24:28] = NAN, INF, NAN
    found = assembly.run((_RAISE_FP8 if fp8 else _RAISE).value, [None] * 4 + [*top, *before])
    maxima, decays = np.stack(found[:4]).view(np.float32).reshape(2, 2, 32)
    want, fall = before.copy(), np.ones((2, 32), np.float32)
    want[0, 4:8], fall[0, 4:8] = 20, 2.0**-20
    want[1, 8:12], fall[1, 8:12] = 4, 0
    if fp8:  # whose factors say so, for weights do not
        fall[0, 16:20], fall[1, 20:28] = NAN, NAN
        want[0, 16:20], want[1, 20:24], want[1, 24:28] = NAN, INF, slack
    np.testing.assert_array_equal(maxima, want)
    np.testing.assert_array_equal(decays, fall)  # powers of two


def line(scores: np.ndarray, unit: float, shift: float) -> np.ndarray:
    """Weights of [4, 32 lanes], as numbers."""
    added = (shift + narrowing.LINE_SHIFT) * narrowing.LINE_UNIT + 1
    inputs = [*scores, *(np.full(32, number, np.float32) for number in (unit * narrowing.LINE_UNIT, added))]
    word, *_ = assembly.run(narrowing._LINE_WORDS.value, [None, *inputs])
    return torch.from_numpy(word.copy().view(np.uint8)).view(torch.float8_e4m3fn).float().numpy().reshape(32, 4).T


def test_weights_of_a_line_are_near_exponentials() -> None:
    """Four scores to a word, in order; zero from 2^-10 on, as rounded to e4m3."""
    x = np.linspace(-40, 8.7, 128).astype(np.float32).reshape(4, 32)
    x[:, 0], x[:, 1], x[2, 2] = -np.inf, np.nan, -1e30
    unit, shift = np.float32(1.4), np.float32(3.0)
    scores = (x - shift) / unit
    weights = line(scores, unit, shift)
    assert (weights[:, :2] == 0).all()
    assert weights[2, 2] == 0
    x[:, 1] = -np.inf
    x[2, 2] = -np.inf
    exact = np.exp2(x.astype(np.float64))
    # the line and half a unit of the last place; below 2^-6 that is 2^-10
    np.testing.assert_allclose(weights, exact, rtol=0.081, atol=2.0**-10)


def test_lines_are_right_on_average_and_at_powers_of_two() -> None:
    """So that sums have no bias, and the largest key of a row weighs what it should."""
    x = np.arange(128).reshape(32, 4).T / 128
    total = 0.0
    for octave in range(-5, 8):
        weights = line((x + octave).astype(np.float32), 1, 0)
        assert weights[0, 0] == 2.0**octave
        total += float((weights / np.exp2(x + octave)).mean())
    assert total / 13 == pytest.approx(1, abs=0.005)


@pytest.mark.parametrize("largest", [0.3, 5.0, 300.0])
def test_logistic_numbers_are_near_the_true_ones(largest: float) -> None:
    x = np.random.default_rng(0).uniform(-largest, largest, 32).astype(np.float32)
    x[:3] = largest, -largest, 0
    (got,) = assembly.run(_LOGISTIC.value, [None, x])[:1]
    # an exponential, a sum and a reciprocal, each a unit in the last place off or less
    want = 1 / (1 + np.exp2(x.astype(np.float64)))
    np.testing.assert_allclose(got.view(np.float32), want, rtol=0, atol=2.4 * 2.0**-23)


def test_logistic_numbers_end_at_0_and_1() -> None:
    x = np.resize([np.inf, -np.inf, np.nan, 0.0], 32).astype(np.float32)
    (got,) = assembly.run(_LOGISTIC.value, [None, x])[:1]
    np.testing.assert_array_equal(got.view(np.float32), np.resize([0.0, 1.0, np.nan, 0.5], 32).astype(np.float32))


@pytest.mark.parametrize("function", [weigh_pairs, weigh_again, softmax.powers_of])
def test_kernels_on_disk_are_known_by_what_is_looked_up(function: Any) -> None:
    """Of dicts that a `constexpr_function` reads Triton's key knows nothing."""
    assert function.cache_key
    assert "DIGEST" in {name for name, _ in function.used_global_vals}


SHOWN = {
    "barriers": lambda of: [of._AWAIT.value],
    "caps": lambda of: [of.exactly_capped("m0", "m0", "$96", 3)],
    "maxima": lambda of: [of._ASM_32.value],
    "narrowing": lambda of: [of._EXP2_WORDS.value],
    "numbers": lambda of: [of._LOGISTIC.value],
    "prefetch": lambda of: [of._BRING.value, of._BRING_LINE.value],
    "products": lambda of: [of._cores.fn(64, 16, 64, "bf16")],
    "registers": lambda of: [of._BESIDE_BF16.value],
    "turns": lambda of: [of._TAKE_TURN.value],
    "weights": lambda of: [of._PAIRS["bf16", 1]],
    "widening": lambda of: [of._E4M3_APART.value],
}


def test_every_module_of_assembly_shows_a_text() -> None:
    folder = Path(paged_attn.kernels.hopper.asm.__file__).parent
    assert SHOWN.keys() == {path.stem for path in folder.glob("*.py")} - {"__init__"}


@pytest.mark.parametrize("module", SHOWN)
def test_what_a_docstring_shows_is_what_its_module_makes(module: str) -> None:
    """From the beginning on; `...` stands for what is left out."""
    of = importlib.import_module(f"paged_attn.kernels.hopper.asm.{module}")
    shown = re.findall(r"(?:^    .*\n)+", of.__doc__, re.M)
    made = [" ".join(text.split()) for text in SHOWN[module](of)]
    assert len(shown) == len(made)
    for example, text in zip(shown, made, strict=True):
        parts = [re.escape(" ".join(part.split())) for part in example.split("...")]
        assert re.match(".*".join(parts), text), text
