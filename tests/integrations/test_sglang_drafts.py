"""Drafts that SGLang verifies, in chains and trees, by its own inputs: results, masks, graphs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import paged_attn
from tests.integrations import sglang_batch, sglang_latent
from tests.integrations.sglang_batch import (
    CLOSE,
    DIM,
    HEADS,
    Backend,
    ForwardBatch,
    ForwardMode,
    batch,
    layer,
    runner,
    tensors,
)

from paged_attn.integrations.sglang import tables  # isort: skip
from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode, sgl_build_tree_kernel_triton  # isort: skip
from sglang.srt.speculative.eagle_info import EagleVerifyInput  # isort: skip
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode  # isort: skip

CONTEXTS, EACH = (30, 5, 17), 5
PARENTS = torch.tensor([[-1, 0, 0, 1, 3], [-1, 0, 1, 2, 3], [-1, 0, 0, 0, 2]])


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Any:
    chosen = sglang_latent.settled(monkeypatch)
    chosen.spec = SimpleNamespace(
        speculative_algorithm="EAGLE", speculative_num_draft_tokens=EACH, speculative_eagle_topk=3
    )
    return chosen


def seen_of(parents: Tensor = PARENTS) -> Tensor:
    """bool [seqs, each, each]: a node sees itself and its ancestors."""
    seen = torch.zeros(*parents.shape, parents.shape[1], dtype=torch.bool)
    for s, row in enumerate(parents.tolist()):
        for node, parent in enumerate(row):
            if parent >= 0:
                seen[s, node] = seen[s, parent]
            seen[s, node, node] = True
    return seen


def told(seen: Tensor | None, topk: int = 3, each: int = EACH) -> EagleVerifyInput:
    return EagleVerifyInput(
        draft_token=None, custom_mask=None if seen is None else seen.flatten(), positions=None, retrieve_index=None,
        retrieve_next_token=None, retrieve_next_sibling=None, retrieve_cum_len=None, spec_steps=3, topk=topk,
        draft_token_num=each, capture_hidden_mode=CaptureHiddenMode.FULL, seq_lens_sum=None, seq_lens_cpu=None,
    )  # fmt: skip


def verifies(of: Any, spec: Any, contexts: Any = CONTEXTS, each: int = EACH, **others: Any) -> ForwardBatch:
    """A batch that verifies drafts, in SGLang's form: lengths are those of contexts."""
    made = batch(of, [(each, n + each) for n in contexts], forward_mode=ForwardMode.TARGET_VERIFY, spec_info=spec)
    made.seq_lens = made.seq_lens - each
    made.seq_lens_cpu = made.seq_lens.clone()
    made.seq_lens_sum = int(made.seq_lens.sum())
    made.extend_seq_lens = made.extend_seq_lens_cpu = None
    depth = seen_of().sum(-1) - 1 if each == EACH else torch.arange(each).expand(len(contexts), -1)
    made.positions = (made.seq_lens[:, None] + depth).flatten()
    for name, value in others.items():
        setattr(made, name, value)
    return made


def wanted(of: Any, made: ForwardBatch, q: Tensor, seen: Tensor, window: int = -1) -> Tensor:
    """The reference under a bias that hides, which is not how the backend says it."""
    k, v = of.token_to_kv_pool.get_kv_buffer(0)
    seqs, each = seen.shape[:2]
    bias = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    places = {} if window < 0 else {"window_size": (window, 0), "query_positions": made.positions}
    out = paged_attn.reference.paged_attention(
        q.view(-1, HEADS, DIM), k[:, None], v[:, None], of.req_to_token_pool.req_to_token[made.req_pool_indices],
        made.seq_lens + each, torch.arange(seqs + 1) * each, qq_bias=bias, **places,
    )  # fmt: skip
    return out.flatten(1).float()  # type: ignore[union-attr]


def run(of: Any, made: ForwardBatch, of_layer: Any) -> tuple[Tensor, Tensor]:
    backend = Backend(of)
    backend.init_forward_metadata(made)
    q, k, v = tensors(len(made.input_ids))
    return backend.forward(q, k, v, of_layer, made), q


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("window", [-1, 3])
def test_nodes_of_a_tree_see_their_ancestors(page_size: int, window: int) -> None:
    of = runner(page_size)
    made = verifies(of, told(seen_of()))
    out, q = run(of, made, layer(sliding_window_size=window))
    torch.testing.assert_close(out, wanted(of, made, q, seen_of(), window), **CLOSE)
    assert not torch.allclose(out, wanted(of, made, q, torch.ones(3, EACH, EACH).tril().bool(), window))


@pytest.mark.parametrize("each", [1, 4])
def test_a_chain_needs_no_mask(each: int) -> None:
    of = runner()
    made = verifies(of, told(None, topk=1, each=each), each=each)
    out, q = run(of, made, layer())
    torch.testing.assert_close(out, wanted(of, made, q, torch.ones(3, each, each).tril().bool()), **CLOSE)


def test_one_token_of_a_server_of_trees_is_a_chain() -> None:
    """SGLang verifies so where drafting is off for a step: the mask then has no layout."""
    of = runner()
    made = verifies(of, told(torch.ones(1000, dtype=torch.bool), each=1), each=1)
    out, q = run(of, made, layer())
    torch.testing.assert_close(out, wanted(of, made, q, torch.ones(3, 1, 1).bool()), **CLOSE)


