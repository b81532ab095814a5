"""More queries than keys: right where nothing is causal, and the slip of passing lengths of contexts where it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import paged_attn
from paged_attn.calls import checked
from paged_attn.integrations import flash_attn
from tests.integrations.by_hand import Batch, close
from tests.support.cases import E4M3, Case, build, run
from tests.support.masks import MASKS

# more queries than keys, no keys, one key more, a decode, one of padding
LENGTHS: dict[str, Any] = dict(query_lens=(40, 3, 6, 1, 1), seq_lens=(32, 0, 7, 20, 0), heads=4, kv_heads=2)
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sinks, softcap, alibi": dict(sinks=True, softcap=3.0, alibi=True),
    "a bias": dict(qq_bias=16),
    "a bias of each sequence": dict(qq_bias=50, bias_of_seqs=True, tree=True),
    "a mask": dict(qq_mask=2),
    "a mask, a window": dict(qq_mask=1, window_size=(9, 3)),
    "places as positions, a window": dict(positions="slots", window_size=(9, 3)),
    "depths, a window": dict(positions="tree", window_size=(9, 3), qq_bias=40, tree=True),
    "a user's function": dict(score_mod="relative"),
    "scales of tokens, a gate": dict(token_scales=True, gate=True),
    "padding, strided": dict(padding=3, strided=True),
    "a ragged table": dict(table="ragged"),
    "hnd, page 24": dict(layout="HND", page_size=24),
    "x-packed": dict(layout="x", dtype=torch.float16),
    "fp8": dict(dtype=E4M3, scales="tensor", out_dtype=E4M3),
    "latents": dict(latent=True, value_dim=16, kv_heads=1),
    "invariant": dict(batch_invariant=True),
    "prefills only": dict(only="prefill"),
    "bounds": dict(bounds=True),
} | {name: of for name, of in MASKS.items() if not of.get("causal_by_seq")}


@pytest.mark.parametrize("name", FEATURES)
def test_the_checked_call_takes_more_queries_than_keys_where_nothing_is_causal(name: str, device: str) -> None:
    run(Case(name, **LENGTHS | FEATURES[name] | dict(causal=False, check=True)), device)


def test_sequences_that_are_not_causal_may_have_more_queries_than_keys_beside_causal_ones(device: str) -> None:
    case = Case("by sequence", (3, 40, 5), (9, 32, 5), causal_by_seq=True, check=True)  # every other one is causal
    run(case, device)
    with pytest.raises(ValueError, match=r"seq_lens\[1\] = 32, but sequence 1 has 40 query tokens"):
        paged_attn.paged_attention(**build(replace(case, causal=False), device))


SLIP = r"seq_lens\[1\] = {keys}, but sequence 1 has 6 query tokens, which count too"


@pytest.mark.parametrize("keys", [0, 5])
@pytest.mark.parametrize("more", [{}, dict(new=True), dict(new=True, causal=False)], ids=str)
def test_lengths_of_contexts_are_told_from_lengths_of_sequences(keys: int, more: dict[str, Any], device: str) -> None:
    """Zeros, and keys that nobody sees, are no answer to them."""
    case = Case("context lengths", (1, 6), (9, 6), **more)
    inputs = build(case, device)
    run(case, device, check=True)
    inputs["seq_lens"] = torch.tensor([9, keys], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=SLIP.format(keys=keys)):
        paged_attn.paged_attention(**inputs, check=True)


@pytest.mark.parametrize(
    "case",
    [
        Case("decodes of a graph", (1, 1, 1), (20, 0, 0), decode_form=True),
        Case("one token each", (3, 1, 1), (20, 0, -3)),
        Case("no token", (3, 0, 0), (20, 0, 0)),
        Case("drafts that are padding", (3, 4, 4), (20, -1, -(2**31))),
        Case("left out", (1, 6), (20, 0), only="decode"),
    ],
    ids=str,
)
def test_padding_of_graphs_is_no_slip(case: Case, device: str) -> None:
    run(case, device, check=True)


# ---- adapters ------------------------------------------------------------------------------------


@pytest.fixture
def always_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check all calls, which is the default on a CPU."""
    monkeypatch.setattr(checked, "ALWAYS", True)


@pytest.mark.usefixtures("always_checked")
@pytest.mark.parametrize("causal", [False, True])
def test_flash_attentions_functions_take_more_queries_than_keys(causal: bool) -> None:
    """There causality ends at the last key, and queries need not be keys."""
    b = Batch((40, 3, 6), (32, 0, 7))
    out, lse = b.wanted(causal=causal)
    more: dict[str, Any] = dict(causal=causal, return_attn_probs=True)
    args = (b.q, b.k, b.v, b.cu_q, b.cu_k, b.max_q, b.max_k)
    got, got_lse, *_ = flash_attn.flash_attn_varlen_func(*args, **more)
    close(got, out)
    close(got_lse, lse)
    q, k, v = b.q[None, :40], b.k[None, :32], b.v[None, :32]
    got, got_lse, *_ = flash_attn.flash_attn_func(q, k, v, **more)
    close(got[0], out[:40])
    close(got_lse[0], lse[:, :40])
    got = flash_attn.flash_attn_with_kvcache(
        b.q, b.k_cache, b.v_cache, cache_seqlens=b.used, page_table=b.table, cu_seqlens_q=b.cu_q, max_seqlen_q=b.max_q,
        causal=causal,
    )  # fmt: skip
    close(got, out)


@pytest.mark.usefixtures("always_checked")
def test_errors_of_adapters_name_their_arguments() -> None:
    b = Batch((2, 3), (9, 7))
    args: dict[str, Any] = dict(cu_seqlens_q=b.cu_q, max_seqlen_q=b.max_q)
    long = torch.tensor([9, 70], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"cache_seqlens\[1\] = 70 needs 70 keys in the cache, but page_table\[1\]"):
        flash_attn.flash_attn_with_kvcache(
            b.q, b.k_cache, b.v_cache, cache_seqlens=long, page_table=b.table, **args, causal=True
        )
    with pytest.raises(ValueError, match=r"seqused_k\[1\] = 70 needs 70 keys"):
        flash_attn.flash_attn_varlen_func(
            b.q, b.k_cache, b.v_cache, seqused_k=long, page_table=b.table, max_seqlen_k=80, **args
        )
    with pytest.raises(TypeError, match=r"^k must be float32 "):
        flash_attn.flash_attn_varlen_func(
            b.q, b.k_cache.half(), b.v_cache.half(), seqused_k=b.used, page_table=b.table, max_seqlen_k=9, **args
        )
    with pytest.raises(TypeError, match=r"^k_cache must be float32 "):
        flash_attn.flash_attn_with_kvcache(
            b.q, b.k_cache.half(), b.v_cache.half(), cache_seqlens=b.used, page_table=b.table, **args
        )
