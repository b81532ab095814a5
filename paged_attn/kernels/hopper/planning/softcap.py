"""What caps scores: a polynomial, an instruction, or exponentials."""

from typing import Annotated

import torch

from ....records.problem import Problem
from ....records.regime import Threshold
from .conversion import NONE, conversion
from .shapes import widest_of

TERMS_AS_TANH, TERMS_EXACTLY = 3, 5  # of polynomials of `asm/caps.py`, as coarse as tanh's instruction; as exponentials
_SMALL = (
    "the smaller the cap, the higher a row's maximum has to be for the polynomial to hold: with these 2.7, of scores"
)
MIN_CAP_OF_TANH: Annotated[
    float,
    Threshold("score", _SMALL, "softcap 30, prefill b4 x 4096 992 -> 888 us, plain 752"),
] = 20.0
MIN_CAP_OF_EXACT_TERMS: Annotated[
    float,
    Threshold("score", _SMALL, "softcap 30 with log-sum-exps, prefill b4 x 4096 1290 -> 1110 us"),
] = 23.0


def has_tanh(p: Problem) -> bool:
    """Whether a softcap may be off by 2^-11 of a score: never where that would show in a log-sum-exp or in float16."""
    return p.softcap > 0 and not p.far_cap and not p.lse and p.query != torch.float16


def terms_of(p: Problem) -> int:
    """Terms of the polynomial that caps scores of whole blocks; 0: special functions do, or nothing.

    Beside the products of heads beyond 128 dims special functions are done in time, and the finer polynomial takes
    registers that four warpgroups do not have.
    """
    if (
        p.alibi
        or p.biased
        or p.token_scales
        or not p.positive
        or p.far_cap
        or conversion(p) != NONE
        or widest_of(p) > 128
    ):
        return 0
    if has_tanh(p):
        return TERMS_AS_TANH if p.softcap >= MIN_CAP_OF_TANH else 0
    return TERMS_EXACTLY if p.softcap >= MIN_CAP_OF_EXACT_TERMS and widest_of(p) == 128 else 0
