"""Ranks of vLLM's decode context parallelism as threads of one process, of which one runs at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.distributed import parallel_state

from paged_attn.distributed import groups
from tests.integrations.vllm_batch import PAGE, PAGES


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
    own = (
        torch.full_like(whole.float(), torch.nan).to(whole.dtype)
        if whole.dtype.is_floating_point
        else whole.new_full(whole.shape, 0x7F)
    )
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