def test_lengths_that_only_the_device_knows_are_served() -> None:
    of = runner()
    made = verifies(of, told(seen_of()), seq_lens_cpu=None, seq_lens_sum=None)
    out, q = run(of, made, layer())
    torch.testing.assert_close(out, wanted(of, made, q, seen_of()), **CLOSE)


@pytest.mark.parametrize("each", [5, 32, 40])
def test_masks_are_those_that_paged_attn_makes_of_trees(each: int) -> None:
    rng = torch.Generator().manual_seed(each)
    parents = torch.stack([torch.tensor([-1, *[int(torch.randint(0, i, (), generator=rng)) for i in range(1, each)]])
                           for _ in range(2)])  # fmt: skip
    lens, starts = torch.tensor([each + 7, each]), torch.arange(3) * each
    want = paged_attn.tree(parents.flatten(), lens, starts, nodes=each).qq_mask
    longer = torch.cat([seen_of(parents).flatten(), torch.ones(100, dtype=torch.bool)])
    assert torch.equal(tables.mask_words(longer, 2, each), want)


def test_sglang_writes_its_masks_where_and_as_they_are_read() -> None:
    """SGLang's own kernel writes a tree: the first node, three nodes behind it, one node behind the second of them."""
    mask = Backend(runner()).verify_mask
    assert (mask.mode, mask.is_read) == (TreeMaskMode.QLEN_ONLY, True)
    assert mask.fits(9)
    assert len(mask.buffer) == mask.max_bs * EACH**2
    seqs, topk = 2, 3
    nothing = torch.full((3, seqs, EACH), -1)
    sgl_build_tree_kernel_triton(
        torch.tensor([[-1, 0, 1, 2]] * seqs), torch.tensor([[0, 1, 2, 6]] * seqs), torch.tensor([9, 4]), mask.buffer,
        torch.zeros(seqs * EACH, dtype=torch.int64), *nothing, topk, 2, EACH, mask.mode,
    )  # fmt: skip
    want = seen_of(torch.tensor([[-1, 0, 0, 0, 2]]))[0]
    assert torch.equal(mask.buffer[: seqs * EACH**2].view(seqs, EACH, EACH), want.expand(seqs, -1, -1))


def test_servers_without_drafts_keep_no_masks(settings: Any) -> None:
    settings.spec.speculative_algorithm = None
    assert Backend(runner()).verify_mask is None


@pytest.mark.parametrize("page_size", [1, 4])
def test_graphs_read_trees_at_addresses_that_stay(page_size: int) -> None:
    of = runner(page_size)
    backend = Backend(of)
    backend.init_cuda_graph_state(8, 8 * EACH)
    nothing = verifies(of, told(None), contexts=(1,) * 3, req_pool_indices=torch.zeros(3, dtype=torch.int64))
    backend.init_forward_metadata_out_graph(nothing, in_capture=True)
    captured = backend.forward_metadata
    assert captured is not None
    made = verifies(of, told(torch.ones_like(seen_of())))
    backend.init_forward_metadata_out_graph(made)
    backend.update_verify_buffers_to_fill_after_draft(told(seen_of()), 3)  # drafts came after the tables
    backend.forward_metadata = captured._replace(query_positions=made.positions)  # whose address SGLang keeps
    q, k, v = tensors(3 * EACH)
    out = backend.forward(q, k, v, layer(sliding_window_size=3), made)
    torch.testing.assert_close(out, wanted(of, made, q, seen_of(), 3), **CLOSE)
    decodes = batch(of, [(1, 34), (1, 5), (1, 17)])
    backend.init_forward_metadata_out_graph(decodes)
    assert backend.forward_metadata is not None
    assert backend.forward_metadata.qq_mask is None


def test_trees_are_verified_over_latents() -> None:
    of = sglang_latent.runner()
    made = verifies(of, told(seen_of()))
    q = sglang_latent.random(3 * EACH, HEADS, sglang_latent.DIMS)
    out = sglang_latent.started(of, made).forward(q.flatten(1), None, None, sglang_latent.absorbed(), made)
    table, keys = of.req_to_token_pool.req_to_token, of.token_to_kv_pool.get_key_buffer(0)[:, 0]
    for s, n in enumerate(CONTEXTS):
        mine = keys[table[made.req_pool_indices[s], : n + EACH].long()]
        for node in range(EACH):
            path = torch.cat([mine[:n], mine[n:][seen_of()[s, node]]])[:, None]
            row = s * EACH + node
            want = sglang_latent.attention(q[row : row + 1], path, path[..., : sglang_latent.RANK])
            torch.testing.assert_close(out[row].view(want.shape), want, **CLOSE)


def test_drafts_of_another_kind_are_refused_by_name() -> None:
    of, spec = runner(), told(seen_of())
    spec.ragged_verify_layout = object()
    with pytest.raises(NotImplementedError, match="of uneven numbers"):
        run(of, verifies(of, spec), layer())
    from sglang.srt.speculative.spec_info import SpecInputType

    spec = told(seen_of())
    spec.spec_input_type = SpecInputType.NGRAM_VERIFY
    with pytest.raises(NotImplementedError, match="drafts of kind NGRAM_VERIFY"):
        run(of, verifies(of, spec), layer())


def test_prompts_of_a_server_that_drafts_are_as_others() -> None:
    of = runner()
    made = batch(of, [(20, 37), (5, 5)], spec_info=SimpleNamespace())
    backend = Backend(of)
    backend.init_forward_metadata(made)
    q, k, v = tensors(25)
    torch.testing.assert_close(backend.forward(q, k, v, layer(), made), sglang_batch.wanted(of, made, q), **CLOSE)
