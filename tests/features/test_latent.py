"""Keys that hold their values (multi-head latent attention): v_cache is k_cache[..., :value_dim]."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import paged_attn
from paged_attn import reference
from tests.support.cases import E4M3, E5M2, Case, build, compare, problem_of, run
from tests.support.invariance import assert_the_same_bits_alone

DECODE: dict[str, Any] = dict(query_lens=(1,) * 4, seq_lens=(1, 40, 0, 130), decode_form=True)
DRAFTS: dict[str, Any] = dict(query_lens=(3, 8, 1), seq_lens=(40, 8, 150), padding=1)
CHUNKS: dict[str, Any] = dict(query_lens=(9, 40), seq_lens=(50, 40), padding=2)
MIXED: dict[str, Any] = dict(query_lens=(1, 30, 1, 0, 2), seq_lens=(70, 35, 3, 9, 2), padding=1)
LONG: dict[str, Any] = dict(query_lens=(1, 2), seq_lens=(3000, 40))
BATCHES = [DECODE, DRAFTS, CHUNKS, MIXED, LONG]
NAMES = ["decode", "drafts", "chunks", "mixed", "long"]
SMALL: dict[str, Any] = dict(head_dim=48, value_dim=32, heads=5, latent=True)
FEATURES: dict[str, Any] = dict(window_size=(20, -1), softcap=20.0, alibi=True, sinks=True)


def latent(inputs: dict[str, Any]) -> bool:
    return bool(problem_of(inputs).latent)


@pytest.mark.parametrize("widths", [(576, 512), (512, 512), (320, 256), (96, 96), (72, 20), (33, 32)], ids=str)
@pytest.mark.parametrize("heads", [1, 16])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_values_are_the_first_dims_of_keys(widths: tuple[int, int], heads: int, layout: str, device: str) -> None:
    case = Case("latent", **DECODE, heads=heads, head_dim=widths[0], value_dim=widths[1], layout=layout, latent=True)
    assert latent(build(case, device))
    run(case, device)


@pytest.mark.parametrize("heads", [3, 24, 64, 71, 96, 128])
@pytest.mark.parametrize("batch", [DECODE, DRAFTS], ids=["decode", "drafts"])
def test_any_number_of_heads_shares_one_key(heads: int, batch: dict[str, Any], device: str) -> None:
    """More than registers hold are cut into equal parts; of a prime number of heads each is a part."""
    run(Case("heads", **batch, heads=heads, head_dim=320, value_dim=256, latent=True, sinks=True, alibi=True), device)


@pytest.mark.parametrize("batch", BATCHES, ids=NAMES)
@pytest.mark.parametrize(
    "more",
    [
        FEATURES,
        dict(causal=False, window_size=(30, 4)),
        dict(new=True),
        dict(new=True, strided=True, positions="tree", qq_bias=8, tree=True),
        dict(new=True, cache_dtype=E4M3, scales="float"),
        dict(cache_dtype=E4M3, scales="per_head", sinks=True),
        dict(cache_dtype=E5M2, scales="tensor", layout="HND"),
        dict(cache_dtype=E4M3, head_dim=41, value_dim=31),
        dict(dtype=E4M3, cache_dtype=E4M3, out_dtype=E4M3, scales="tensor"),
        dict(batch_invariant=True, sinks=True),
        dict(page_size=12, layout="HND", own_out=True),
        dict(dtype=torch.float16, shared_buffer=True, page_size=1),
        dict(heads=6, kv_heads=2),
        dict(only="decode", score_mod="softcap"),
        dict(bounds=True, check=True, head_dim=32),
        dict(gate=True, token_scales=True, sinks=True),
        dict(table="ragged", causal_by_seq=True),
        dict(chunk=16, table="gaps", cache_dtype=E4M3),
    ],
    ids=str,
)
def test_a_latent_cache_beside(batch: dict[str, Any], more: dict[str, Any], device: str) -> None:
    if more.get("check") and 0 in batch["seq_lens"]:
        batch = batch | dict(seq_lens=tuple(max(n, 1) for n in batch["seq_lens"]))
    run(Case("latent", **{**SMALL, **batch, **more}), device)


@pytest.mark.parametrize("more", [{}, dict(batch_invariant=True), dict(cache_dtype=E4M3, scales="float")], ids=str)
def test_keys_of_a_latent_cache_are_cut(more: dict[str, Any], device: str) -> None:
    for heads in (16, 128):
        run(
            Case("cut", (1, 3), (4000, 100), heads=heads, head_dim=320, value_dim=256, latent=True, sinks=True, **more),
            device,
        )


def test_new_values_may_lie_elsewhere(device: str) -> None:
    """They are read like any others, and so are the cache's."""
    inputs = build(Case("new", **CHUNKS, **SMALL, new=True), device)
    inputs["v_new"] = torch.randn(len(inputs["q"]), 1, 32, device=device)
    assert not latent(inputs)
    out, lse = paged_attn.paged_attention(**inputs)
    want, want_lse = reference.paged_attention(**{**inputs, "out": None})
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4)


