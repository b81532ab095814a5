"""Assembly that decides, rounds and changes places, against what it is to compute, instruction by instruction."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from paged_attn.kernels.hopper.asm import conversions, registers
from paged_attn.kernels.hopper.asm.instructions import _LOGISTIC
from paged_attn.kernels.hopper.asm.maxima import _RAISE, _RAISE_FP8, FP8_SLACK, SLACK
from tests.kernels.hopper.lanes import NOTHING, numbers
from tests.simulator import COMPILER, assembly
from tests.simulator.assembly import LANES

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


@pytest.mark.parametrize("text", [registers._BESIDE_BF16.value, registers._BESIDE_F16.value])
def test_results_of_neighbouring_lanes_change_places(text: str) -> None:
    """A lane first has dims 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of 16, and then four neighbouring dims."""
    row, t = LANES // 4, LANES % 4
    values = (16 * row + 2 * t)[None] + np.array([0, 1, 8, 9])[:, None]  # which 16 bits hold
    words = np.stack(assembly.run(text, [None, None, *values.astype(np.float32)])[:2], 1)
    found = numbers(words) if "bf16" in text else words.view(np.float16)
    first = 16 * row + 8 * (t % 2) + 4 * (t // 2)
    assert (found.reshape(32, 4) == first[:, None] + np.arange(4)).all()


NAN, INF = np.float32(np.nan), np.float32(np.inf)


def test_bfloat16_numbers_are_sums_of_two_in_e4m3() -> None:
    """Exactly from 2^-9 of the largest on, which is below 2^8; smaller ones to half of e4m3's smallest number."""
    random = np.random.default_rng(0)
    x = random.uniform(1, 2, size=(4, 32)) * 2.0 ** random.integers(-12, 8, size=(4, 32))
    x[:, 0], x[:, 1] = (255, -255, 0, -0.0), (INF, -INF, NAN, 1)
    x = torch.from_numpy(x * random.choice([-1, 1], size=x.shape)).to(torch.bfloat16).float().numpy()
    words = np.stack(assembly.run(conversions._IN_TWO.value, [None, None, *x])[:2])
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
    added = (shift + conversions.LINE_SHIFT) * conversions.LINE_UNIT + 1
    inputs = [*scores, *(np.full(32, number, np.float32) for number in (unit * conversions.LINE_UNIT, added))]
    word, *_ = assembly.run(conversions._LINE_WORDS.value, [None, *inputs])
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


def _of_int4(words: np.ndarray) -> np.ndarray:
    """Stored numbers [..., 8] of words, in the units of `widen_int4_apart`."""
    units = np.where(np.arange(8) % 2, 16, 1) * float(conversions.INT4_UNIT.value)
    return (words[..., None] >> 4 * np.arange(8) & 15) * units


def test_words_of_int4_keys_become_float16_exactly() -> None:
    """In the order 0, 4, 1, 5, 2, 6, 3, 7."""
    random = np.random.default_rng(0)
    words = random.integers(0, 1 << 32, 32, dtype=np.uint32)
    halves = re.sub(r"\$([0-7])", r"n\1", conversions._INT4_KEYS.value).replace("$8", "$4")
    pairs = " ".join(f"mov.b32 ${i}, {{n{2 * i}, n{2 * i + 1}}};" for i in range(4))
    found = assembly.run(f"{{ .reg .b16 n<8>; {halves} {pairs} }}", [None] * 4 + [words])[:4]
    found = np.stack(found, 1).view(np.float16).reshape(32, 8).astype(np.float64)
    np.testing.assert_array_equal(found, _of_int4(words)[:, [0, 4, 1, 5, 2, 6, 3, 7]])


@pytest.mark.parametrize("count", [4, 2])
def test_halves_of_int4_values_become_float16_exactly(count: int) -> None:
    """Of four numbers or, of 64 dims, of a byte: two keys' first numbers in a word, their second numbers, ..."""
    random = np.random.default_rng(1)
    halves = random.integers(0, 1 << 4 * count, (32, 2), dtype=np.uint32)
    text = (conversions._INT4_VALUES if count == 4 else conversions._INT4_BYTES).value
    found = assembly.run(text, [None] * count + [halves[:, 0] | halves[:, 1] << 16])[:count]
    found = np.stack(found, 1).view(np.float16).reshape(32, count, 2).astype(np.float64)
    np.testing.assert_array_equal(found, _of_int4(halves)[..., :count].transpose(0, 2, 1))


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
