"""Rounding up on the host.  Triton's functions take 2 us a call, because kernels use them too; a plan calls a dozen."""


def cdiv(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


def next_power_of_2(x: int) -> int:
    """The next power of two >= x; 0 for x <= 0."""
    return 1 << (x - 1).bit_length() if x > 0 else 0