def test_values_of_the_same_shape_elsewhere_are_no_call_that_was_made_before(device: str) -> None:
    for name in ("a", "b"):
        inputs = build(Case(name, **DECODE, **SMALL, lse=False), device)
        apart = inputs | {"v_cache": torch.randn_like(inputs["k_cache"])[..., :32]}
        for given in (inputs, apart, inputs, apart, apart):
            out = paged_attn.paged_attention(**given).double()
            want = reference.paged_attention(**{**given, "out": None})
            torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)


def test_a_cache_that_is_keys_and_values_at_once_is_a_latent_one(device: str) -> None:
    inputs = build(Case("one", **DECODE, head_dim=32, heads=4, latent=True), device)
    inputs["v_cache"] = inputs["k_cache"]
    assert latent(inputs)
    for _ in range(3):
        out, _ = paged_attn.paged_attention(**inputs)
        want, _ = reference.paged_attention(**{**inputs, "out": None})
        torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-4)


def test_a_query_has_the_same_bits_alone_and_in_a_batch(device: str) -> None:
    assert_the_same_bits_alone(
        Case("invariant", (1, 20, 1), (1300, 1100, 30), **SMALL, batch_invariant=True, lse=False), device
    )


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("cache_dtype", [torch.float32, E4M3])
@pytest.mark.parametrize("with_view", [False, True])
def test_keys_that_hold_their_values_are_written_once(
    layout: str, cache_dtype: Any, with_view: bool, device: str
) -> None:
    case = Case("write", (5,), (5,), head_dim=576, value_dim=512, layout=layout, cache_dtype=cache_dtype, latent=True)
    inputs = build(case, device)
    cache, want = inputs["k_cache"], inputs["k_cache"].clone()
    k, slots = torch.randn(4, 1, 576, device=device), torch.tensor([3, -1, 20, 7], device=device)
    more: dict[str, Any] = dict(kv_layout=inputs["kv_layout"])
    if cache_dtype == E4M3:
        more["k_scale"] = 0.5
    for _ in range(2):
        paged_attn.write_kv(k, None, cache, inputs["v_cache"] if with_view else None, slots, **more)
    reference.write_kv(k, None, want, None, slots, **more)
    assert torch.equal(cache.view(torch.uint8), want.view(torch.uint8))
    assert inputs["v_cache"][0].data_ptr() == cache[0].data_ptr()


def test_x_packed_keys_are_written_alone(device: str) -> None:
    inputs = build(Case("write", (5,), (5,), head_dim=48, layout="x"), device)
    cache, want = inputs["k_cache"], inputs["k_cache"].clone()
    k, slots = torch.randn(4, 1, 48, device=device), torch.tensor([3, -1, 20, 7], device=device)
    paged_attn.write_kv(k, None, cache, None, slots)
    reference.write_kv(k, None, want, None, slots)
    assert torch.equal(cache.view(torch.uint8), want.view(torch.uint8))


