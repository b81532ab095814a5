"""What the backend makes of vLLM's batches, and what of batches, layers and hosts is refused by name."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="needs vLLM: make hosts", exc_type=ImportError)
    from vllm.config import CUDAGraphMode
    from vllm.v1.attention.backend import AttentionImpl

    from paged_attn.integrations.vllm import backend, host
    from tests.integrations import vllm_batch as made


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


def test_prefill_context_parallelism_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    made_first = AttentionImpl.__new__

    def new(cls: type, *args: Any, **keywords: Any) -> Any:
        impl = made_first(cls)
        impl.pcp_world_size = 2
        return impl

    monkeypatch.setattr(AttentionImpl, "__new__", new)
    with pytest.raises(NotImplementedError, match="prefill context parallelism"):
        made.implementation()


def test_values_of_another_size_and_block_scales_are_refused_by_name() -> None:
    impl = made.implementation()
    with pytest.raises(NotImplementedError, match=r"keys of 32 dims beside values of 32"):
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
