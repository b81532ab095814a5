"""With batch_invariant=True a query's result has the same bits in any company, by the plans that ship: on a GPU.

In 16 bits, and at lengths of several pieces of 1024.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from paged_attn import paged_attention
from tests.support.cases import E4M3, Case, bits, build, run
from tests.support.chunks import attend, chunked, counters, decode, same, take, whole  # noqa: F401, a fixture of all tests

pytestmark = pytest.mark.simulated

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
LONG = (5000, 3, 1024, 1025, 2900)
SERVER = Case("server", LONG, LONG, heads=16, kv_heads=4, head_dim=128, dtype=BF16, batch_invariant=True)
GPU_FEATURES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp16": {"dtype": FP16},
    "fp32": {"dtype": FP32, "heads": 8, "kv_heads": 2},
    "fp8_cache": {"cache_dtype": E4M3, "scales": "per_head"},
    "all_fp8": {"dtype": E4M3, "out_dtype": E4M3, "scales": "tensor"},
    "window_sinks": {"window_size": (1500, -1), "sinks": True},
    "softcap_alibi": {"softcap": 20.0, "alibi": True},
    "group_1": {"kv_heads": 16},
    "group_10_dim_80": {"heads": 20, "kv_heads": 2, "head_dim": 80},
    "group_64": {"heads": 64, "kv_heads": 1},
    "packed": {"layout": "x"},
    "hnd_page_24": {"layout": "HND", "page_size": 24},
    "page_128": {"page_size": 128},
    "dim_64": {"head_dim": 64},
    "dim_256": {"head_dim": 256, "heads": 8, "kv_heads": 2},
}
SERVERS = [replace(SERVER, name=name, **feature) for name, feature in GPU_FEATURES.items()]


@pytest.mark.hopper
@pytest.mark.parametrize("features", ["bf16", "softcap_alibi", "dim_64"])
def test_hopper_kernels_for_few_rows_and_for_many_agree(features: str, device: str) -> None:
    lens = (1100, 3, 130)
    case = replace(SERVER, query_lens=lens, seq_lens=lens, heads=8, kv_heads=2, **GPU_FEATURES[features])
    inputs = build(case, device)
    want = attend(case, inputs, whole(case))
    spots = [(seq, pos) for seq, seq_len in enumerate(lens) for pos in (0, 63, 64, 129, 1023, 1099) if pos < seq_len]
    rows = [(seq, pos, pos + 1) for seq, pos in spots]
    same(case, decode(case, inputs, spots), rows, want)
    same(case, decode(case, inputs, spots[5:6]), rows[5:6], want)
    for chunks in chunked(case, 300):
        same(case, attend(case, inputs, chunks), chunks, want)


@pytest.mark.gpu
@pytest.mark.parametrize("case", SERVERS, ids=str)
def test_on_a_gpu_pieces_are_right(case: Case, device: str) -> None:
    run(replace(case, query_lens=(300, 3, 1, 64, 1)), device)
    run(replace(case, query_lens=(1,) * 5, decode_form=True), device)


@pytest.mark.gpu
@pytest.mark.parametrize("case", SERVERS, ids=str)
def test_on_a_gpu_a_decode_equals_the_row_of_the_prefill(case: Case, device: str) -> None:
    inputs = build(case, device)
    want = attend(case, inputs, whole(case))
    ends = {0, 1, 63, 64, 1022, 1023, 1024, 1087, 2047, 2048, 2899, 4095, 4999}
    spots = [(seq, pos) for seq, seq_len in enumerate(case.seq_lens) for pos in sorted(ends) if pos < seq_len]
    rows = [(seq, pos, pos + 1) for seq, pos in spots]
    same(case, decode(case, inputs, spots), rows, want)
    for spot, row in zip(spots[::3], rows[::3]):
        same(case, decode(case, inputs, [spot]), [row], want)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 7, 64, 300, 1024, 3000])
@pytest.mark.parametrize("case", SERVERS, ids=str)
def test_on_a_gpu_chunks_equal_the_whole_prefill(case: Case, size: int, device: str) -> None:
    case = replace(case, query_lens=(1300, 3, 1024, 1025, 2900), seq_lens=(1300, 3, 1024, 1025, 2900))
    inputs = build(case, device)
    want = attend(case, inputs, whole(case))
    for chunks in list(chunked(case, size))[:: 97 if size == 1 else 11 if size == 7 else 1]:
        same(case, attend(case, inputs, chunks), chunks, want)


@pytest.mark.gpu
@pytest.mark.parametrize("case", SERVERS, ids=str)
def test_on_a_gpu_alone_equals_among_64_in_any_order(case: Case, device: str) -> None:
    """Prefills and decodes together; the bounds of the calls differ, too."""
    lens = tuple(1 + (i * 389) % 2500 for i in range(64))
    case = replace(case, query_lens=lens, seq_lens=lens)
    inputs = build(case, device)
    want = attend(case, inputs, whole(case))
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0)).tolist()
    mixed = [(seq, 0 if i % 8 == 0 else lens[seq] - 1, lens[seq]) for i, seq in enumerate(order)]
    same(case, attend(case, inputs, mixed), mixed, want)
    for chunk in mixed[:12]:
        same(case, attend(case, inputs, [chunk]), [chunk], want)
        same(case, attend(case, inputs, [chunk], max_seqlen_k=chunk[2]), [chunk], want)


@pytest.mark.gpu
@pytest.mark.parametrize("case", SERVERS, ids=str)
def test_on_a_gpu_long_decodes_do_not_depend_on_the_batch(case: Case, device: str) -> None:
    """In which the same sequence is cut at other places, or not at all."""
    lens = (32768, 40000, 1, 700, 33000, 8192, 20000, 65536)
    case = replace(case, query_lens=(1,) * 8, seq_lens=lens, decode_form=True)
    inputs = build(case, device)
    out, lse = paged_attention(**inputs)
    for seqs in ([0], [1], [7], [5, 2, 0], [4, 4, 4, 6, 3, 2], [7, 6, 5, 4, 3, 2, 1, 0] * 8):
        given = {name: take(inputs[name], seqs) for name in ("q", "page_table", "seq_lens")}
        for bound in (None, max(lens[seq] for seq in seqs)):
            changes = dict(**given, out=torch.empty_like(take(out, seqs)), max_seqlen_k=bound)
            got, got_lse = paged_attention(**{**inputs, **changes})
            assert torch.equal(bits(got), bits(out)[seqs])
            assert torch.equal(got_lse, lse[seqs])


@pytest.mark.gpu
@pytest.mark.parametrize("case", SERVERS, ids=str)
def test_on_a_gpu_room_for_states_changes_no_bit(case: Case, device: str) -> None:
    """Bounds so wide that nothing, or little, can be cut, and so narrow that shares are smaller than a piece."""
    inputs = build(replace(case, query_lens=(300, 3, 40, 1, 2900)), device)
    case = replace(case, query_lens=(300, 3, 40, 1, 2900))
    want = attend(case, inputs, whole(case), max_seqlen_k=5000)
    for bound in (1 << 17, 1 << 20, 1 << 28):
        same(case, attend(case, inputs, whole(case), max_seqlen_k=bound), whole(case), want)
    chunks = [(seq, end - 1, end) for seq, _, end in whole(case)]
    for some in (chunks, chunks[:1], chunks[4:]):
        for bound in (5000, 1 << 28):
            same(case, decode(case, inputs, [x[:2] for x in some], max_seqlen_k=bound), some, want)


@pytest.mark.gpu
@pytest.mark.parametrize("case", SERVERS[:1], ids=str)
def test_on_a_gpu_a_key_beyond_the_bound_has_no_room_and_harms_nobody(case: Case, device: str) -> None:
    case = replace(case, query_lens=(40, 3, 1, 1, 30))
    inputs = build(case, device)
    want = attend(case, inputs, whole(case))
    got = attend(case, inputs, whole(case), max_seqlen_k=3000)
    for seq in (1, 2, 3, 4):
        same(case, [got[seq]], [whole(case)[seq]], want)


@pytest.mark.gpu
def test_on_a_gpu_a_captured_call_keeps_its_bits(device: str) -> None:
    case = replace(SERVER, query_lens=(1,) * 5, decode_form=True)
    inputs = build(case, device)
    paged_attention(**inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = paged_attention(**inputs)
    inputs["seq_lens"].copy_(inputs["seq_lens"] // 2)
    graph.replay()
    got = out.clone(), lse.clone()
    for one, other in zip(got, paged_attention(**{**inputs, "out": torch.empty_like(out)}), strict=True):
        assert torch.equal(one, other)
