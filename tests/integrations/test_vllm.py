"""The backend among vLLM's own classes: signatures, metadata, cache updates and attention, in the interpreter."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="needs vLLM: make hosts", exc_type=ImportError)
    from vllm import envs
    from vllm.config import CUDAGraphMode
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backend import AttentionImpl, AttentionType
    from vllm.v1.attention.backends import registry
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

    from paged_attn.integrations import vllm as adapter
    from paged_attn.integrations.vllm import backend, host
    from tests.integrations import vllm_batch as made

CLOSE = {"atol": 1e-5, "rtol": 1e-5}  # float32, sums in another order
HALF_STEP = {"atol": 0.02, "rtol": 2.0**-4}  # an e4m3 result: half a step of 3 bits, and as much again


# ---- attention -----------------------------------------------------------------------------------


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
    """As vLLM's Triton kernel adds it: no bias towards later keys."""
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
    torch.testing.assert_close(out, want, **CLOSE)


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
    """As a graph is replayed: queries, slots and sequences up to its sizes."""
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


# ---- batches -------------------------------------------------------------------------------------


def test_bounds_on_keys_change_seldom() -> None:
    bounds = {made.build(made.batch(made.DECODE, max_seq_len=n)).max_seq_len for n in range(1, 2049, 7)}
    assert bounds == {1024, 2048}


@pytest.mark.parametrize(
    "mode, queries",
    [
        (CUDAGraphMode.FULL, 4),  # whose replay may hold one prefill of all tokens, as vLLM 0.26 does not say
        (CUDAGraphMode.FULL_AND_PIECEWISE, 1),
        (CUDAGraphMode.FULL_DECODE_ONLY, 1),
    ],
)
def test_bounds_of_a_captured_graph_hold_at_each_replay(mode: Any, queries: int) -> None:
    common = made.batch([(1, 1)] * 4, seq_lens=torch.full((4,), 1000, dtype=torch.int32))
    metadata = made.Builder(None, [], made.config(mode, 8192), torch.device("cpu")).build_for_cudagraph_capture(common)
    assert metadata.max_seq_len == 8192
    assert metadata.max_query_len == queries
    assert metadata.seq_lens.tolist() == [1] * 4
    assert metadata.seq_lens.data_ptr() == common.seq_lens.data_ptr(), "a replay reads what vLLM writes there"


def test_a_group_may_take_over_what_another_has_built() -> None:
    builder = made.Builder(None, [], made.config(), torch.device("cpu"))
    first = builder.build(0, made.batch(made.DECODE))
    table, slots = first.block_table + 1, first.slot_mapping + 16
    second = builder.update_block_table(first, table, slots)
    assert second.block_table is table
    assert second.slot_mapping is slots
    assert second.seq_lens is first.seq_lens


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, word",
    [
        ({"attn_type": "something else"}, "something else"),
        ({"chunk_lookback": 1}, "chunk_lookback"),
        ({"something": 3}, "something"),
    ],
)
def test_layers_of_another_kind_are_refused_by_name(options: dict[str, Any], word: str) -> None:
    with pytest.raises(NotImplementedError, match=word):
        made.implementation(**options)


