"""Speculative decoding with a tree of drafts: one forward pass verifies all nodes, and the longest right path is kept.

    python examples/speculative_tree.py

The tokens are those of plain greedy decoding, in fewer steps.  Drafts come from the same model cut to its first layer.
"""

import torch
from torch import Tensor

import paged_attn
from tiny_model import DEVICE, Transformer, dense, dense_logits

PAGE_SIZE, PAGES = 8, 16
# Node 0 is the last certain token, whose key is not in the cache yet.  Nodes 1 and 2 are guesses at the token after it,
# nodes 3 to 6 at the token after those.
PARENTS = [-1, 0, 0, 1, 1, 2, 2]
DEPTHS = [0, 1, 1, 2, 2, 2, 2]


def ancestors_only(parents: list[int]) -> Tensor:
    """Return a `qq_bias` [n, n] with which a node sees itself and its ancestors, but no other node."""
    bias = torch.full((len(parents), len(parents)), -torch.inf)
    for node in range(len(parents)):
        seen = node
        while seen >= 0:
            bias[node, seen] = 0
            seen = parents[seen]
    return bias.to(DEVICE)


class Decoder:
    """One sequence and its cache, which holds the keys and values of `tokens[:cached]`."""

    def __init__(self, model: Transformer, prompt: list[int]) -> None:
        self.model, self.tokens, self.cached = model, list(prompt), 0
        self.cache = torch.zeros(model.layers, 2, PAGES, PAGE_SIZE, model.kv_heads, model.head_dim, device=DEVICE)
        self.page_table = torch.randperm(PAGES, dtype=torch.int32)[None].to(DEVICE)

    def forward(self, tokens: list[int], depths: list[int] | None = None, bias: Tensor | None = None) -> list[int]:
        """Append tokens to the cache behind the cached ones; return the greedy next token of each.

        depths: each node's depth in the tree, or None if tokens follow one another.
        """
        seq_lens = torch.tensor([self.cached + len(tokens)], dtype=torch.int32, device=DEVICE)
        starts = torch.tensor([0, len(tokens)], dtype=torch.int32, device=DEVICE)
        places = paged_attn.positions(seq_lens, starts, tokens=len(tokens))
        slot_mapping = paged_attn.slots(self.page_table, places, PAGE_SIZE, starts)
        # Nodes of the same depth share a position, but each has its own place in the cache.
        positions = places if depths is None else self.cached + torch.tensor(depths, device=DEVICE)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            paged_attn.write_kv(k, v, *self.cache[layer], slot_mapping)
            return paged_attn.paged_attention(
                q, *self.cache[layer], self.page_table, seq_lens, starts, qq_bias=bias, query_positions=positions
            )

        x = self.model(torch.tensor(tokens, device=DEVICE), positions, attend)
        return self.model.logits(x).argmax(-1).tolist()

    def keep(self, nodes: list[int]) -> None:
        """Move the keys and values of a path to the places of its positions; later tokens overwrite the other nodes."""
        source, target = (
            paged_attn.slots(
                self.page_table, self.cached + torch.tensor(places, device=DEVICE), PAGE_SIZE,
                torch.tensor([0, len(nodes)], dtype=torch.int32, device=DEVICE),
            )
            for places in (nodes, range(len(nodes)))
        )  # fmt: skip
        flat = self.cache.flatten(2, 3)  # [layers, 2, slots, kv_heads, head_dim]
        flat[:, :, target] = flat[:, :, source]
        self.cached += len(nodes)


def draft(model: Transformer, tokens: list[int]) -> list[int]:
    """Return the tokens of the nodes: the children of an inner node are the draft model's two likeliest next tokens."""

    def two(path: list[int]) -> list[int]:
        return dense_logits(model, path).topk(2).indices.tolist()

    first = two(tokens)
    return [tokens[-1], *first, *two([*tokens, first[0]]), *two([*tokens, first[1]])]


def main() -> None:
    torch.manual_seed(0)
    model, drafter = Transformer(), Transformer()
    drafter.layers = 1
    prompt, wanted = torch.randint(211, (19,)).tolist(), 16
    bias = ancestors_only(PARENTS)

    decoder = Decoder(model, prompt)
    decoder.tokens.append(decoder.forward(prompt)[-1])
    decoder.cached = len(prompt)
    steps = 1
    while len(decoder.tokens) < len(prompt) + wanted:
        nodes = draft(drafter, decoder.tokens)
        greedy = decoder.forward(nodes, DEPTHS, bias)
        path = [0]
        while True:  # follow the nodes that the model itself would have chosen
            right = [n for n, parent in enumerate(PARENTS) if parent == path[-1] and nodes[n] == greedy[path[-1]]]
            if not right:
                break
            path.append(right[0])
        decoder.keep(path)
        decoder.tokens += [greedy[node] for node in path]
        steps += 1

    assert decoder.tokens[: len(prompt) + wanted] == dense(model, prompt, wanted)
    print(f"{len(decoder.tokens) - len(prompt)} tokens in {steps} steps: those of plain greedy decoding")


if __name__ == "__main__":
    main()
