"""The backend among vLLM's own classes: cache updates and attention, in the interpreter."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="needs vLLM: make hosts", exc_type=ImportError)
    from vllm import envs

    from paged_attn.integrations.vllm import backend
    from tests.integrations import vllm_batch as made
    from tests.support.torch_ways import IN_TORCH

CLOSE = {"atol": 1e-5, "rtol": 1e-5}  # float32, sums in another order
HALF_STEP = {"atol": 0.02, "rtol": 2.0**-4}  # an e4m3 result: half a step of 3 bits, and as much again


@pytest.mark.parametrize("layout", ["HND", "NHD", "layers inside"])
@pytest.mark.parametrize("lengths", [made.DECODE, made.PREFILL, made.MIXED, made.DRAFTS])
def test_new_keys_are_written_and_attended_where_vllm_keeps_them(layout: str, lengths: Any) -> None:
    kv = made.cache(layout)
    before = kv.clone()
    out, told = made.attend(made.implementation(), kv, lengths)
    torch.testing.assert_close(out, made.wanted(told), **CLOSE)
    _, k, v = made.tensors(len(out) + 3)
    slots = made.batch(lengths).slot_mapping
    written = kv.transpose(1, 2)[slots // made.PAGE, slots % made.PAGE]
    assert torch.equal(written, torch.cat([k, v], -1)[: len(out)])
    changed = (kv != before).any(-1).any(1).nonzero()
    assert len(changed) == len(slots), "nothing else is written"


@pytest.mark.parametrize(
    "options, same",
    [
        ({"sliding_window": 8}, {"window_size": (7, 0)}),
        ({"logits_soft_cap": 2.0}, {"softcap": 2.0}),
        ({"alibi_slopes": [0.5, 0.25, 0.1, 0.05]}, {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.05])}),
        ({"sinks": torch.tensor([1.0, -1.0, 0.5, 2.0])}, {"sinks": torch.tensor([1.0, -1.0, 0.5, 2.0])}),
        ({"scale": 0.3}, {"softmax_scale": 0.3}),
        ({"use_alibi_sqrt": False, "chunk_lookback": -1}, {}),
    ],
)
def test_options_of_a_layer_are_those_of_paged_attention(options: dict[str, Any], same: dict[str, Any]) -> None:
    out, told = made.attend(made.implementation(**options), made.cache(), made.MIXED)
    torch.testing.assert_close(out, made.wanted(told, **same), **CLOSE)


def test_a_bias_may_be_of_square_roots() -> None:
    """The bias is that of vLLM's Triton kernel: later keys have no bias."""
    slopes = [0.5, 0.25, 0.1, 0.05]
    told = dict(score_mod_args=(torch.tensor(slopes, dtype=torch.float64)[:, None, None],))
    told["score_mod"] = lambda s, query, key, head, x: s - x * (query - key).clamp(min=0).double().sqrt()  # type: ignore[assignment]
    impl = made.implementation(alibi_slopes=slopes, use_alibi_sqrt=True)
    for causal in (True, False):
        out, call = made.attend(impl, made.cache(), made.MIXED, causal=causal)
        torch.testing.assert_close(out, made.wanted(call, causal=causal, **told), **CLOSE)
    assert backend.Backend.supports_alibi_sqrt()


def test_without_causality_a_window_looks_both_ways() -> None:
    out, told = made.attend(made.implementation(), made.cache(), made.PREFILL, causal=False)
    torch.testing.assert_close(out, made.wanted(told, causal=False), **CLOSE)
    out, told = made.attend(made.implementation(sliding_window=4), made.cache(), made.PREFILL, causal=False)
    torch.testing.assert_close(out, made.wanted(told, causal=False, window_size=(3, 3)), **CLOSE)


def test_causality_may_differ_by_sequence() -> None:
    causal = torch.arange(len(made.PREFILL)) % 2 == 0
    out, told = made.attend(made.implementation(), made.cache(), made.PREFILL, causal=causal)
    torch.testing.assert_close(out, made.wanted(told, causal=causal), **CLOSE)
    out, told = made.attend(made.implementation(sliding_window=4), made.cache(), made.PREFILL, causal=causal)
    torch.testing.assert_close(out, made.wanted(told, causal=causal, window_size=(3, 3)), **CLOSE)


