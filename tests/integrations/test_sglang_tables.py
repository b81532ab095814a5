"""What the backend tells all layers of a batch, beside SGLang's own lists, and what graphs read of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integrations import sglang_batch
from tests.integrations.sglang_batch import (
    CLOSE,
    CONTEXT,
    DECODE,
    EXTEND,
    Backend,
    batch,
    layer,
    runner,
    tensors,
    wanted,
)

from paged_attn.integrations.sglang import tables  # isort: skip


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Any:
    return sglang_batch.settled(monkeypatch)


def parts(of: tables.Tables) -> tuple[torch.Tensor, ...]:
    """The tensors of a page table."""
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


def test_bounds_on_keys_change_seldom() -> None:
    slots = tables.Slots(torch.zeros(2, 4096), 1, None)
    bounds = {slots.bound(SimpleNamespace(seq_lens_cpu=torch.tensor([n, 1]))) for n in range(1, 2049, 7)}
    assert bounds == {1024, 2048}
    assert slots.bound(SimpleNamespace(seq_lens_cpu=None)) == 4096
