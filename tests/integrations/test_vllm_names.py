"""What vLLM asks of the backend, and where it finds it."""

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
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backend import AttentionImpl, AttentionType
    from vllm.v1.attention.backends import registry
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

    from paged_attn.integrations import vllm as adapter
    from paged_attn.integrations.vllm import backend, host
    from tests.integrations import vllm_batch as made


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
        {"kv_cache_dtype": "int8_per_token_head"},
        {"kv_cache_dtype": "fp8_per_token_head"},
        {"kv_cache_dtype": "int4_per_token_head"},
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


def test_vllm_finds_no_reason_against_decode_context_parallelism() -> None:
    if "use_dcp" in made.parameters(backend.Backend.validate_configuration):
        assert asked(use_dcp=True) == []
    assert made.Impl.supports_dcp


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
