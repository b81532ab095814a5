"""FlashInfer's batch wrappers, planned for the exact lengths outside the timing.

fa2: the decode wrapper with tensor cores if every sequence has one query, else the prefill wrapper.  fa3: Hopper's
prefill kernel, also for decodes.  Latent caches go to the MLA wrapper, with fa2 or fa3 as its backend.  The first case
of a shape compiles: half a minute for fa2, minutes for fa3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.cannot import Cannot, allow
from tests.support.cases import Case

WORKSPACE_BYTES = 512 << 20


def fa2(case: Case, inputs: dict[str, Any]) -> Callable[[], Tensor]:
    if case.latent:
        return _latent(case, inputs, "fa2")
    allow(case, "window", "softcap", "tree", "fp8")
    return _decode(case, inputs) if set(case.query_lens) == {1} else _prefill(case, inputs, "fa2")


def fa3(case: Case, inputs: dict[str, Any]) -> Callable[[], Tensor]:
    if not case.latent:
        allow(case, "window", "softcap")
    if torch.cuda.get_device_capability()[0] != 9:
        raise Cannot("fa3 is for Hopper")
    if case.latent:
        return _latent(case, inputs, "fa3")
    return _prefill(case, inputs, "fa3")


def _decode(case: Case, inputs: dict[str, Any]) -> Callable[[], Tensor]:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    wrapper = BatchDecodeWithPagedKVCacheWrapper(_workspace(), case.layout, use_tensor_cores=True, backend="fa2")
    wrapper.plan(*_pages(case, inputs), case.heads, case.kv_heads, case.head_dim, case.page_size, **_options(case))
    return _run(wrapper, case, inputs)


def _prefill(case: Case, inputs: dict[str, Any], backend: str) -> Callable[[], Tensor]:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    starts = torch.tensor((0, *case.query_lens)).cumsum(0).int()
    mask = {"custom_mask": _mask(case, inputs["qq_bias"])} if case.qq_bias else {"causal": True}
    wrapper = BatchPrefillWithPagedKVCacheWrapper(_workspace(), case.layout, backend=backend)
    wrapper.plan(
        starts.to(inputs["q"].device),
        *_pages(case, inputs),
        case.heads,
        case.kv_heads,
        case.head_dim,
        case.page_size,
        **mask,
        **_options(case),
    )
    return _run(wrapper, case, inputs)


def _latent(case: Case, inputs: dict[str, Any], backend: str) -> Callable[[], Tensor]:
    """Return a call over a latent cache: its first dims and its rest are passed as two views of the cache."""
    allow(case, "latent", "wide heads", "values of another width")
    if (case.head_dim, case.value_width) != (576, 512) or case.layout != "NHD" or not case.causal:
        raise Cannot("only causal latents of 512 and 64 dims, NHD")
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    wrapper = BatchMLAPagedAttentionWrapper(_workspace(), backend=backend)
    indptr, indices, _ = _pages(case, inputs)
    starts = torch.tensor((0, *case.query_lens)).cumsum(0).int().to(indptr.device)
    width, rest = case.value_width, case.head_dim - case.value_width
    wrapper.plan(
        starts, indptr, indices, inputs["seq_lens"].int(), case.heads, width, rest, case.page_size, True,
        case.softmax_scale or case.head_dim**-0.5, case.dtype, case.dtype_of_cache,
    )  # fmt: skip
    q, cache = inputs["q"][: case.tokens], inputs["k_cache"].squeeze(2)
    parts = q[..., :width].contiguous(), q[..., width:].contiguous(), cache[..., :width], cache[..., width:]

    def call() -> Tensor:
        out: Tensor = wrapper.run(*parts)
        return out

    return call


def _run(wrapper: Any, case: Case, inputs: dict[str, Any]) -> Callable[[], Tensor]:
    """Return the planned call.  K and V scales must be one number each."""
    q, out, cache = inputs["q"].contiguous(), torch.empty_like(inputs["out"]), (inputs["k_cache"], inputs["v_cache"])
    scales: dict[str, float] = {}
    if case.dtype_of_cache != case.dtype:
        if case.scales not in ("none", "float"):
            raise Cannot("no scale per head")
        # a scale of 1 would only cost FlashInfer a multiplication of its output
        scales = {name: inputs[name] for name in ("k_scale", "v_scale") if inputs[name] != 1.0}

    def call() -> Tensor:
        return wrapper.run(q, cache, out=out, **scales)

    return call


def _options(case: Case) -> dict[str, Any]:
    return dict(
        window_left=case.window_size[0],
        logits_soft_cap=case.softcap or None,
        q_data_type=case.dtype,
        kv_data_type=case.dtype_of_cache,
        sm_scale=case.softmax_scale or case.head_dim**-0.5,
    )


def _pages(case: Case, inputs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return (indptr, indices, last_page_len) of the page table, without its tails."""
    lengths = torch.tensor(case.seq_lens)
    counts = (lengths + case.page_size - 1) // case.page_size
    table = inputs["page_table"]
    live = torch.arange(table.shape[1]) < counts[:, None]
    indptr = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
    last = lengths - (counts - 1) * case.page_size
    return indptr.int().to(table.device), table[live.to(table.device)].int(), last.int().to(table.device)


def _mask(case: Case, bias: Tensor) -> Tensor:
    """Return bool [sum of query_len * seq_len]: whether a query sees a key.  A draft sees itself and its ancestors."""
    parts = []
    for query_len, seq_len in zip(case.query_lens, case.seq_lens, strict=True):
        visible = torch.ones(query_len, seq_len, dtype=torch.bool, device=bias.device).tril(seq_len - query_len)
        visible[:, seq_len - query_len :] &= bias[:query_len, :query_len] == 0
        parts.append(visible.flatten())
    return torch.cat(parts)


@functools.cache
def _workspace() -> Tensor:
    """Return one workspace for all wrappers, which run one after another."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
