"""Limits of numbers in a call, common to all dialects."""

from ..arguments import TINY, Options

FAR = 1 << 30  # farther than any key, and position + FAR still fits 32 bits
LEAST_CAP = 2.0**-40  # a smaller softcap makes all scores 0 as well, and its inverse may be infinite
MOST_CAPS = 2.0**96


def scale_and_cap(options: Options, head_dim: int) -> tuple[float, float | None]:
    """The softmax scale, and the softcap if there is one, as float32 numbers whose ratio is finite."""
    scale = head_dim**-0.5 if options.softmax_scale is None else float(options.softmax_scale)
    if abs(scale) < TINY:
        scale = 0.0  # all scores are 0 either way
    if options.softcap <= 0:
        return scale, None
    cap = max(float(options.softcap), LEAST_CAP)
    # with a larger ratio all scores are at the cap, and an infinite ratio would turn 0 into NaN
    return min(max(scale, -MOST_CAPS * cap), MOST_CAPS * cap), cap
