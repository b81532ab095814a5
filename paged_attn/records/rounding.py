"""Rounding up, for the host: triton's own are also kernels', and a call takes 2 us; a plan has a dozen of them."""


def cdiv(x: int, y: int) -> int:
    """x / y."""
    return -(-x // y)


def next_power_of_2(x: int) -> int:
    """To a power of two; 0 of none."""
    return 1 << (x - 1).bit_length() if x > 0 else 0
