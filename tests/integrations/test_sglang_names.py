"""Where SGLang finds the backend, and what the backend refuses by name."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integrations import sglang_batch
from tests.integrations.sglang_batch import (
    CLOSE,
    DECODE,
    EXTEND,
    HEADS,
    Backend,
    ForwardMode,
    batch,
    layer,
    run,
    runner,
)

from sglang.srt.layers.attention import attention_registry  # isort: skip
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend  # isort: skip

from paged_attn.integrations import flash_attn  # isort: skip
from paged_attn.integrations import sglang as adapter  # isort: skip
from paged_attn.integrations.flash_attn import orders  # isort: skip


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Any:
    return sglang_batch.settled(monkeypatch)


@pytest.mark.parametrize(
    "others, word",
    [
        ({"model_config": SimpleNamespace(is_encoder_decoder=True)}, "encoders"),
        ({"kv_index_translator": SimpleNamespace(is_translating=True)}, "unified pool"),
    ],
)
def test_runners_of_another_kind_are_refused_by_name(others: dict[str, Any], word: str) -> None:
    with pytest.raises(NotImplementedError, match=word):
        Backend(runner(**others))


def test_speculation_and_context_parallelism_are_refused_by_name(settings: Any) -> None:
    settings.spec.speculative_algorithm = "NGRAM"
    with pytest.raises(NotImplementedError, match="speculative decoding by NGRAM"):
        Backend(runner())
    settings.spec.speculative_algorithm = None
    with pytest.raises(NotImplementedError, match="draft models"):
        Backend(runner(is_draft_worker=True))
    settings.parallel.attn_dcp_size = 2
    with pytest.raises(NotImplementedError, match="decode context parallelism"):
        Backend(runner())


@pytest.mark.parametrize(
    "options, others, word",
    [
        ({"is_cross_attention": True}, {}, "is_cross_attention"),
        ({"pos_encoding_mode": "ALIBI"}, {}, "ALIBI"),
        ({"logit_capping_method": "other"}, {}, "logit_capping_method other"),
        ({}, {"score_mod": object()}, "score_mod"),
        ({}, {"k_rope": torch.zeros(1)}, "k_rope"),
    ],
)
def test_layers_of_another_kind_are_refused_by_name(options: dict[str, Any], others: dict[str, Any], word: str) -> None:
    of = runner()
    with pytest.raises(NotImplementedError, match=word):
        run(of, batch(of, DECODE), layer(**options), **others)


@pytest.mark.parametrize(
    "others, word",
    [
        ({"spec_info": object(), "forward_mode": ForwardMode.DECODE}, "spec_info"),
        ({"spec_info": object(), "forward_mode": ForwardMode.TARGET_VERIFY}, "drafts of kind object"),
        ({"encoder_lens": torch.ones(3)}, "encoder_lens"),
        ({"forward_mode": ForwardMode.DLLM_EXTEND}, "DLLM_EXTEND"),
        ({"forward_mode": ForwardMode.DRAFT_EXTEND_V2}, "DRAFT_EXTEND_V2"),
    ],
)
def test_batches_of_another_kind_are_refused_by_name(others: dict[str, Any], word: str) -> None:
    of = runner()
    with pytest.raises(NotImplementedError, match=word):
        run(of, batch(of, EXTEND, **others), layer())


def test_graphs_of_prefills_and_caches_of_another_kind_are_refused_by_name() -> None:
    of = runner()
    backend = Backend(of)
    backend.init_cuda_graph_state(8, 8)
    with pytest.raises(NotImplementedError, match="EXTEND"):
        backend.init_forward_metadata_out_graph(batch(of, EXTEND))
    of.token_to_kv_pool.get_kv_buffer = lambda index: (torch.zeros(4, 2, 4, 32),) * 2
    with pytest.raises(NotImplementedError, match=r"\[4, 2, 4, 32\]"):
        run(of, batch(of, DECODE), layer(), save_kv_cache=False)


@pytest.mark.parametrize("apart", [False, True])
def test_pools_with_scales_of_blocks_are_refused_by_name(apart: bool) -> None:
    """Their numbers would be read without scales: SGLang itself lets any backend have an mxfp8 pool."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPoolMXFP8

    pool: Any = MHATokenToKVPoolMXFP8(
        size=256, page_size=128, dtype=torch.float8_e4m3fn, head_num=2, head_dim=32, layer_num=1, device="cpu",
        enable_memory_saver=False, enable_alt_stream=False,
    )  # fmt: skip
    assert pool.get_kv_buffer(0)[0].shape == (384, 2, 32), "as of a pool with one scale"
    pool = SimpleNamespace(swa_kv_pool=pool, full_kv_pool=pool) if apart else pool
    with pytest.raises(NotImplementedError, match="scales of blocks of dims, got MHATokenToKVPoolMXFP8"):
        Backend(runner(token_to_kv_pool=pool))


