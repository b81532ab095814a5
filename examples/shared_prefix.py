"""Sequences that begin with the same prompt share its pages: the page table names one page in several rows.

    python examples/shared_prefix.py

Full pages of the prefix are computed and stored once.  Its last page, which is partly filled, is copied for each
sequence, because each writes its own tokens behind the prefix.
"""

import torch
from torch import Tensor

import paged_attn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, PAGES = 8, 2, 64, 16, 64
PREFIX, OWN = 40, [5, 1, 12, 30]  # number of shared tokens, and of each sequence's own tokens behind them


def write(k: Tensor, v: Tensor, cache: Tensor, page_table: Tensor, seq_lens: Tensor, starts: Tensor) -> None:
    positions = paged_attn.positions(seq_lens, starts, tokens=len(k))
    paged_attn.write_kv(k, v, *cache, paged_attn.slots(page_table, positions, PAGE_SIZE, starts))


def main() -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, PREFIX + sum(OWN), KV_HEADS, HEAD_DIM, device=DEVICE)
    q = torch.randn(sum(OWN), HEADS, HEAD_DIM, device=DEVICE)
    free = torch.randperm(PAGES).tolist()
    cache = torch.zeros(2, PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM, device=DEVICE)

    # The prefix, once.
    prefix = [free.pop() for _ in range(paged_attn.pages_needed(PREFIX, PAGE_SIZE))]
    table = torch.tensor([prefix], dtype=torch.int32, device=DEVICE)
    lens = torch.tensor([PREFIX], dtype=torch.int32, device=DEVICE)
    write(k[:PREFIX], v[:PREFIX], cache, table, lens, torch.tensor([0, PREFIX], dtype=torch.int32, device=DEVICE))

    # Every sequence's row: the prefix's full pages, a copy of its last page, and pages of the sequence's own.
    full = PREFIX // PAGE_SIZE
    rows = []
    for own in OWN:
        row = prefix[:full]
        row += [free.pop() for _ in range(paged_attn.pages_needed(PREFIX + own, PAGE_SIZE) - full)]
        if PREFIX % PAGE_SIZE:
            cache[:, row[full]] = cache[:, prefix[full]]
        rows.append(row)
    width = max(map(len, rows))
    page_table = torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.int32, device=DEVICE)
    seq_lens = torch.tensor([PREFIX + own for own in OWN], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, *OWN], device=DEVICE).cumsum(0).int()

    # From here on sharing makes no difference: positions, slots and attention are as in any batch.
    write(k[PREFIX:], v[PREFIX:], cache, page_table, seq_lens, starts)
    out = paged_attn.paged_attention(q, *cache, page_table, seq_lens, starts)

    # For comparison: these sequences, each with its own copy of the whole prefix.
    alone = torch.zeros_like(cache)
    pages = iter(torch.randperm(PAGES).tolist())
    rows = [[next(pages) for _ in row] + [-1] * (width - len(row)) for row in rows]
    own_table = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
    parts, first = [], PREFIX
    for own in OWN:
        parts += [torch.arange(PREFIX, device=DEVICE), torch.arange(first, first + own, device=DEVICE)]
        first += own
    tokens = torch.cat(parts)
    whole = torch.tensor([0, *(PREFIX + own for own in OWN)], device=DEVICE).cumsum(0).int()
    write(k[tokens], v[tokens], alone, own_table, seq_lens, whole)
    wanted = paged_attn.paged_attention(q, *alone, own_table, seq_lens, starts)
    torch.testing.assert_close(out, wanted)

    shared = len({page for row in page_table.tolist() for page in row if page >= 0})
    unshared = sum(page >= 0 for row in rows for page in row)
    print(f"{len(OWN)} sequences in {shared} pages instead of {unshared}: the same results")


if __name__ == "__main__":
    main()
