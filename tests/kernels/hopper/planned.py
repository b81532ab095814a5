"""Calls of which tests of the planner change a field."""

from __future__ import annotations

import torch

from paged_attn.launching.platform import Device
from paged_attn.records.problem import Problem

H200 = Device("sm90", 132)
CALL = Problem(
    tokens=4096, seqs=8, heads=32, kv_heads=8, head_dim=128, page_size=16, max_seqlen_q=2048, max_seqlen_k=8192,
    window_left=-1, ragged=True, positive=True, softcap=0.0, alibi=False, qq_bias=False, only=None,
    compute=torch.bfloat16, query=torch.bfloat16, cache=torch.bfloat16, packed=False, pairable=False, boxable=True,
    rows_per_page=16, adjacent=True, query_box=True, new=False, new_box=False, lse=False, batch_invariant=False,
    device=H200,
)  # fmt: skip
PACKED = CALL._replace(packed=True, rows_per_page=1, boxable=False, max_seqlen_q=2)
FP8 = CALL._replace(cache=torch.float8_e4m3fn, compute=torch.float16)


def even(batch: int, queries: int, keys: int) -> Problem:
    return CALL._replace(tokens=batch * queries, seqs=batch, max_seqlen_q=queries, max_seqlen_k=keys)


MIXED = even(64, 2048, 4096)._replace(tokens=2048 + 63)
