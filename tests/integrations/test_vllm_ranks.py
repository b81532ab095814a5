"""Decode context parallelism of vLLM: every rank's results over its own keys, joined, are those of one rank."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="needs vLLM: make hosts", exc_type=ImportError)
    from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens
    from vllm.v1.worker import cp_utils

    from paged_attn.integrations.vllm import impl as adapter
    from tests.distributed import spawned
    from tests.integrations import vllm_batch as made
    from tests.integrations import vllm_latent as latent
    from tests.integrations.vllm_ranks import Ranks, Step, attends_by_vllms_groups, config, parallel, split

CLOSE = {"atol": 1e-5, "rtol": 1e-5}  # float32, sums in another order
LONG = [(9, 70), (1, 34), (1, 1), (4, 47)]


def joined(
    lengths: Any, shard: tuple[int, int], monkeypatch: pytest.MonkeyPatch, of: Any = None, common: Any = None,
    dtype: torch.dtype = torch.float32, tail: int = 0, query: torch.dtype = torch.float32, dims: int = made.DIM,
    **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(results of one rank with all heads and keys, results of all ranks)."""
    step = Step(lengths, *shard, dtype, tail, query, common, dims)
    of = of or made.layer()
    want = step.alone(of, **options)
    found = torch.cat(Ranks(step.world, monkeypatch).run(lambda rank: step.on(rank, of, **options)), 1)
    assert want.abs().sum() > 1
    return want, found


