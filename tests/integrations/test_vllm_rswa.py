"""R-SWA in vLLM: keys of the prompt, and a window of those behind it; its builder's metadata, results, graphs."""

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
    from vllm.config import CUDAGraphMode
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.attention.backends import flex_attention

    from paged_attn.integrations.vllm import backend
    from tests.integrations import vllm_batch as made
    from tests.support.chunks import in_order  # noqa: F401, a fixture of all tests

CLOSE = {"atol": 1e-5, "rtol": 1e-5}  # float32, sums in another order
WINDOW = 6
PAD = 3  # rows behind the batch's tokens, as vLLM pads a step to a graph's size
# (query tokens, keys with them), and how long each prompt is: of one token, wholly in the prompt, wholly behind it, and
# across its end, as a request is computed again after it was preempted
DECODES = [(1, 34), (1, 5), (1, 17)], [20, 5, 18]
PROMPTS = [(20, 37), (5, 5), (1, 17)], [40, 5, 18]
ALL_KINDS = [(20, 37), (5, 5), (1, 34), (4, 40), (9, 30)], [28, 5, 20, 25, 25]


def config(window: int | None = WINDOW, mode: Any = None) -> Any:
    told = made.config(mode)
    told.model_config.rswa_window = window
    told.scheduler_config = SimpleNamespace(max_num_seqs=8)
    return told


def builder(**options: Any) -> Any:
    return made.Builder(None, ["layer"], config(**options), torch.device("cpu"))  # type: ignore[arg-type]


