"""A key whose weight is below the normal numbers of its type, beside one that has nearly all weight and value zero."""

from __future__ import annotations

import math

import torch

from tests.support.cases import Case, bits, build, run

FLOAT16 = 8.66 * 2.0**-24  # rounded to 9 * 2^-24, 3.9% more
FP8 = 1.4 * 2.0**-14  # rounded to 2^-14 in e4m3, whose largest weight is 2^5


def check_small_weight(case: Case, device: str, weight: float = FLOAT16) -> None:
    """Run a case of one query and two keys, whose results have the relative error of the small weight."""
    inputs = build(case, device)
    page = int(inputs["page_table"][0, 0])
    changes = {"q": torch.ones_like(inputs["q"], dtype=torch.float32).to(case.dtype)}
    for name, first, second in (("k_cache", 0.0, 1.0), ("v_cache", 0.0859375, 0.0)):
        cache = inputs[name].clone()
        for slot, number in enumerate((first, second)):
            stored = torch.full((case.kv_heads, case.head_dim), number, device=device).to(cache.dtype)
            bits(cache)[page, slot] = bits(stored)
        changes[name] = cache
    ones = {name: 1.0 for name in ("q_scale", "k_scale", "v_scale") if name in inputs}
    run(case, device, softmax_scale=-math.log(weight) / case.head_dim, **ones, **changes)
