"""qv: queries of latent attention (MLA) in two parts, with keys and values that are two views of one cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...strides import same_steps
from .common_call import FP8


class Latent(NamedTuple):
    """A call with whole queries, over a cache whose values are the first dims of its keys."""

    q: Tensor
    keys: Tensor
    values: Tensor


def latent(
    function: str, q: Tensor | None, k: Tensor | None, v: Tensor, given: dict[str, Any], own: bool = False
) -> Latent:
    """Join q [tokens, heads, rope] with given["qv"] [tokens, heads, rank], and k [..., rope] with v [..., rank].

    Scores are q k + qv v, so a whole key is the value and then the rotated part, as they lie in the cache.  With
    only_qv, or where q is None or has no dims, keys are the values.  own: k and v are no cache, and are copied if their
    memory is not adjacent.
    """
    qv = given["qv"]
    if qv.ndim != 3:
        qv = qv.flatten(0, qv.ndim - 3)
    if v.dtype in FP8:
        raise ValueError(f"{function}() of paged_attn takes qv beside 16 bits, not beside a cache of {v.dtype}")
    if q is None or k is None or q.shape[-1] == 0 or given.get("only_qv"):
        if given.get("softmax_scale") is None:
            raise ValueError(f"{function}() of paged_attn needs softmax_scale where qv is all of the queries")
        return Latent(qv, v, v)
    rank, rope = v.shape[-1], k.shape[-1]
    where = v.data_ptr() + rank * v.element_size()
    lined = all(x.stride(-1) == 1 or x.shape[-1] == 1 for x in (k, v))
    if (k.dtype, k.data_ptr()) != (v.dtype, where) or not (lined and same_steps(k, v, -1)):
        if own and (k.dtype, k.shape[:-1]) == (v.dtype, v.shape[:-1]):
            keys = torch.cat([v, k], -1)
            return Latent(torch.cat([qv, q], -1), keys, keys[..., :rank])
        raise ValueError(
            f"{function}() of paged_attn takes qv where v and k are cache[..., :{rank}] and cache[..., {rank}:] of one "
            f"cache of {rank + rope} dims; these lie apart"
        )
    keys = v.as_strided((*v.shape[:-1], rank + rope), (*v.stride()[:-1], 1))
    return Latent(torch.cat([qv, q], -1), keys, keys[..., :rank])
