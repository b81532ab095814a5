"""The backend over SGLang's own pools, layers and batches, in the interpreter: its base class and registry, too."""

from __future__ import annotations

import inspect
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
    try:
        import torchvision  # noqa: F401
    except ImportError:
        pass
    except RuntimeError:  # a wheel whose operators are for another torch: none of them is called here
        _operators = torch.library.Library("torchvision", "FRAGMENT")
        for _name in ("nms", "qnms"):
            _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    pytest.importorskip("sglang", reason="needs SGLang: make hosts")
    pytest.importorskip("sglang.srt.layers.attention.attention_registry", exc_type=ImportError)
    from sglang.srt import runtime_context
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    import paged_attn
    from paged_attn.integrations import flash_attn
    from paged_attn.integrations import sglang as adapter
    from paged_attn.integrations.flash_attn import orders
    from paged_attn.integrations.sglang import tables
    from paged_attn.integrations.sglang.backend import Backend

CLOSE = {"atol": 1e-5, "rtol": 1e-5}  # float32, sums in another order
HEADS, KV_HEADS, DIM, CONTEXT, SLOTS = 4, 2, 32, 96, 512
# (new tokens, keys with them) of each sequence
DECODE = [(1, 34), (1, 5), (1, 17)]
EXTEND = [(20, 37), (5, 5), (1, 40)]


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What SGLang keeps of a server's arguments, as its defaults are."""
    chosen = SimpleNamespace(
        spec=SimpleNamespace(speculative_algorithm=None),
        exec=SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=False)),
        parallel=SimpleNamespace(attn_dcp_size=1),
    )
    for name in vars(chosen):
        monkeypatch.setattr(runtime_context, f"get_{name}", lambda name=name: getattr(chosen, name))
    return chosen


def runner(page_size: int = 1, dtype: torch.dtype = torch.float32, **others: Any) -> Any:
    """What of a model runner the backend looks at: SGLang's own pools."""
    pool = MHATokenToKVPool(
        size=SLOTS, page_size=page_size, dtype=dtype, head_num=KV_HEADS, head_dim=DIM, layer_num=1, device="cpu",
        enable_memory_saver=False, enable_alt_stream=False,
    )  # fmt: skip
    rng = torch.Generator().manual_seed(2)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.view(dtype).copy_(torch.randn(buffer.shape, generator=rng).to(dtype))
    given = dict(
        token_to_kv_pool=pool,
        req_to_token_pool=ReqToTokenPool(8, CONTEXT, "cpu", False),
        page_size=page_size,
        model_config=SimpleNamespace(is_encoder_decoder=False),
        use_mla_backend=False,
        kv_index_translator=SimpleNamespace(is_translating=False),
    )
    return SimpleNamespace(**given | others)


