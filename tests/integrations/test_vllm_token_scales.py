"""Caches of vLLM with scales by token: int8, fp8 and int4, whose heads are rotated first."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import warm

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="needs vLLM: make hosts", exc_type=ImportError)
    from vllm import version
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym
    from vllm.v1.attention.ops.int4_per_token_head import single_rht
    from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

    from paged_attn.integrations.vllm import backend
    from paged_attn.integrations.vllm.backend import DiffKVBackend, DiffKVImpl
    from tests.integrations import vllm_batch as made
    from tests.support.formats import E4M3, INT8, int4_numbers, with_zero

CLOSE = {"atol": 1e-5, "rtol": 1e-5}  # float32, sums in another order
LAYOUTS = ["HND", "NHD", "layers inside"]
KINDS = ["int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"]
INT4 = "int4_per_token_head"


def tails(kv: Tensor) -> list[Tensor]:
    """Scales [blocks, kv_heads, block] behind keys and behind values."""
    return [x[..., -4:].view(torch.float32)[..., 0] for x in kv.view(torch.uint8).chunk(2, -1)]


def written(x: Tensor, slots: Tensor) -> Tensor:
    """Rows [tokens, kv_heads, ...] of a part of the cache."""
    return x.transpose(1, 2)[slots // made.PAGE, slots % made.PAGE]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS[:2])
def test_scales_by_token_lie_behind_keys_and_behind_values(kind: str, layout: str) -> None:
    """What vLLM's own kernels write is read, and what is written lies where these read it."""
    dtype = INT8 if kind.startswith("int8") else E4M3
    kv = made.cache(layout, dtype, tail=4)
    scales = tails(kv)
    for scale in scales:
        scale.copy_(0.02 + 0.01 * torch.rand(scale.shape))
    out, told = made.attend(made.implementation(kv_cache_dtype=kind), kv, made.MIXED)
    told = told | dict(zip(("k_scale", "v_scale"), scales))
    torch.testing.assert_close(out, made.wanted(told), **CLOSE)

    k, v = (x[: len(out)] for x in made.tensors(len(out) + 3)[1:])
    slots = made.batch(made.MIXED).slot_mapping
    for new, half, scale in zip((k, v), kv.view(torch.uint8).chunk(2, -1), scales):
        got, by = written(half[..., : made.DIM].view(dtype), slots).float(), written(scale, slots)
        largest = 127.0 if dtype == INT8 else 448.0
        torch.testing.assert_close(by, new.abs().amax(-1) / largest)
        step = by[..., None] if dtype == INT8 else new.abs() / 8
        assert ((got * by[..., None] - new).abs() <= 0.51 * step + 1e-3).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", [made.DECODE, made.MIXED, made.DRAFTS])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 8, "sinks": torch.tensor([1.0, -1.0, 0.5, 2.0])}])
