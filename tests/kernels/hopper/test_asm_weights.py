"""Assembly that weighs rows again, against what it is to compute."""

from __future__ import annotations

import numpy as np
import pytest

from paged_attn.kernels.hopper.asm.weights import CAPS, MAX_SUM_PER_THREAD
from tests.kernels.hopper.lanes import CAPPED_UNIT, NOTHING, ROWS, UNIT, rows_of_scores, weigh
from tests.simulator import COMPILER

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


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
    coefficients, largest = CAPS[terms]
    x = np.linspace(1e-6, 30, 1_000_001)
    found = x * np.polyval(coefficients[::-1], x * x)
    held = np.tanh(x) <= largest
    assert np.abs(found / np.tanh(x) - 1)[held].max() <= error
    assert (np.diff(found) > 0).all()
    assert coefficients[-1] > 0, "also of a masked score, whose square is infinite"


@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize(("dtype", "half"), [("bf16", 2.0**-8), ("fp16", 2.0**-11)])
@pytest.mark.parametrize("terms", CAPS)
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
