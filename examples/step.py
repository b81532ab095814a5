"""Engine steps around paged attention: page tables and slots from lengths, and padding to the size of a CUDA graph.

    python examples/step.py

Three sequences share a cache: one prefills 20 tokens, one continues its prefill with a chunk of 5, one decodes its
34th token.  In the next step all three decode.
"""

from itertools import accumulate

import torch

import paged_attn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, PAGES = 8, 2, 64, 16, 32


def main() -> None:
    torch.manual_seed(0)
    k_cache, v_cache = torch.randn(2, PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM, device=DEVICE)
    free = torch.randperm(PAGES).tolist()  # any order: a sequence's pages need not be neighbours

    # What the scheduler decided, as lengths on the host.  seq_len counts the step's own tokens, too.
    query_lens, seq_lens = [20, 5, 1], [20, 12, 34]
    pages = [[free.pop() for _ in range(paged_attn.pages_needed(n, PAGE_SIZE))] for n in seq_lens]

    # A graph has one size: 4 sequences, 8 pages each, and 32 tokens.  Sequences that pad the batch are empty.
    starts = [0, *accumulate(query_lens)]
    graph_inputs = paged_attn.pad_batch(pages, seq_lens, starts, seqs=4, max_pages=8, device=DEVICE)
    q = torch.randn(32, HEADS, HEAD_DIM, device=DEVICE)
    k, v = torch.randn(2, 32, KV_HEADS, HEAD_DIM, device=DEVICE)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        """Run what a graph captures: positions and slots are computed from the lengths, on the device."""
        table, lens, starts = graph_inputs
        positions = paged_attn.positions(lens, starts, tokens=32)  # rotary embeddings need them, too
        slot_mapping = paged_attn.slots(table, positions, PAGE_SIZE, starts)
        paged_attn.write_kv(k, v, k_cache, v_cache, slot_mapping)
        return paged_attn.paged_attention(q, k_cache, v_cache, table, lens, starts), positions

    out, positions = step()
    if DEVICE == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, positions = step()
        graph.replay()

    tokens = sum(query_lens)
    assert positions.tolist() == [*range(20), *range(7, 12), 33] + [-1] * (32 - tokens)
    wanted = paged_attn.reference.paged_attention(q[:tokens], k_cache, v_cache, *graph_inputs)
    torch.testing.assert_close(out[:tokens], wanted.to(out.dtype), atol=1e-5, rtol=1e-5)
    assert not out[tokens:].any()  # results of padding are zeros
    print(f"{tokens} tokens of {len(seq_lens)} sequences in a step of 32: as the reference")

    # The next step: every sequence decodes one token.  The smaller batch goes into the same tensors.
    for row, length in zip(pages, seq_lens):
        if length % PAGE_SIZE == 0:  # the sequence's last page is full
            row.append(free.pop())
    seq_lens = [n + 1 for n in seq_lens]
    paged_attn.pad_batch(pages, seq_lens, range(4), out=graph_inputs)
    if DEVICE == "cuda":
        graph.replay()
    else:
        out, positions = step()
    assert positions.tolist() == [20, 12, 34] + [-1] * 29
    wanted = paged_attn.reference.paged_attention(q[:3], k_cache, v_cache, *graph_inputs)
    torch.testing.assert_close(out[:3], wanted.to(out.dtype), atol=1e-5, rtol=1e-5)
    print("3 decodes in the same tensors: as the reference")


if __name__ == "__main__":
    main()