def test_heads_are_rotated_before_int4_and_results_are_turned_back(
    options: dict[str, Any], lengths: Any, layout: str
) -> None:
    """The rotation is vLLM's own, whose square is the number of dims."""
    kv = made.cache(layout, torch.uint8, tail=4, dims=made.DIM // 2)
    scales = tails(kv)
    for scale in scales:
        zero = torch.randint(16, scale.shape)
        scale.copy_(with_zero(0.5 + 0.1 * torch.rand(scale.shape), zero))
    out, told = made.attend(made.implementation(kv_cache_dtype=INT4, **options), kv, lengths)
    told |= dict(zip(("k_scale", "v_scale"), scales)) | dict(q=single_rht(told["q"]))
    told |= dict(softmax_scale=made.DIM**-0.5 / made.DIM, sinks=options.get("sinks"))
    want = made.wanted(told, window_size=(options.get("sliding_window", 0) - 1, 0))
    torch.testing.assert_close(out, single_rht(want, inverse=True) / made.DIM, **CLOSE)

    k, v = (x[: len(out)] for x in made.tensors(len(out) + 3)[1:])
    slots = made.batch(lengths).slot_mapping
    for new, half, scale in zip((k, v), kv.chunk(2, -1), scales):
        numbers, step = int4_numbers(written(half[..., :-4], slots), written(scale, slots))
        assert ((numbers * step - single_rht(new)).abs() <= 0.501 * step).all()


def test_values_of_another_width_than_keys_are_rotated_too() -> None:
    dims, value = made.DIM // 2, 16
    DiffKVBackend.set_head_size_v(value)
    shape = DiffKVBackend.get_kv_cache_shape(made.PAGES, made.PAGE, made.KV_HEADS, made.DIM, INT4)
    assert shape[-1] == dims + value // 2 + 8
    kv = torch.randint(256, shape, dtype=torch.uint8)
    scales = [kv[..., end - 4 : end].view(torch.float32)[..., 0] for end in (dims + 4, shape[-1])]
    for scale in scales:
        scale.copy_(with_zero(0.5 + 0.1 * torch.rand(scale.shape), torch.randint(16, scale.shape)))
    impl = DiffKVImpl(made.HEADS, made.DIM, 0.3, made.KV_HEADS, kv_cache_dtype=INT4)
    common = made.batch(made.DECODE)
    q, k, v = made.tensors(common.num_actual_tokens)
    impl.do_kv_cache_update(made.layer(), k, v[..., :value], kv, common.slot_mapping)
    out = impl.forward(made.layer(), q, k, v, kv, made.build(common), torch.empty(len(q), made.HEADS, value))
    told = dict(k_cache=kv[..., :dims], v_cache=kv[..., dims + 4 : -4], k_scale=scales[0], v_scale=scales[1])
    told |= dict(page_table=common.block_table_tensor, seq_lens=common.seq_lens, kv_layout="HND")
    want = made.wanted(told | dict(q=single_rht(q), softmax_scale=0.3 / made.DIM))
    torch.testing.assert_close(out, single_rht(want, inverse=True) / value, **CLOSE)


def test_a_rotation_is_real_where_layers_are_made_on_the_meta_device() -> None:
    kv = made.cache("HND", torch.uint8, tail=4, dims=made.DIM // 2)
    for scale in tails(kv):
        scale.fill_(0.5)
    with torch.device("meta"):
        impl = made.implementation(kv_cache_dtype=INT4)
    want, _ = made.attend(made.implementation(kv_cache_dtype=INT4), kv, made.DECODE)
    assert torch.equal(made.attend(impl, kv, made.DECODE)[0], want)


def test_no_operator_before_or_behind_attention_is_fused_with_int4() -> None:
    """vLLM would write keys before they are rotated for int4, and quantise results before they are turned back."""
    for kind in KINDS:
        impl = made.implementation(kv_cache_dtype=kind)
        assert impl.fused_rope_kvcache_supported() is impl.fused_qk_norm_rope_kvcache_supported() is (kind != INT4)
        assert impl.fused_output_quant_supported(kFp8StaticTensorSym) is (kind != INT4)


@pytest.mark.parametrize("kind, width", [(KINDS[0], 64 + 4), (KINDS[1], 64 + 4), (INT4, 32 + 4)])
def test_rows_are_as_wide_as_vllm_has_them(kind: str, width: int) -> None:
    if not hasattr(backend.AttentionBackend, "customize_spec"):
        assert backend.Backend.get_kv_cache_shape(7, 16, 2, 64, kind) == (7, 2, 16, 2 * width)
        return
    sizes = dict(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.uint8, kv_quant_mode=get_kv_quant_mode(kind))
    assert backend.Backend.customize_spec(FullAttentionSpec(**sizes)).state_content_bytes == 2 * width
    plain = FullAttentionSpec(**sizes | {"kv_quant_mode": get_kv_quant_mode("auto")})
    assert backend.Backend.customize_spec(plain) is plain


@pytest.mark.kernels
@pytest.mark.skipif("cpu" in version.__version__, reason="vLLM for CPUs has no Triton")
def test_vllms_own_kernels_write_what_is_read_and_what_is_written() -> None:
    """In the interpreter, whose own conversion to e4m3 rounds some numbers down: there, only reading is compared."""
    done = warm.run(["-m", "tests.integrations.vllm_kernels", *KINDS], os.environ, Path(__file__).parents[2])
    told = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert [x["kind"] for x in told] == KINDS, done.stderr[-4000:]
    assert all(x["off"] < 1e-5 for x in told)
    assert [x["differ"] for x in told if x["kind"] != KINDS[1]] == [0.0, 0.0]
