"""Caches with scales by token that vLLM's own Triton kernels write and read, in the interpreter: are they ours?

    python -m tests.integrations.vllm_kernels int8_per_token_head

Prints as JSON the share of stored bytes that differ from what our layer writes of the same keys and values, and the
largest difference of results over what vLLM has written.  A program, for vLLM has no Triton without a GPU's driver.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"


def pose_as_a_gpus_driver() -> None:
    """One active driver is what vLLM looks for; nothing is launched on it."""
    from triton.backends import backends

    for name, backend in backends.items():
        backend.driver.is_active = staticmethod(lambda active=name == "nvidia": active)


def compared(kind: str) -> dict[str, Any]:
    import torch
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import (
        triton_reshape_and_cache_flash_per_token_head_quant as write,
    )
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    from vllm.v1.kv_cache_interface import get_kv_quant_mode

    from paged_attn.integrations.vllm.cache_formats import row_of
    from tests.integrations import vllm_batch as made

    mode, common, caches = get_kv_quant_mode(kind), made.batch(made.MIXED), []
    q, k, v = made.tensors(common.num_actual_tokens)
    k[5, 0], v[6] = 0.0, 3.0  # heads of zeros, and of one number
    impls = made.implementation(kv_cache_dtype=kind), made.implementation(kv_cache_dtype=kind)
    table = common.block_table_tensor.long()
    places = [torch.arange(keys - new) for new, keys in made.MIXED]
    before = torch.cat([row[x // made.PAGE] * made.PAGE + x % made.PAGE for row, x in zip(table, places)])
    old = torch.randn(2, len(before), made.KV_HEADS, made.DIM, generator=torch.Generator().manual_seed(4))
    for impl, mine in zip(impls, (False, True)):
        width = row_of(kind, made.DIM, made.DIM)
        kv = torch.zeros(made.PAGES, made.KV_HEADS, made.PAGE, width, dtype=torch.uint8)
        kv = kv.view(torch.int8) if kind.startswith("int8") else kv
        caches.append(kv)
        pages, scales = ([x.transpose(1, 2) for x in pair] for pair in (impl.caches(kv), impl.slot_scales))
        for new, slots in ((old, before), ((k, v), common.slot_mapping)):
            if mine:
                impl.do_kv_cache_update(made.layer(), *new, kv, slots)
            else:
                write(*new, *pages, *scales, slots, mode)
    theirs = impls[0].caches(caches[0])
    other = [x.view(torch.uint8) != y.view(torch.uint8) for x, y in zip(theirs, impls[1].caches(kv))]
    slots = (len(before) + len(common.slot_mapping)) * made.KV_HEADS
    differ = max(int(x.sum()) / (slots * x.shape[-1]) for x in other)
    pages, scales = ([x.transpose(1, 2) for x in pair] for pair in (theirs, impls[0].slot_scales))
    want, got = torch.zeros_like(q), torch.zeros_like(q)
    unified_attention(
        q, *pages, want, common.query_start_loc, common.max_query_len, common.seq_lens, common.max_seq_len,
        made.DIM**-0.5, True, (-1, -1), common.block_table_tensor, 0, None, None, None, kv_quant_mode=mode,
        k_scale_cache=scales[0], v_scale_cache=scales[1],
    )  # fmt: skip
    impls[0].forward(made.layer(), q, k, v, caches[0], made.build(common), got)
    return dict(kind=kind, differ=differ, off=float((want - got).abs().max()))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    pose_as_a_gpus_driver()
    for name in sys.argv[1:]:
        print("RESULT " + json.dumps(compared(name)), flush=True)