def test_what_is_written_is_what_is_read(device: str) -> None:
    """A tiny layer of latent attention, absorbed, equals the same layer with keys and values of every head."""
    torch.manual_seed(0)
    tokens, heads, nope, rope, rank, page = 37, 4, 16, 8, 32, 16
    up_k, up_v = (
        torch.randn(heads, nope, rank, device=device) / rank**0.5,
        torch.randn(heads, 24, rank, device=device) / rank**0.5,
    )
    q_nope, q_rope = torch.randn(tokens, heads, nope, device=device), torch.randn(tokens, heads, rope, device=device)
    latents, k_rope = torch.randn(tokens, rank, device=device), torch.randn(tokens, rope, device=device)
    scale = (nope + rope) ** -0.5

    keys = torch.cat([torch.einsum("hnr,tr->thn", up_k, latents), k_rope[:, None].expand(-1, heads, -1)], -1)
    values = torch.einsum("hvr,tr->thv", up_v, latents)
    scores = torch.einsum("thd,shd->hts", torch.cat([q_nope, q_rope], -1), keys) * scale
    scores = scores.masked_fill(torch.ones(tokens, tokens, device=device).tril() == 0, -torch.inf)
    want = torch.einsum("hts,shv->thv", scores.softmax(-1), values)

    cache = torch.full((4, page, 1, rank + rope), torch.nan, device=device)
    slots = torch.cat(
        [torch.arange(32, 48, device=device), torch.arange(0, 16, device=device), torch.arange(48, 53, device=device)]
    )
    paged_attn.write_kv(torch.cat([latents, k_rope], -1)[:, None], None, cache, None, slots)
    q = torch.cat([torch.einsum("hnr,thn->thr", up_k, q_nope), q_rope], -1)
    out = paged_attn.paged_attention(
        q, cache, cache[..., :rank], *(torch.tensor(x, device=device) for x in ([[2, 0, 3]], [tokens], [0, tokens])),
        softmax_scale=scale,
    )  # fmt: skip
    torch.testing.assert_close(torch.einsum("hvr,thr->thv", up_v, out), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cache_dtype", [torch.float32, E4M3])
def test_a_compiled_graph_writes_and_reads_a_latent_cache(cache_dtype: Any, device: str) -> None:
    more: dict[str, Any] = {} if cache_dtype == torch.float32 else dict(cache_dtype=cache_dtype, scales="float")
    case = Case("graph", **DECODE, **SMALL, **more, own_out=True)
    inputs = {name: x for name, x in build(case, device).items() if name not in ("v_cache", "out")}
    inputs["k_cache"] = inputs["k_cache"].view(torch.uint8).zero_().view(cache_dtype)
    given = inputs.pop("k_cache"), torch.randn(4, 1, 48, device=device), torch.tensor([3, 20, -1, 7], device=device)
    scale = {name: x for name, x in inputs.items() if name == "k_scale"}

    def layer(cache: torch.Tensor, k: torch.Tensor, slots: torch.Tensor) -> Any:
        paged_attn.write_kv(k, None, cache, None, slots, **scale)
        return paged_attn.paged_attention(k_cache=cache, v_cache=cache[..., :32], **inputs)

    eager, traced = ((given[0].clone(), *given[1:]) for _ in range(2))
    want = layer(*eager)
    for got, expected in zip(torch.compile(layer, fullgraph=True, backend="aot_eager")(*traced), want):
        assert torch.equal(got, expected)
    assert torch.equal(traced[0].view(torch.uint8), eager[0].view(torch.uint8))


DEEPSEEK: dict[str, Any] = dict(head_dim=576, value_dim=512, page_size=64, latent=True, dtype=torch.bfloat16)
LENGTHS: dict[str, dict[str, Any]] = {
    "decode": dict(query_lens=(1,) * 16, seq_lens=(1, 63, 64, 65, *range(900, 4500, 300)), decode_form=True),
    "lone decode": dict(query_lens=(1,), seq_lens=(32768,)),
    "of 2": dict(query_lens=(2,) * 8, seq_lens=(2, 64, 100, 999, 1000, 2048, 3000, 4097), bounds=True),
    "of 8": dict(query_lens=(8,) * 4, seq_lens=(8, 64, 1000, 4097), bounds=True),
    "mixed": dict(query_lens=(300, 1, 1, 17, 0), seq_lens=(2048, 4096, 1, 40, 9), padding=3),
}


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("heads", [1, 8, 16, 32, 40, 64, 128])
@pytest.mark.parametrize(
    "more",
    [
        {},
        dict(cache_dtype=E4M3, scales="float"),
        dict(dtype=torch.float16, sinks=True, window_size=(1000, -1)),
        dict(dtype=E4M3, cache_dtype=E4M3, scales="tensor"),
        dict(new=True),
        dict(batch_invariant=True),
        dict(head_dim=512),
        dict(head_dim=320, value_dim=256),
    ],
    ids=str,
)
def test_layers_of_models(lengths: str, heads: int, more: dict[str, Any], device: str) -> None:
    """Of DeepSeek-V3's sizes and others, on any number of GPUs."""
    run(Case("layer", **{**DEEPSEEK, **LENGTHS[lengths], **more}, heads=heads), device)


@pytest.mark.gpu
def test_a_captured_call_reads_a_latent_cache_that_has_changed(device: str) -> None:
    case = Case("captured", **DEEPSEEK, **LENGTHS["decode"], heads=16, lse=False)
    inputs = build(case, device)
    paged_attn.paged_attention(**inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_attn.paged_attention(**inputs)
    for _ in range(2):
        inputs["k_cache"].normal_()
        graph.replay()
        compare(case, inputs["out"], None, inputs)