# ---- registration --------------------------------------------------------------------------------


def test_the_backend_is_offered_by_name_once() -> None:
    from sglang.srt import server_args

    name = adapter.register()
    assert adapter.register() == name == "paged_attn"
    assert server_args.ATTENTION_BACKEND_CHOICES.count(name) == 1
    assert server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.count(name) == 1
    made = attention_registry.ATTENTION_BACKENDS[name](runner())
    assert isinstance(made, AttentionBackend)


def test_what_the_base_class_leaves_open_is_there() -> None:
    left = ("init_cuda_graph_state", "get_cuda_graph_seq_len_fill_value", "forward_decode", "forward_extend",
            "init_forward_metadata", "init_forward_metadata_out_graph")  # fmt: skip
    for name in left:
        assert getattr(Backend, name) is not getattr(AttentionBackend, name), name


def test_an_sglang_without_a_registry_is_told_not_raised(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, attention_registry.__name__, SimpleNamespace(__name__="a registry"))
    with pytest.raises(ImportError, match="register_attention_backend"):
        adapter.register()
    adapter.plugin()
    assert "register_attention_backend" in caplog.text


def test_the_entry_point_names_the_plugin() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert '[project.entry-points."sglang.srt.plugins"]\npaged_attn = "paged_attn.integrations.sglang:plugin"' in text


def test_importing_the_adapter_imports_no_host() -> None:
    code = "import sys, paged_attn.integrations.sglang; assert 'sglang' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["flash_attn_with_kvcache", "flash_attn_varlen_func"])
def test_keywords_of_sglangs_own_functions_are_known_in_its_order(name: str) -> None:
    from sglang.kernels.ops.attention import flash_attention

    theirs = list(inspect.signature(getattr(flash_attention, name)).parameters)
    assert theirs[3:] == list(orders.ORDERS[name]["SGLang"])
    ours = inspect.signature(getattr(flash_attn, name)).parameters
    assert set(theirs) <= set(ours)


def test_absorbed_latent_attention_as_sglangs_backend_calls_it() -> None:
    """Every argument of SGLang's own function, with its defaults, over SGLang's own pool of latents."""
    from sglang.kernels.ops.attention import flash_attention
    from sglang.srt.mem_cache.layout.paged_view import paged_view
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    rank, rope, page, lens = 32, 16, 4, (9, 5, 12)
    pool = MLATokenToKVPool(
        size=48, page_size=page, dtype=torch.float32, kv_lora_rank=rank, qk_rope_head_dim=rope, layer_num=1,
        device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    torch.manual_seed(0)
    cache = pool.get_key_buffer(0)
    cache.copy_(torch.randn_like(cache))
    latents, rotated = cache[:, :, :rank], cache[:, :, rank:]
    q = torch.randn(3, HEADS, rank + rope)
    table = torch.tensor([[3, 1, 5], [2, 9, 0], [4, 8, 6]], dtype=torch.int32)
    call = inspect.signature(flash_attention.flash_attn_with_kvcache).bind(
        q=q[..., rank:], k_cache=paged_view(rotated, page), v_cache=paged_view(latents, page), qv=q[..., :rank],
        page_table=table, cache_seqlens=torch.tensor(lens, dtype=torch.int32),
        cu_seqlens_q=torch.arange(4, dtype=torch.int32), max_seqlen_q=1, softmax_scale=0.2, causal=True,
    )  # fmt: skip
    call.apply_defaults()
    wanted = []
    for s, n in enumerate(lens):
        keys = cache[(table[s].long()[:, None] * page + torch.arange(page)).flatten()[:n], 0]
        weights = (0.2 * q[s] @ keys.T).softmax(-1)
        wanted.append(weights @ keys[:, :rank])
    outs = [flash_attn.flash_attn_with_kvcache(**call.arguments), flash_attn.flash_attn_with_kvcache(*call.args)]
    for out in outs:
        torch.testing.assert_close(out, torch.stack(wanted), **CLOSE)