def attend(of: Any, common: Any, prompts: list[int], impl: Any = None, **options: Any) -> tuple[Tensor, Tensor]:
    """(results, what dense attention in float64 says) over a cache that holds all keys."""
    impl, kv, tokens = impl or made.implementation(), made.cache(), common.num_actual_tokens
    q = made.tensors(tokens + PAD)[0]
    out = torch.full_like(q, 7.0)
    metadata = of if isinstance(of, made.Metadata) else of.build(0, common)
    impl.forward(made.layer(), q, q, q, kv, metadata, out)
    wanted = torch.zeros_like(q)
    for s, prompt in enumerate(prompts):
        a, b, n = *common.query_start_loc[s : s + 2].tolist(), int(common.seq_lens[s])
        places = torch.arange(n)
        pages = common.block_table_tensor[s].long()[places // made.PAGE]
        kept = kv[pages, :, places % made.PAGE].double().repeat_interleave(made.HEADS // made.KV_HEADS, 1)
        keys, values = kept[..., : made.DIM], kept[..., made.DIM :]
        seen = told_by_vllm(torch.arange(n - (b - a), n)[:, None], places[None], prompt)
        scores = torch.einsum("nhd,mhd->hnm", q[a:b].double(), keys) * impl.scale
        if cap := options.get("softcap"):
            scores = cap * torch.tanh(scores / cap)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        wanted[a:b] = torch.einsum("hnm,mhd->nhd", weights, values).float()
    return out, wanted


def told_by_vllm(queries: Tensor, keys: Tensor, prompt: int) -> Tensor:
    """What vLLM's own mask shows, beside causality, where it is to be had as a function; else the same by hand."""
    behind = keys <= queries
    of = getattr(flex_attention.FlexAttentionMetadata, "get_rswa_mask_mod", None)
    if of is None:
        return behind & ((keys < prompt) | (queries - keys < WINDOW))
    places = SimpleNamespace(
        doc_ids=torch.zeros(1), rswa_prefix_lens=torch.tensor([prompt]), rswa_window=WINDOW,
        _convert_physical_to_logical=lambda ids, q, k: (torch.tensor(True), q, k),
    )  # fmt: skip
    mask = of(places)
    inner = next(
        x.cell_contents for x in mask.__closure__ if getattr(x.cell_contents, "__name__", "") == "rswa_mask_mod"
    )
    return behind & inner(torch.tensor(0), queries, keys)


@pytest.mark.parametrize("lengths, prompts", [DECODES, PROMPTS, ALL_KINDS])
def test_the_prompt_stays_visible_behind_the_window(lengths: Any, prompts: Any) -> None:
    common = made.batch(lengths, rswa_prefix_lens=torch.tensor(prompts))
    out, wanted = attend(builder(), common, prompts)
    torch.testing.assert_close(out, wanted, **CLOSE)


def test_a_softcap_and_a_layers_own_window_change_nothing_of_it() -> None:
    """R-SWA stands in for a layer's window in vLLM's own attention, too."""
    lengths, prompts = ALL_KINDS
    common = made.batch(lengths, rswa_prefix_lens=torch.tensor(prompts))
    impl = made.implementation(logits_soft_cap=2.0, sliding_window=3)
    out, wanted = attend(builder(), common, prompts, impl, softcap=2.0)
    torch.testing.assert_close(out, wanted, **CLOSE)


def test_results_have_the_same_bits_in_any_chunks_if_vllm_asks_for_it() -> None:
    """A prompt of 300 tokens and 300 behind it: at once, in chunks that end in either or at the border, and alone."""
    impl, length, prompt = made.implementation(), 600, 300
    impl.batch_invariant = True
    kv, q = made.cache(), made.tensors(length)[0]

    def said(begin: int, end: int) -> Tensor:
        common = made.batch([(end - begin, end)], rswa_prefix_lens=torch.tensor([prompt]))
        mine = q[begin:end]
        return impl.forward(made.layer(), mine, mine, mine, kv, builder().build(0, common), torch.empty_like(mine))

    whole = said(0, 600)
    for begin, end in ((0, 300), (300, 600), (130, 420), (420, 421), (7, 8), (299, 301)):
        assert torch.equal(said(begin, end), whole[begin:end]), (begin, end)


def test_pages_between_the_prompt_and_the_window_may_be_gone() -> None:
    """vLLM frees them, and puts a page of zeros in their place; here it holds what is no number."""
    common = made.batch([(1, 60), (2, 58)], rswa_prefix_lens=torch.tensor([14, 15]))
    kv, impl, q = made.cache(), made.implementation(), made.tensors(3)[0]
    want = impl.forward(made.layer(), q, q, q, kv, builder().build(0, common), torch.empty_like(q))
    common.block_table_tensor[:, 1:3] = made.PAGES - 1
    kv = kv.clone()
    kv[made.PAGES - 1] = torch.nan
    out = impl.forward(made.layer(), q, q, q, kv, builder().build(0, common), torch.empty_like(q))
    assert torch.equal(out, want)


def test_graphs_are_of_single_tokens_and_read_prompts_where_they_stay() -> None:
    of = builder(mode=CUDAGraphMode.FULL_AND_PIECEWISE)
    assert of.get_cudagraph_support(of.vllm_config, None) is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert of.get_cudagraph_support(config(None), None) is AttentionCGSupport.ALWAYS
    lengths, prompts = DECODES
    captured = of.build_for_cudagraph_capture(made.batch([(1, 1)] * 4))  # which tells no prompts
    assert captured.prefix_lens.tolist() == [2**31 - 1] * 4
    common = made.batch(lengths, rswa_prefix_lens=torch.tensor(prompts))
    stays = of.build(0, common)
    assert captured.prefix_lens.data_ptr() == stays.prefix_lens.data_ptr()
    assert captured.window == stays.window == WINDOW
    out, wanted = attend(stays, common, prompts)
    torch.testing.assert_close(out, wanted, **CLOSE)


def test_prompts_of_padding_are_none() -> None:
    of = builder()
    of.prompts.lens.fill_(3)
    assert of.prompts.tell(torch.tensor([7, 5]), 4).tolist() == [7, 5, 0, 0]


def test_a_group_may_take_over_what_another_has_built() -> None:
    lengths, prompts = ALL_KINDS
    common = made.batch(lengths, rswa_prefix_lens=torch.tensor(prompts))
    of = builder()
    first = of.build(0, common)
    again = of.update_block_table(first, common.block_table_tensor, common.slot_mapping)
    assert torch.equal(again.block_table, first.block_table)
    assert not of.supports_draft_decode_metadata_update


def test_models_without_it_are_as_they_were() -> None:
    common = made.batch(made.MIXED, rswa_prefix_lens=torch.tensor([3, 3, 3]))
    metadata = builder(window=None).build(0, common)
    assert (metadata.window, metadata.prefix_lens, metadata.query_positions) == (None, None, None)
    assert metadata.seq_lens is common.seq_lens


def test_what_is_not_known_beside_it_is_refused_by_name() -> None:
    common = made.batch(made.MIXED, causal=False)
    with pytest.raises(NotImplementedError, match="R-SWA beside images that see each other, or not causal"):
        builder().build(0, common)
    common = made.batch(made.MIXED, rswa_prefix_lens=torch.tensor([3, 3, 3]))
    with pytest.raises(NotImplementedError, match="ALiBi beside R-SWA"):
        attend(builder(), common, [3, 3, 3], made.implementation(alibi_slopes=[0.5] * made.HEADS))


def test_vllm_finds_nothing_against_it() -> None:
    assert backend.Backend.supports_rswa()


def test_the_only_model_of_it_takes_the_backend_for_its_kind_of_layers() -> None:
    """Unlimited-OCR refuses CUSTOM as the backend, so that it has to be said of layers with full attention."""
    from vllm.config.attention import AttentionConfig
    from vllm.model_executor.models import config as models
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import get_attn_spec_kind

    check = getattr(models, "UnlimitedOCRForCausalLMConfig", None)
    if check is None:
        pytest.skip("this vLLM has no model of it")

    def told(**options: Any) -> Any:
        return SimpleNamespace(
            attention_config=AttentionConfig(**options), cache_config=SimpleNamespace(enable_prefix_caching=False),
            model_config=SimpleNamespace(multimodal_config=None),
        )  # fmt: skip

    with pytest.raises(ValueError, match="CUSTOM"):
        check.verify_and_update_config(told(backend="CUSTOM"))
    asked = told(backend="TRITON_ATTN", backend_per_kind={"full_attention": "CUSTOM"})
    check.verify_and_update_config(asked)
    kind = get_attn_spec_kind(use_mla=False, has_sliding_window=False, attn_type="decoder")
    assert asked.attention_config.backend_per_kind[kind.value] is AttentionBackendEnum.CUSTOM
