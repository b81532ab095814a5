"""Ranks of vLLM's decode context parallelism as threads of one process, of which one runs at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.distributed import parallel_state
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

from paged_attn.distributed import groups
from tests.integrations import vllm_batch as made
from tests.integrations.vllm_batch import PAGE, PAGES

GROUP = 2  # query heads of a rank; the ranks share one KV head
PAD = 3


class Ranks:
    """vLLM's group of `world` ranks, in place of the process's own; each thread sees its own rank."""

    def __init__(self, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world, self._here = world, threading.local()
        self._turn, self._all = threading.Lock(), threading.Barrier(world)  # kernels are interpreted one at a time
        self._given: list[Any] = [None] * world
        monkeypatch.setattr(parallel_state, "_DCP", self)
        monkeypatch.setattr(groups, "process_group", lambda group: group)
        monkeypatch.setattr(groups, "rank_and_world", lambda group: (group.rank_in_group, group.world))
        monkeypatch.setattr(groups, "gather", lambda x, group: torch.stack(group.shared(x)))
        monkeypatch.setattr(
            groups, "exchange", lambda x, group: torch.stack([y[group.rank_in_group] for y in group.shared(x)])
        )

    @property
    def rank_in_group(self) -> int:
        return int(getattr(self._here, "rank", 0))

    @property
    def world_size(self) -> int:
        return self.world

    @property
    def device_group(self) -> Ranks:
        return self

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self.shared(x), dim)

    def shared(self, x: Tensor) -> list[Tensor]:
        """What all ranks give to a collective, each once it has arrived there."""
        self._given[self.rank_in_group] = x.clone()
        self._turn.release()
        try:
            self._all.wait(60)
            found = list(self._given)
            self._all.wait(60)
        finally:
            self._turn.acquire()
        return found

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """work(rank) on every rank; an error of one rank ends them all."""
        results: list[Any] = [None] * self.world
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            self._here.rank = rank
            with self._turn:
                try:
                    results[rank] = work(rank)
                except BaseException as error:
                    errors.append(error)
                    self._all.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise next((x for x in errors if not isinstance(x, threading.BrokenBarrierError)), errors[0])
        return results


def parallel(world: int, stripe: int) -> Any:
    """vLLM's parallel_config, as far as it is asked."""
    return SimpleNamespace(
        decode_context_parallel_size=world, prefill_context_parallel_size=1, cp_kv_cache_interleave_size=stripe,
        tensor_parallel_size=world,
    )  # fmt: skip