@pytest.mark.parametrize("shard", [(2, 1), (2, 16), (3, 4)])
@pytest.mark.parametrize("lengths", [made.DECODE, made.MIXED, made.DRAFTS, LONG])
def test_ranks_together_give_what_one_rank_gives(lengths: Any, shard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    want, found = joined(lengths, shard, monkeypatch)
    torch.testing.assert_close(found, want, **CLOSE)


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 8},
        {"logits_soft_cap": 2.0},
        {"alibi_slopes": [0.5, 0.25, 0.1, 0.05]},
        {"alibi_slopes": [0.5, 0.25, 0.1, 0.05], "use_alibi_sqrt": True},
        {"sinks": torch.tensor([1.0, -1.0, 0.5, 2.0])},
    ],
    ids=lambda x: " ".join(x),
)
def test_options_of_layers_count_positions_of_whole_sequences(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    want, found = joined(LONG, (2, 4), monkeypatch, **options)
    torch.testing.assert_close(found, want, **CLOSE)


def test_causality_may_differ_by_sequence_and_images_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.utils.torch_utils.PIN_MEMORY", False, raising=False)
    for common in (
        {"causal": torch.tensor([True, False, True])},
        {"mm_req_doc_ranges": {0: [(18, 27), (33, 36)]}},
    ):
        with monkeypatch.context() as patches:
            want, found = joined(made.MIXED, (2, 4), patches, common=common)
        torch.testing.assert_close(found, want, **CLOSE)


@pytest.mark.parametrize("query", [torch.float32, torch.float8_e4m3fn])
def test_caches_and_queries_may_be_fp8(query: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: dict[str, Any] = dict(dtype=torch.float8_e4m3fn, kv_cache_dtype="fp8", query=query)
    want, found = joined(LONG, (2, 4), monkeypatch, made.layer(0.5), **kinds)
    # weights over fp8 values are rounded to 16 bits, by the largest score of a rank
    torch.testing.assert_close(found, want, **(CLOSE if query == torch.float32 else dict(rtol=0, atol=2**-6)))


@pytest.mark.parametrize("kind, dtype, dims", [("int8", torch.int8, made.DIM), ("int4", torch.uint8, made.DIM // 2)])
def test_scales_may_be_by_token(kind: str, dtype: torch.dtype, dims: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: dict[str, Any] = dict(dtype=dtype, dims=dims, tail=4, kv_cache_dtype=f"{kind}_per_token_head")
    want, found = joined(LONG, (2, 4), monkeypatch, **kinds)
    torch.testing.assert_close(found, want, **CLOSE)


@pytest.mark.long
def test_vllms_own_groups_of_processes_serve() -> None:
    """Over gloo, by vLLM's GroupCoordinator, from which the layer takes its process group."""
    assert spawned.results(spawned.run([attends_by_vllms_groups], 2)) == [True, True]


def test_keys_of_another_rank_make_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails if ranks take their stripes from another size."""
    told = adapter.distributed.paged_attention

    def other(*given: Any, stripe: int, **options: Any) -> Any:
        return told(*given, stripe=2 * stripe, **options)

    monkeypatch.setattr(adapter.distributed, "paged_attention", other)
    want, found = joined(LONG, (2, 4), monkeypatch, sliding_window=8)
    assert not torch.allclose(found, want, atol=1e-2)


@pytest.mark.parametrize(
    "options, what",
    [
        ({"num_kv_heads": 2}, "more than one KV head on a rank"),
        ({"attn_type": "encoder_decoder", "num_kv_heads": 1}, "attention to an encoder's keys"),
    ],
)
def test_layers_that_ranks_cannot_share_are_refused_by_name(
    options: dict[str, Any], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Ranks(2, monkeypatch)
    with pytest.raises(NotImplementedError, match=f"decode context parallelism of {what}"):
        made.implementation(**options)


def test_the_same_bits_in_any_batch_are_refused_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter.envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    Ranks(2, monkeypatch)
    with pytest.raises(NotImplementedError, match="decode context parallelism of VLLM_BATCH_INVARIANT"):
        made.implementation(num_kv_heads=1)


def test_batches_that_ranks_cannot_share_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    Ranks(2, monkeypatch)
    told, spec = config(2, 1), SimpleNamespace(attention_chunk_size=16)
    with pytest.raises(NotImplementedError, match="decode context parallelism of chunked layers"):
        made.Builder(spec, ["layer"], told, torch.device("cpu"))  # type: ignore[arg-type]
    told.model_config.rswa_window, told.scheduler_config = 6, SimpleNamespace(max_num_seqs=8)
    with pytest.raises(NotImplementedError, match="decode context parallelism of R-SWA"):
        made.Builder(None, ["layer"], told, torch.device("cpu"))  # type: ignore[arg-type]


def test_results_are_not_quantised_before_ranks_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym

    Ranks(2, monkeypatch)
    assert not made.implementation(num_kv_heads=1).fused_output_quant_supported(kFp8StaticTensorSym)


def test_drafts_may_keep_whole_caches_and_encoders_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    Ranks(2, monkeypatch)
    spec = SimpleNamespace(dcp_sharded=False)
    builder = made.Builder(spec, ["layer"], config(2, 1), torch.device("cpu"))  # type: ignore[arg-type]
    assert builder.shard is None
    q = torch.randn(5, 1, made.DIM)
    out = torch.empty_like(q)
    encoder = made.implementation(num_heads=1, num_kv_heads=1, attn_type="encoder_only")
    metadata = made.Builder(None, ["layer"], config(2, 1), torch.device("cpu")).build(
        0, made.batch([(5, 5)], causal=False)
    )  # type: ignore[arg-type]
    encoder.forward(made.layer(), q, q, q, None, metadata, out)  # type: ignore[arg-type]
    weights = (encoder.scale * q[:, 0] @ q[:, 0].T).softmax(-1)
    torch.testing.assert_close(out[:, 0], weights @ q[:, 0], **CLOSE)


@pytest.mark.parametrize("drafts, stripe", [(0, 1), (2, 1), (2, 16)])
def test_vllm_takes_the_layers_of_both_kinds(drafts: int, stripe: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM checks the layers of a model before its first step."""
    Ranks(2, monkeypatch)
    mla = latent.Model(monkeypatch, drafts, parallel=parallel(2, stripe)).impl
    told = SimpleNamespace(
        parallel_config=parallel(2, stripe), speculative_config=SimpleNamespace() if drafts else None
    )
    for impl in (made.implementation(num_kv_heads=1), mla):
        monkeypatch.setattr(
            cp_utils, "get_layers_from_vllm_config", lambda *_, impl=impl: {"layer": SimpleNamespace(impl=impl)}
        )
        cp_utils.check_attention_cp_compatibility(told)


# ---- latent attention: vLLM gathers queries, and joins what the ranks return ----------------------------------------


@pytest.mark.parametrize("kind", ["auto", "fp8"])
@pytest.mark.parametrize("shard", [(2, 1), (2, 16), (4, 4)])
@pytest.mark.parametrize("lengths, drafts", [([(1, 34), (1, 5), (1, 1)], 0), ([(3, 70), (1, 23), (2, 19)], 2)])
def test_latents_of_ranks_together_give_what_those_of_one_rank_give(
    lengths: Any, drafts: int, shard: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (world, stripe), layer = shard, SimpleNamespace(_k_scale=torch.tensor(0.5))
    dtype = torch.float32 if kind == "auto" else torch.float8_e4m3fn
    kv, batch = latent.cache(dtype), made.batch(lengths)
    new = torch.randn(batch.num_actual_tokens, latent.RANK + latent.ROPE, generator=torch.Generator().manual_seed(4))
    q = torch.randn(len(new), latent.HEADS, latent.RANK + latent.ROPE, generator=torch.Generator().manual_seed(5))
    halves = [split(kv, batch, (rank, world, stripe)) for rank in range(world)]

    def step(model: Any, told: Any, metadata: Any, cache: Tensor) -> Any:
        parts = new[:, : latent.RANK], new[:, None, latent.RANK :]
        model.impl.do_kv_cache_update(*parts, cache, told.slot_mapping, kind, k_scale=layer._k_scale)
        return model.impl.forward_mqa(q, cache, metadata, layer)

    alone = latent.Model(monkeypatch, drafts, kind)
    want, nothing = step(alone, *alone.build(lengths), kv.clone())
    assert nothing is None

    def work(rank: int) -> Any:
        own, mine = halves[rank]
        model = latent.Model(monkeypatch, drafts, kind, parallel(world, stripe))
        assert model.impl.need_to_return_lse_for_decode
        assert model.impl.lse_base_on_e
        mine.dcp_local_seq_lens = get_dcp_local_seq_lens(mine.seq_lens, world, rank, stripe)
        told, metadata = model.build(lengths, mine)
        assert metadata.num_decodes == len(lengths), "drafts are decodes"
        assert metadata.decode.shard == (rank, world, stripe)
        assert metadata.max_seq_len * world >= int(mine.seq_lens.max())
        return step(model, told, metadata, own)

    outs, lses = (torch.stack(x) for x in zip(*Ranks(world, monkeypatch).run(work), strict=True))
    weights = (lses - lses.logsumexp(0)).exp()[..., None]  # as vLLM joins ranks: natural logarithms, [tokens, heads]
    torch.testing.assert_close((weights * outs).sum(0), want, atol=2e-5, rtol=2e-5)
    assert (lses == -torch.inf).any() == (lengths[2] == (1, 1)), "a rank may have no key of a sequence"


def test_graphs_over_ranks_hold_for_the_longest_model(monkeypatch: pytest.MonkeyPatch) -> None:
    Ranks(4, monkeypatch)
    model = latent.Model(monkeypatch, parallel=parallel(4, 4))
    told, _ = model.build(made.DECODE, made.batch(made.DECODE, dcp_local_seq_lens=torch.tensor([12, 2, 6])))
    assert model.builder.build_for_cudagraph_capture(told).max_seq_len == 64, "of 256 keys on 4 ranks"