@pytest.mark.parametrize("name, what", [("dcp_world_size", "decode"), ("pcp_world_size", "prefill")])
def test_context_parallelism_is_refused_by_name(name: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made_first = AttentionImpl.__new__

    def new(cls: type, *args: Any, **keywords: Any) -> Any:
        impl = made_first(cls)
        setattr(impl, name, 2)
        return impl

    monkeypatch.setattr(AttentionImpl, "__new__", new)
    with pytest.raises(NotImplementedError, match=f"{what} context parallelism"):
        made.implementation()


@pytest.mark.parametrize(
    "others, word",
    [
        ({"dcp_local_seq_lens": torch.tensor([3, 3, 3])}, "decode context parallelism"),
    ],
)
def test_batches_of_another_kind_are_refused_by_name(others: dict[str, Any], word: str) -> None:
    with pytest.raises(NotImplementedError, match=word):
        made.build(made.batch(made.DECODE, **others))


def test_values_of_another_size_and_block_scales_are_refused_by_name() -> None:
    impl = made.implementation()
    with pytest.raises(NotImplementedError, match="keys beside values of the same size"):
        impl.caches(torch.empty(4, made.KV_HEADS, made.PAGE, made.DIM + 16))
    q = torch.zeros(1, made.HEADS, made.DIM)
    with pytest.raises(NotImplementedError, match="output_block_scale"):
        impl.forward(made.layer(), q, q, q, made.cache(), made.build(made.batch(made.DECODE)), q, None, torch.ones(1))


def test_a_host_of_another_contract_is_refused_by_what_differs() -> None:
    class Impl(AttentionImpl):
        def forward(self, layer: Any, query: Any, key: Any, something: Any) -> Any: ...

    common = type(made.batch(made.DECODE))
    with pytest.raises(RuntimeError, match="something"):
        host.check(Impl, made.Builder, common)

    class Missing(backend.Backend):
        pass

    Missing.__abstractmethods__ = frozenset({"get_something"})  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="get_something"):
        host.implemented(Missing)


def test_fields_that_are_not_known_may_not_be_set() -> None:
    import dataclasses

    common = type(made.batch(made.DECODE))
    wider = dataclasses.make_dataclass("Wider", [("something", Any, dataclasses.field(default=None))], bases=(common,))
    unknown = host.check(made.Impl, made.Builder, wider)
    assert unknown == ("something",)
    given = vars(made.batch(made.DECODE))
    host.refuse(wider(**given), unknown)
    with pytest.raises(NotImplementedError, match="something"):
        host.refuse(wider(**given, something=1), unknown)


# ---- what vLLM asks ------------------------------------------------------------------------------


def test_nothing_of_this_host_is_unknown() -> None:
    assert host.check(AttentionImpl, made.Builder, type(made.batch(made.DECODE))) == ()


def test_the_layer_takes_the_arguments_of_vllms_own() -> None:
    theirs, ours = (made.parameters(x.__init__) for x in (TritonAttentionImpl, made.Impl))
    assert set(theirs) - set(ours) <= {"chunk_lookback"}
    positional = made.parameters(AttentionImpl.__init__)
    assert ours[: len(positional)] == positional, "vLLM passes them by position"
    for name in ("forward", "do_kv_cache_update"):
        assert made.parameters(getattr(made.Impl, name)) == made.parameters(getattr(TritonAttentionImpl, name))


def asked(**others: Any) -> list[str]:
    """Why vLLM would not take the backend for such a model."""
    given: dict[str, Any] = dict(
        head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=16, use_mla=False, has_sink=False,
        use_sparse=False, use_mm_prefix=False, use_per_head_quant_scales=False,
        device_capability=DeviceCapability(9, 0), attn_type=AttentionType.DECODER,
    )  # fmt: skip
    return backend.Backend.validate_configuration(**given | others)


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"has_sink": True},
        {"has_sliding_window": True},
        {"use_non_causal": True},
        {"use_mm_prefix": True},
        {"use_batch_invariant": True},
        {"attn_type": AttentionType.ENCODER_ONLY},
        {"attn_type": AttentionType.ENCODER_DECODER},
        {"use_per_head_quant_scales": True, "kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "fp8_e5m2", "head_size": 80, "block_size": 544, "dtype": torch.float16},
    ],
)
def test_vllm_finds_no_reason_against_what_is_served(others: dict[str, Any]) -> None:
    assert asked(**others) == []