def split(whole: Tensor, common: Any, shard: tuple[int, int, int]) -> tuple[Tensor, Any]:
    """(a rank's cache with NaN in unused slots, its batch), of a cache whose axis 0 is pages.

    Pages are in another order than in the whole cache.  The batch's lengths are of whole sequences; its slots are -1
    for keys of other ranks, as vLLM's kernel for slots gives them.
    """
    rank, world, stripe = shard
    own = torch.full_like(whole, torch.nan if whole.dtype.is_floating_point else 0x7F)  # 0x7F is NaN in e4m3
    place_of_slot = whole.dim() - 2  # [pages, heads, slots, dims] or [pages, slots, dims]
    source, target = whole.movedim(place_of_slot, 1), own.movedim(place_of_slot, 1)
    ids = torch.randperm(PAGES, generator=torch.Generator().manual_seed(7 + rank))
    table = torch.full_like(common.block_table_tensor, 2**31 - 1)
    slots, used = torch.full_like(common.slot_mapping, -1), 0
    for s, keys in enumerate(common.seq_lens.tolist()):
        a, b = common.query_start_loc[s : s + 2].tolist()
        places = torch.arange(keys)
        places = places[places // stripe % world == rank]
        index = torch.arange(len(places))
        pages = ids[used : (used := used + -(-len(places) // PAGE))]
        table[s, : len(pages)] = pages.int()
        target[pages[index // PAGE], index % PAGE] = source[
            common.block_table_tensor[s].long()[places // PAGE], places % PAGE
        ]
        new = places >= keys - (b - a)
        slots[a + places[new] - (keys - (b - a))] = pages[index[new] // PAGE] * PAGE + index[new] % PAGE
    return own, common.replace(block_table_tensor=table, slot_mapping=slots)


def config(world: int, stripe: int) -> Any:
    told = made.config(CUDAGraphMode.NONE)
    told.parallel_config = parallel(world, stripe)
    return told


class Step:
    """A step of one layer, with all keys on one rank or some on each, by vLLM's builders and cache updates."""

    def __init__(
        self, lengths: list[tuple[int, int]], world: int, stripe: int, dtype: torch.dtype = torch.float32,
        tail: int = 0, query: torch.dtype = torch.float32, common: dict[str, Any] | None = None,
        dims: int = made.DIM,
    ) -> None:  # fmt: skip
        self.world, self.stripe = world, stripe
        self.batch = made.batch(lengths, **common or {})
        self.tokens = self.batch.num_actual_tokens
        rng = torch.Generator().manual_seed(5)
        heads = (GROUP * world, 1, 1)
        q, self.k, self.v = (torch.randn(self.tokens + PAD, n, made.DIM, generator=rng) for n in heads)
        self.q = q.to(query)
        self.kv = made.cache("HND", dtype, tail, dims)[:, :1].contiguous()
        for part in self.kv.chunk(2, -1) if tail else ():
            scales = 0.02 + 0.01 * torch.rand(self.kv.shape[:3], generator=rng)
            part[..., dims:].view(torch.float32).copy_(scales[..., None])

    def alone(self, of: Any, **options: Any) -> Tensor:
        metadata = made.build(self.batch)
        assert metadata.shard is None
        return self._attended(slice(None), self.kv.clone(), metadata, of, options)

    def on(self, rank: int, of: Any, **options: Any) -> Tensor:
        """Results of a rank's own heads."""
        shard = rank, self.world, self.stripe
        own, batch = split(self.kv, self.batch, shard)
        batch.dcp_local_seq_lens = get_dcp_local_seq_lens(batch.seq_lens, self.world, rank, self.stripe)
        builder = made.Builder(None, ["layer"], config(self.world, self.stripe), torch.device("cpu"))  # type: ignore[arg-type]
        metadata = builder.build(0, batch)
        assert metadata.shard == shard
        return self._attended(slice(GROUP * rank, GROUP * (rank + 1)), own, metadata, of, options)

    def _attended(self, heads: slice, kv: Tensor, metadata: Any, of: Any, options: dict[str, Any]) -> Tensor:
        options = options | {x: options[x][heads] for x in ("alibi_slopes", "sinks") if x in options}
        q = self.q[:, heads].contiguous()
        impl = made.implementation(num_heads=q.shape[1], num_kv_heads=1, **options)
        assert impl.need_to_return_lse_for_decode is (metadata.shard is not None), "vLLM asserts it"
        impl.do_kv_cache_update(of, self.k, self.v, kv, metadata.slot_mapping)
        out = torch.full(q.shape, 7.0)
        impl.forward(of, q, self.k, self.v, kv, metadata, out)
        assert not out[self.tokens :].any(), "rows of padding are zeros"
        return out[: self.tokens]


def attends_by_vllms_groups(rank: int, world: int) -> bool:
    """Whether a rank, here a process, gets by vLLM's group what one rank alone gets."""
    step, of = Step(made.MIXED, world, 4), made.layer()
    want = step.alone(of, sinks=torch.arange(GROUP * world).float())
    parallel_state._DCP = parallel_state.init_model_parallel_group([[*range(world)]], rank, "gloo", group_name="dcp")
    found = step.on(rank, of, sinks=torch.arange(GROUP * world).float())
    torch.testing.assert_close(found, want[:, GROUP * rank : GROUP * (rank + 1)], atol=1e-5, rtol=1e-5)
    return True