def batch(of: Any, lengths: list[tuple[int, int]], **others: Any) -> ForwardBatch:
    """Requests in rows of no order; pages of slots in no order; tails of rows far out of range."""
    page = of.page_size
    ids = 1 + torch.randperm(SLOTS // page - 1, generator=torch.Generator().manual_seed(1))
    rows = torch.tensor([5, 2, 7])[: len(lengths)]
    table, new, used = of.req_to_token_pool.req_to_token, [], 0
    table.fill_(2**31 - 1)
    for row, (fresh, keys) in zip(rows.tolist(), lengths, strict=True):
        own = ids[used : (used := used + -(-keys // page))]
        places = torch.arange(keys)
        slots = own[places // page] * page + places % page
        table[row, :keys] = slots.int()
        new.append(slots[keys - fresh :])
    decodes = all(n == 1 for n, _ in lengths)
    counts = torch.tensor([n for n, _ in lengths], dtype=torch.int32)
    given: dict[str, Any] = dict(
        forward_mode=ForwardMode.DECODE if decodes else ForwardMode.EXTEND,
        batch_size=len(lengths),
        input_ids=torch.zeros(int(counts.sum()), dtype=torch.int64),
        req_pool_indices=rows,
        seq_lens=torch.tensor([keys for _, keys in lengths]),
        seq_lens_cpu=torch.tensor([keys for _, keys in lengths]),
        seq_lens_sum=sum(keys for _, keys in lengths),
        out_cache_loc=torch.cat(new),
        extend_seq_lens=None if decodes else counts,
        extend_seq_lens_cpu=None if decodes else counts.tolist(),
    )
    return ForwardBatch(**given | others)


def layer(**options: Any) -> RadixAttention:
    return RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, layer_id=0, **options)


def tensors(tokens: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(tokens, heads, DIM, generator=rng) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return [q.flatten(1), k, v]


def wanted(of: Any, made: ForwardBatch, q: torch.Tensor, **options: Any) -> torch.Tensor:
    """The reference over the pool, a slot at a time."""
    k, v = of.token_to_kv_pool.get_kv_buffer(0)
    counts = torch.ones(made.batch_size) if made.extend_seq_lens is None else made.extend_seq_lens
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    table = of.req_to_token_pool.req_to_token[made.req_pool_indices]
    out = paged_attn.reference.paged_attention(
        q.view(-1, HEADS, DIM), k[:, None], v[:, None], table, made.seq_lens, starts, **options
    )
    return out.flatten(1).float()  # type: ignore[union-attr]


def run(of: Any, made: ForwardBatch, of_layer: Any, **others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(result, queries) through the base class, as a model calls it."""
    backend = Backend(of)
    backend.init_forward_metadata(made)
    q, k, v = tensors(len(made.input_ids))
    return backend.forward(q, k, v, of_layer, made, **others), q


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("lengths", [DECODE, EXTEND])
def test_new_keys_are_stored_and_attended_where_sglang_keeps_them(page_size: int, lengths: Any) -> None:
    of = runner(page_size)
    made = batch(of, lengths)
    out, q = run(of, made, layer())
    torch.testing.assert_close(out, wanted(of, made, q), **CLOSE)
    assert torch.equal(of.token_to_kv_pool.get_key_buffer(0)[made.out_cache_loc], tensors(len(q))[1])


def test_a_mixed_batch_is_one_of_extends() -> None:
    of = runner()
    made = batch(of, EXTEND, forward_mode=ForwardMode.MIXED)
    out, q = run(of, made, layer())
    torch.testing.assert_close(out, wanted(of, made, q), **CLOSE)


def test_options_of_a_layer_are_those_of_paged_attention() -> None:
    sinks = torch.tensor([1.0, -1.0, 0.5, 2.0])
    for options, others, same in (
        ({"sliding_window_size": 7}, {}, {"window_size": (7, 0)}),  # keys before the query's own, as SGLang counts
        ({"logit_cap": 2.0}, {}, {"softcap": 2.0}),
        ({}, {"sinks": sinks}, {"sinks": sinks}),
    ):
        of = runner()
        made = batch(of, EXTEND)
        out, q = run(of, made, layer(**options), **others)
        torch.testing.assert_close(out, wanted(of, made, q, **same), **CLOSE)


def test_windows_are_those_of_sglangs_own_attention() -> None:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    seen = TorchNativeAttnBackend._make_sliding_window_mask(
        q_len=1, kv_len=20, sliding_window_size=7, device=torch.device("cpu"), query_offset=12
    )
    assert seen.sum() == 7 + 1
    assert seen[0, 12 - 7 : 12 + 1].all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_pools_have_a_scale_or_one(dtype: torch.dtype) -> None:
    for scale in (None, 0.5):
        of, made_layer = runner(dtype=dtype), layer()
        if scale is not None:
            made_layer.k_scale = made_layer.v_scale = torch.tensor(scale)
            made_layer.k_scale_float = made_layer.v_scale_float = scale
        made = batch(of, EXTEND)
        out, q = run(of, made, made_layer)
        torch.testing.assert_close(out, wanted(of, made, q, k_scale=scale or 1.0, v_scale=scale or 1.0), **CLOSE)


def test_nothing_is_stored_where_a_layer_reads_anothers_cache() -> None:
    of = runner()
    made = batch(of, DECODE)
    before = of.token_to_kv_pool.get_key_buffer(0).clone()
    out, q = run(of, made, layer(), save_kv_cache=False)
    assert torch.equal(of.token_to_kv_pool.get_key_buffer(0), before)
    torch.testing.assert_close(out, wanted(of, made, q), **CLOSE)


def test_layers_with_a_pool_of_their_own_read_it_by_its_slots() -> None:
    """A hybrid pool: slots of sliding layers are others than those of full ones."""
    of = runner()
    made = batch(of, EXTEND)
    moved = torch.cat([torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(SLOTS, generator=torch.Generator())])
    pool = of.token_to_kv_pool
    pool.layers_mapping = {0: (0, True)}
    pool.translate_loc_from_full_to_swa = lambda slots: moved[slots.long() % len(moved)]
    stored = []
    whole = pool.set_kv_buffer

    def store(to_layer: Any, where: Any, k: Any, v: Any) -> None:
        stored.append(where.swa_loc)
        whole(to_layer, where.swa_loc, k, v)

    pool.set_kv_buffer = store
    out, q = run(of, made, layer(sliding_window_size=7))
    assert torch.equal(stored[0], moved[made.out_cache_loc])
    table = of.req_to_token_pool.req_to_token
    table.copy_(moved[table.long() % len(moved)])
    torch.testing.assert_close(out, wanted(of, made, q, window_size=(7, 0)), **CLOSE)


def parts(of: tables.Tables) -> tuple[torch.Tensor, ...]:
    """Of a page table."""
    return of.page_table if isinstance(of.page_table, tuple) else (of.page_table,)


def test_pages_of_one_token_are_one_list_as_sglangs_own_backends_make_it() -> None:
    of = runner()
    for lengths in (DECODE, EXTEND):
        made = batch(of, lengths)
        indptr, indices = parts(tables.tables_of(made, Backend(of).slots))
        rows = of.req_to_token_pool.req_to_token[made.req_pool_indices]
        keys = [n for _, n in lengths]
        assert indptr.tolist() == [0, *torch.tensor(keys).cumsum(0).tolist()]
        assert indices[: sum(keys)].tolist() == [x for row, n in zip(rows, keys) for x in row[:n].tolist()]
        assert len(indices) == 3 * CONTEXT, "as many as any batch of three may have: a bucket is larger"


def test_lists_of_successive_steps_are_of_few_lengths() -> None:
    slots = tables.Slots(torch.zeros(2, 4096), 1, None)
    sums = [SimpleNamespace(batch_size=3, seq_lens_sum=n) for n in range(3, 6144, 3)]
    assert {slots.keys(x, 4096) for x in sums} == {3072, 6144}
    assert slots.keys(SimpleNamespace(batch_size=3, seq_lens_sum=None), 4096) == 12288


@pytest.mark.parametrize("page_size", [1, 4])
def test_graphs_read_tables_at_addresses_that_stay(page_size: int) -> None:
    of = runner(page_size)
    backend = Backend(of)
    with pytest.raises(RuntimeError, match="init_cuda_graph_state"):
        backend.init_forward_metadata_out_graph(batch(of, DECODE))
    backend.init_cuda_graph_state(8, 8)
    fill = backend.get_cuda_graph_seq_len_fill_value()
    nothing = batch(of, [(1, fill)] * 3, req_pool_indices=torch.zeros(3, dtype=torch.int64))
    backend.init_forward_metadata_out_graph(nothing, in_capture=True)
    captured = backend.forward_metadata
    made = batch(of, DECODE)
    backend.init_forward_metadata_out_graph(made)
    replayed = backend.forward_metadata
    assert captured is not None
    assert replayed is not None
    for one, other in zip(parts(captured), parts(replayed), strict=True):
        assert one.data_ptr() == other.data_ptr()
    assert captured.seq_lens.data_ptr() == replayed.seq_lens.data_ptr()
    assert captured.max_seqlen_k == CONTEXT, "what a replay may hold"
    backend.forward_metadata = captured  # its kernels would read what lies there now
    q, k, v = tensors(3)
    torch.testing.assert_close(backend.forward(q, k, v, layer(), made), wanted(of, made, q), **CLOSE)


def test_deterministic_servers_get_the_same_bits_in_any_batch(settings: Any) -> None:
    settings.exec.deterministic.enable_deterministic_inference = True
    of = runner()
    assert Backend(of).batch_invariant
    together, q = run(of, batch(of, EXTEND), layer())
    alone = batch(of, EXTEND)
    row = EXTEND[0][0]
    backend = Backend(of)
    single = ForwardBatch(
        forward_mode=ForwardMode.DECODE, batch_size=1, input_ids=torch.zeros(1, dtype=torch.int64),
        req_pool_indices=alone.req_pool_indices[:1], seq_lens=alone.seq_lens[:1], seq_lens_cpu=alone.seq_lens[:1],
        seq_lens_sum=37, out_cache_loc=alone.out_cache_loc[row - 1 : row],
    )  # fmt: skip
    backend.init_forward_metadata(single)
    out = backend.forward(q[row - 1 : row], None, None, layer(), single)
    assert torch.equal(out[0], together[row - 1])


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "others, word",
    [
        ({"use_mla_backend": True}, "MLA"),
        ({"model_config": SimpleNamespace(is_encoder_decoder=True)}, "encoders"),
        ({"kv_index_translator": SimpleNamespace(is_translating=True)}, "unified pool"),
    ],
)
def test_runners_of_another_kind_are_refused_by_name(others: dict[str, Any], word: str) -> None:
    with pytest.raises(NotImplementedError, match=word):
        Backend(runner(**others))


def test_speculation_and_context_parallelism_are_refused_by_name(settings: Any) -> None:
    settings.spec.speculative_algorithm = "EAGLE"
    with pytest.raises(NotImplementedError, match="speculative decoding"):
        Backend(runner())
    settings.spec.speculative_algorithm = None
    settings.parallel.attn_dcp_size = 2
    with pytest.raises(NotImplementedError, match="decode context parallelism"):
        Backend(runner())


@pytest.mark.parametrize(
    "options, others, word",
    [
        ({"attn_type": AttentionType.ENCODER_ONLY}, {}, "encoder_only"),
        ({"is_cross_attention": True}, {}, "is_cross_attention"),
        ({"v_head_dim": 16}, {}, "v_head_dim"),
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
        ({"spec_info": object()}, "spec_info"),
        ({"encoder_lens": torch.ones(3)}, "encoder_lens"),
        ({"forward_mode": ForwardMode.DLLM_EXTEND}, "DLLM_EXTEND"),
        ({"forward_mode": ForwardMode.TARGET_VERIFY}, "TARGET_VERIFY"),
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


def test_bounds_on_keys_change_seldom() -> None:
    slots = tables.Slots(torch.zeros(2, 4096), 1, None)
    bounds = {slots.bound(SimpleNamespace(seq_lens_cpu=torch.tensor([n, 1]))) for n in range(1, 2049, 7)}
    assert bounds == {1024, 2048}
    assert slots.bound(SimpleNamespace(seq_lens_cpu=None)) == 4096


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
