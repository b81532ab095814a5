"""What FlashAttention's functions refuse, by name; their signatures; the module that stands in for its own."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch

from paged_attn.integrations import flash_attn
from paged_attn.integrations.flash_attn import orders, stand_in
from tests.integrations.by_hand import Batch


@pytest.fixture(scope="module")
def batch() -> Batch:
    return Batch((5, 1, 3), (9, 17, 3))


REFUSED = [
    ({"dropout_p": 0.1}, ValueError, "has no dropout_p: it must be 0 or left out, got 0.1"),
    ({"cp_world_size": 2}, ValueError, "has no cp_world_size: it must be 1 or left out, got 2"),
    ({"attention_chunk": -64}, ValueError, "chunk must be None or an int >= 1"),
    ({"rel_bias": torch.ones(9, 4, 8)}, ValueError, "has no rel_bias: it must be None or left out, got a Tensor"),
    ({"only_qv": True}, ValueError, "needs qv where only_qv is True"),
    ({"mask_mod": max}, ValueError, "has no mask_mod"),
    ({"score_mod": max}, ValueError, "has no score_mod"),
    ({"alibi_slopes": torch.ones(2, 4)}, ValueError, r"alibi_slopes must be \[seqs, heads\] with seqs = 3"),
    ({"window_size": (-3, 0)}, ValueError, r"window_size\[0\] must be"),
    (
        {"blocktable": None},
        TypeError,
        "unknown keyword 'blocktable' \\(did you mean block_table\\?\\); known: alibi_slopes, attention_chunk",
    ),
    ({"block_table": torch.ones(3, 1).int(), "page_table": torch.ones(3, 1).int()}, TypeError, "got page_table twice"),
    ({"cu_seqlens_q": torch.ones(4).int()}, TypeError, "fit no order"),
]


@pytest.mark.parametrize(("more", "error", "text"), REFUSED, ids=[" ".join(more) for more, _, _ in REFUSED])
def test_what_is_not_known_is_refused_by_name(
    batch: Batch, no_launch: None, more: dict[str, Any], error: type[Exception], text: str
) -> None:
    b = batch
    with pytest.raises(error, match=text):
        flash_attn.flash_attn_varlen_func(b.q, b.k, b.v, b.cu_q, b.cu_k, b.max_q, b.max_k, **more)


def test_orders_that_cannot_be_told_apart_are_refused(no_launch: None) -> None:
    q = torch.ones(2, 3, 4, 16)
    with pytest.raises(TypeError, match="fit the orders of FA2 and FA3, which mean different things"):
        flash_attn.flash_attn_func(q, q, q, 0.125)  # a dropout, or a scale
    with pytest.raises(TypeError, match="fit the orders of FA2 and FA3"):
        flash_attn.flash_attn_with_kvcache(q, q, q, *[None] * 5, torch.ones(2).int())
    with pytest.raises(TypeError, match=r"fit no order of FA2, FA3, SGLang: \[-, -, str\]"):
        flash_attn.flash_attn_with_kvcache(q, q, q, None, None, "text")


def test_incomplete_calls_say_what_is_missing(batch: Batch, no_launch: None) -> None:
    b, q, cos = batch, batch.q[:3, None], torch.ones(9, 4)
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: flash_attn.flash_attn_varlen_func(b.q, b.k, b.v), TypeError, "needs cu_seqlens_q"),
        (lambda: flash_attn.flash_attn_varlen_func(b.q, b.k, b.v, b.max_q, b.cu_q), TypeError,
         "cu_seqlens_k or seqused_k"),
        (lambda: flash_attn.flash_attn_varlen_func(b.q, b.k, b.v, b.max_q, b.cu_q, b.max_k, None, b.used), TypeError,
         "cu_seqlens_k where k has neither"),
        (lambda: flash_attn.flash_attn_with_kvcache(q, b.k_cache, b.v_cache, k=q), ValueError, "k needs cache_seqlens"),
        (lambda: flash_attn.flash_attn_with_kvcache(q, b.k_cache, b.v_cache, k=q, cache_seqlens=b.used), ValueError,
         "k and v must be given together"),
        (lambda: flash_attn.flash_attn_with_kvcache(q, b.k_cache, b.v_cache, rotary_cos=cos, rotary_sin=cos),
         ValueError, "rotary_cos needs k and v"),
        (lambda: flash_attn.flash_attn_with_kvcache(q, b.k_cache, b.v_cache, rotary_cos=cos), ValueError,
         "must be given together"),
        (lambda: flash_attn.unified_attention(b.q, b.k, b.v, out=b.q), TypeError, "needs cu_seqlens_q"),
    ]  # fmt: skip
    for call, error, text in cases:
        with pytest.raises(error, match=text):
            call()


def test_hosts_that_ask_for_the_signature_see_every_name() -> None:
    for function in orders.ORDERS:
        known = inspect.signature(getattr(flash_attn, function)).parameters
        assert {name for order in orders.ORDERS[function].values() for name in order} <= set(known)
    assert list(inspect.signature(flash_attn.flash_attn_varlen_func).parameters)[:7] == [
        "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k",
    ]  # fmt: skip


def test_nothing_is_put_in_place_until_install() -> None:
    code = """
import sys, importlib.util, types
import paged_attn.integrations.flash_attn as ours
assert "flash_attn" not in sys.modules and "transformers" not in sys.modules and "vllm" not in sys.modules
module = ours.install()
import flash_attn
from flash_attn.flash_attn_interface import flash_attn_varlen_func
assert flash_attn is module is ours.install() and flash_attn_varlen_func is ours.flash_attn_varlen_func
assert importlib.util.find_spec("flash_attn") is not None and flash_attn.__version__.startswith("2.")
assert not hasattr(flash_attn, "flash_attn_qkvpacked_func")
ours.uninstall(); ours.uninstall()
assert "flash_attn" not in sys.modules and "flash_attn.flash_attn_interface" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_imported_flash_attn_is_not_replaced_unless_forced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import types

    real, inner = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.layers")
    real.__version__ = "2.7.4"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", real)
    monkeypatch.setitem(sys.modules, "flash_attn.layers", inner)
    with pytest.raises(RuntimeError, match=r"flash_attn 2\.7\.4 of None has been imported already"):
        stand_in.install()
    stand_in.install(force=True)
    assert "replaces flash_attn 2.7.4" in caplog.text
    assert sys.modules["flash_attn"] is not real
    assert "flash_attn.layers" not in sys.modules
    stand_in.uninstall()
    assert sys.modules["flash_attn"] is real
    assert sys.modules["flash_attn.layers"] is inner
    assert "flash_attn.flash_attn_interface" not in sys.modules
