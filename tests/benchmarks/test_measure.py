"""What the benchmark says of the times of many replays."""

import random

import pytest

from benchmarks.measure import has_two_modes, spread


def normal(mean: float, deviation: float, count: int) -> list[float]:
    draw = random.Random(0)
    return [draw.gauss(mean, deviation) for _ in range(count)]


def test_a_spread_names_the_least_time_the_quartiles_and_the_ninth_decile() -> None:
    assert spread([float(x) for x in range(1, 102)]) == {"min": 1, "q1": 26, "q3": 76, "p90": 91, "modes": 1}


@pytest.mark.parametrize("slow", [0.1, 0.5, 0.9])
def test_two_groups_that_lie_apart_are_two_modes(slow: float) -> None:
    """Figures as seen once: replays of 67 to 69 us, others of 76 to 78."""
    count = int(400 * slow)
    assert has_two_modes(normal(68, 0.6, 400 - count) + normal(77, 0.6, count))


@pytest.mark.parametrize(
    "times",
    [
        normal(69, 1.5, 400),
        normal(68, 0.6, 392) + normal(77, 0.6, 8),  # fewer than a twentieth
        normal(68, 0.3, 200) + normal(70, 0.3, 200),  # 3% apart
        [60 + x / 20 for x in range(400)],  # broad, and flat
        [5.0],
        [5.0] * 40,
    ],
    ids=["one", "few slow ones", "close", "flat", "one time", "equal"],
)
def test_one_group_and_few_slow_replays_are_one_mode(times: list[float]) -> None:
    assert not has_two_modes(times)
