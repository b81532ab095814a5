"""Caps: tanh of a softcap, by polynomials and by special functions.

`exactly_capped` from m0 to m0, with the factor $96, for the polynomial of three terms, is

    setp.eq.f32 any, m0, 0fff800000; mul.rn.f32 m0, m0, $96; tanh.approx.f32 m0, m0; @any mov.f32 m0, 0fff800000;

where 0fff800000 is minus infinity: a masked score stays minus infinity.
"""

import hashlib
import math
from typing import NamedTuple

import triton

from ..shim import gl
from .instructions import literal


class Cap(NamedTuple):
    """tanh(x) as x times a polynomial in x^2, with the least relative error up to some x.

    The last coefficient is positive and the polynomial rises, so larger scores come out too large, and are noticed.
    """

    coefficients: tuple[float, ...]
    largest: float  # tanh(x) at the largest x of the approximation


# Number of terms: cap.  Relative error: 3 terms 2^-11.1, as tanh.approx; 5 terms 2^-21.5.
CAPS = {
    3: Cap((0.999539754, -0.321939022, 0.0885777204), 0.6993),
    5: Cap((0.999999668, -0.333299804, 0.132783159, -0.0507313454, 0.0136531115), 0.6089),
}
# log2 of a weight that is negligible beside the largest weight; a score that a polynomial caps too low weighs no more.
MAX_NEGLIGIBLE_EXPONENT = -24.0

# Cached kernels are keyed by the constants that their functions read, and not by dictionaries that they look up.
DIGEST_OF_CAPS = gl.constexpr(hashlib.sha256(repr(CAPS).encode()).hexdigest())


@triton.constexpr_function
def cap_of(terms, digest):
    return CAPS[terms]


def exactly_capped(to: str, score: str, factor: str, terms: int) -> str:
    """PTX: to = tanh(score * factor), as exact as the polynomial of `terms` terms; minus infinity stays as it is."""
    nothing, one, less = literal(float("-inf")), literal(1.0), literal(-2.0)
    text = f" setp.eq.f32 any, {score}, {nothing}; mul.rn.f32 {to}, {score}, {factor};"
    if terms == 3:
        text += f" tanh.approx.f32 {to}, {to};"
    else:  # 1 - 2 / (1 + e^2x)
        text += f" mul.rn.f32 {to}, {to}, {literal(2 * math.log2(math.e))}; ex2.approx.ftz.f32 {to}, {to};"
        text += f" add.f32 {to}, {to}, {one}; rcp.approx.ftz.f32 {to}, {to}; fma.rn.f32 {to}, {to}, {less}, {one};"
    return text + f" @any mov.f32 {to}, {nothing};"