@pytest.mark.parametrize(
    "others, word",
    [
        ({"use_mla": True}, "MLA"),
        ({"attn_type": "something else"}, "attention type"),
        ({"head_size": 640}, "head_size"),
        ({"block_size": 12}, "block_size"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype"),
        ({"use_pcp": True}, "PCP"),
    ],
)
def test_vllm_refuses_by_name_what_is_not(others: dict[str, Any], word: str) -> None:
    assert any(word in reason for reason in asked(**others))


def test_decode_context_parallelism_is_refused_by_vllm_where_it_asks() -> None:
    if "use_dcp" not in made.parameters(backend.Backend.validate_configuration):
        pytest.skip("this vLLM does not ask: the layer refuses it")
    assert any("DCP" in reason for reason in asked(use_dcp=True))


def test_layouts_offered_are_all_of_which_whole_pages_come_first() -> None:
    if hasattr(backend.AttentionBackend, "get_required_kv_cache_layout"):  # vLLM asks for shape and order
        assert backend.Backend.get_required_kv_cache_layout() == "HND"
        shape = backend.Backend.get_kv_cache_shape(7, 16, 2, 64)
        assert shape == (7, 2, 16, 128)
        return
    from vllm.v1.kv_cache_interface import KVCacheLayout

    layouts = backend.Backend.supported_kv_cache_layouts()
    assert layouts is not None
    assert {*layouts} == {*KVCacheLayout}
    assert layouts[0].name == "LBHNC"


def test_the_order_of_axes_follows_the_layout_that_the_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends import utils

    order = backend.Backend.get_kv_cache_stride_order
    for layout, alone, layers in (("HND", (0, 1, 2, 3), (1, 2, 0, 3, 4)), ("NHD", (0, 2, 1, 3), (1, 0, 3, 2, 4))):
        monkeypatch.setattr(utils, "get_kv_cache_layout", lambda layout=layout: layout, raising=False)
        assert (order(), order(include_num_layers_dimension=True)) == (alone, layers)
    monkeypatch.setattr(envs, "VLLM_KV_CACHE_LAYOUT", "NHD", raising=False)
    assert backend.Backend.get_required_kv_cache_layout() is None


# ---- registration --------------------------------------------------------------------------------


@pytest.fixture
def unregistered() -> Any:
    adapter.unregister()
    yield registry.AttentionBackendEnum
    adapter.unregister()
    registry.AttentionBackendEnum.CUSTOM.clear_override()


def test_registering_takes_the_custom_backend_and_can_be_undone(unregistered: Any) -> None:
    assert adapter.register() == "CUSTOM"
    assert adapter.register() == "CUSTOM"  # once more is no change
    assert unregistered.CUSTOM.get_class() is backend.Backend
    assert unregistered[backend.Backend.get_name()] is unregistered.CUSTOM
    assert not unregistered.CPU_ATTN.is_overridden()
    adapter.unregister()
    assert not unregistered.CUSTOM.is_overridden()


def test_the_backend_for_cpus_is_replaced_only_when_asked(unregistered: Any) -> None:
    assert adapter.register("CPU_ATTN") == "CPU_ATTN"
    assert unregistered.CPU_ATTN.get_class() is backend.CPUBackend
    assert backend.CPUBackend.get_name() == "CPU_ATTN"
    with pytest.raises(ValueError, match="FLASH_ATTN"):
        adapter.register("FLASH_ATTN")


def test_another_plugins_backend_is_left_alone(unregistered: Any, caplog: pytest.LogCaptureFixture) -> None:
    registry.register_backend(unregistered.CUSTOM, "another.plugin.Backend")
    with pytest.raises(RuntimeError, match=r"another\.plugin"):
        adapter.register()
    adapter.plugin()  # vLLM goes on
    assert "another.plugin" in caplog.text
    adapter.unregister()
    assert unregistered.CUSTOM.get_path() == "another.plugin.Backend"


def test_a_vllm_without_a_registry_is_told_not_raised(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, registry.__name__, SimpleNamespace())
    with pytest.raises(ImportError, match="AttentionBackendEnum"):
        adapter.register()
    adapter.plugin()
    assert "AttentionBackendEnum" in caplog.text


def test_the_entry_point_names_the_plugin() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert '[project.entry-points."vllm.general_plugins"]\npaged_attn = "paged_attn.integrations.vllm:plugin"' in text
    assert callable(adapter.plugin)


def test_importing_the_adapter_imports_no_host() -> None:
    code = "import sys, paged_attn.integrations.vllm; assert 'vllm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