@pytest.mark.parametrize("window, clamp", [(None, False), (4, False), (4, True)])
def test_tokens_of_an_image_see_each_other(window: int | None, clamp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's ranges hold their last token, and are of some of the sequences; a range of one token is none."""
    monkeypatch.setattr("vllm.utils.torch_utils.PIN_MEMORY", False, raising=False)
    ranges = {0: [(18, 27), (30, 30), (33, 36)], 2: []}
    of = made.layer()
    of.mm_prefix_clamp_sliding_window = clamp
    impl = made.implementation(sliding_window=window)
    out, told = made.attend(impl, made.cache(), made.MIXED, of=of, mm_req_doc_ranges=ranges)
    spans = torch.full((3, 2, 2), -1)
    spans[0] = torch.tensor([[18, 28], [33, 37]])
    sides = (-1, -1) if window is None else (window - 1, -1)
    want = made.wanted(told, spans=spans, clip_spans=clamp, window_size=sides)
    torch.testing.assert_close(out, want, **CLOSE)
    assert not torch.allclose(out, made.wanted(told, window_size=sides))
    spans = made.build(made.batch(made.MIXED, mm_req_doc_ranges=ranges)).spans
    assert spans is not None
    assert spans.shape == (3, 4, 2), "a power of two"
    assert made.build(made.batch(made.MIXED, mm_req_doc_ranges={0: []})).spans is None


@pytest.mark.parametrize("kind", ["fp8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("scale", [0.5, [0.5, 0.25]])
def test_fp8_caches_are_bytes_with_a_scale_for_all_heads_or_for_each(kind: str, scale: Any) -> None:
    kv = made.cache(dtype=made.FP8[kind])
    assert kv.dtype is torch.uint8
    impl = made.implementation(kv_cache_dtype=kind)
    out, told = made.attend(impl, kv, made.MIXED, of=made.layer(scale))
    scales = {"k_scale": torch.tensor(scale), "v_scale": torch.tensor(scale)}
    torch.testing.assert_close(out, made.wanted(told, **scales), **CLOSE)


def test_queries_may_be_fp8_too() -> None:
    impl = made.implementation(kv_cache_dtype="fp8")
    kv = made.cache(dtype=torch.float8_e4m3fn)
    out, told = made.attend(impl, kv, made.MIXED, of=made.layer(0.5), query=torch.float8_e4m3fn)
    scales = {f"{name}_scale": torch.tensor(0.5) for name in "qkv"}
    want = made.wanted(told, **scales, out=torch.empty(out.shape))
    # plain torch rounds weights to bfloat16
    torch.testing.assert_close(out, want, **(dict(rtol=0, atol=2**-8) if IN_TORCH else CLOSE))


def test_results_may_be_quantised_where_vllm_fuses_that() -> None:
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym, kNvfp4Dynamic

    impl = made.implementation()
    assert impl.fused_output_quant_supported(kFp8StaticTensorSym)
    assert not impl.fused_output_quant_supported(kNvfp4Dynamic)
    scale = torch.tensor([0.125])
    out, told = made.attend(impl, made.cache(), made.MIXED, out_dtype=torch.float8_e4m3fn, output_scale=scale)
    torch.testing.assert_close(out.float() * scale, made.wanted(told), **HALF_STEP)


def test_a_layer_may_read_the_cache_of_another() -> None:
    kv = made.cache()
    first, _ = made.attend(made.implementation(), kv, made.MIXED)
    before = kv.clone()
    shares = made.implementation(kv_sharing_target_layer_name="layer")
    second, _ = made.attend(shares, kv, made.MIXED, update=False)
    assert shares.kv_sharing_target_layer_name == "layer"
    assert torch.equal(first, second)
    assert torch.equal(kv, before)


def test_padding_has_negative_slots_and_sequences_of_no_keys() -> None:
    """A graph's replay has such padding: queries, slots and sequences up to the graph's sizes."""
    kv = made.cache()
    common = made.batch(made.DECODE)
    want, _ = made.attend(made.implementation(), kv.clone(), made.DECODE)
    padded = common.replace(
        query_start_loc=torch.cat([common.query_start_loc, common.query_start_loc[-1:]]),
        seq_lens=torch.cat([common.seq_lens, torch.zeros(1, dtype=torch.int32)]),
        block_table_tensor=torch.cat([common.block_table_tensor, torch.full((1, 4), -1, dtype=torch.int32)]),
        slot_mapping=torch.cat([common.slot_mapping, torch.tensor([-1])]),
        num_reqs=4,
        num_actual_tokens=4,
    )
    q, k, v = made.tensors(4)
    rows = [x[:3] for x in made.tensors(6)]
    q[:3], k[:3], v[:3] = rows
    k[3:], v[3:] = float("nan"), float("nan")
    out = torch.full_like(q, 7.0)
    impl, metadata = made.implementation(), made.build(padded)
    impl.do_kv_cache_update(made.layer(), k, v, kv, metadata.slot_mapping)
    impl.forward(made.layer(), q, k, v, kv, metadata, out)
    torch.testing.assert_close(out[:3], want, **CLOSE)
    assert not out[3].any()
    assert not kv.isnan().any()


def test_results_have_the_same_bits_in_any_batch_if_vllm_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    impl, kv = made.implementation(), made.cache()
    assert impl.batch_invariant
    together, _ = made.attend(impl, kv, made.MIXED)
    common = made.batch(made.MIXED)
    alone = torch.empty(1, made.HEADS, made.DIM)
    q = made.tensors(len(together) + 3)[0][20:21]
    single = made.build(
        made.batch([(1, 34)], block_table_tensor=common.block_table_tensor[1:2].clone())  # its keys are there already
    )
    impl.forward(made.layer(), q, q, q, kv, single, alone)
    assert torch.equal(alone[0], together[20])


def test_a_profiling_run_gives_zeros() -> None:
    out = torch.ones(3, made.HEADS, made.DIM)
    made.implementation().forward(made.layer(), out, out, out, torch.empty(0), None, out)
    assert not out.any()


def test_views_of_a_cache_are_made_once_and_again_for_another() -> None:
    impl, first = made.implementation(), made.cache()
    assert impl.caches(first)[0] is impl.caches(first)[0]
    second = first.clone()
    assert impl.caches(second)[0].data_ptr() == second.data_ptr()
