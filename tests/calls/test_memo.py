"""Kept calls: what is launched again is what would be launched anew, and what is kept is bounded."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import paged_attn
from paged_attn.calls import attend, call_cache
from tests.calls.changed import BASE, BASES
from tests.calls.outcomes import outcome, same
from tests.calls.remembered import recognised
from tests.support.cases import Case, build

pytestmark = pytest.mark.usefixtures("nothing_kept")


def test_a_second_call_is_not_checked_and_planned_again(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = build(BASE, device)
    first = outcome(inputs)
    monkeypatch.setattr(attend.checks, "check_attention", lambda *_, **__: pytest.fail("checked again"))
    assert same(outcome(inputs), first)


def test_a_kept_call_follows_its_tensors(device: str) -> None:
    """Other tensors of the same signature, in every place, are the ones that are read and written."""
    one, other = (build(BASES["fp8"], device) for _ in range(2))
    for name in ("q", "k_cache", "v_cache"):
        other[name] = build(Case(**{**vars(BASES["fp8"]), "seed": 7}), device)[name]
    other["page_table"] = build(Case(**{**vars(BASES["fp8"]), "seed": 7}), device)["page_table"]
    want = outcome(other)
    call_cache.clear()
    assert not same(outcome(one), want)
    assert same(outcome(other), want)


def test_a_kept_write_follows_its_tensors(device: str) -> None:
    caches = torch.zeros(2, 2, 4, 2, 16, device=device)
    for number in (1.0, 2.0, 3.0):
        k = torch.full((3, 2, 16), number, device=device)
        cache = torch.zeros_like(caches)
        paged_attn.write_kv(k, k + 1, cache[0], cache[1], torch.tensor([0, 5, -1], device=device))
        assert cache[0].sum() == number * 2 * 32
        assert cache[1].sum() == (number + 1) * 2 * 32


def test_what_is_kept_holds_no_tensor(device: str) -> None:
    inputs = build(BASES["fp8"], device)
    watched = [weakref.ref(x) for x in inputs.values() if isinstance(x, Tensor)]
    for _ in range(3):
        outcome(inputs)
    assert len(call_cache._kept) == len(call_cache._latest) == 1
    del inputs
    gc.collect()
    assert [x() for x in watched] == [None] * len(watched)


def test_what_is_kept_is_bounded(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "LIMIT", 3)
    inputs = build(BASES["decode"], device)
    for bound in range(20, 28):
        outcome(inputs | {"max_seqlen_k": bound})
        outcome(inputs | {"max_seqlen_k": bound})
        assert len(call_cache._kept) <= 3
        assert len(call_cache._latest) <= 3
    assert recognised(inputs | {"max_seqlen_k": 27}) is not None


class Watched:
    """A lock that tells when a thread has to wait for it."""

    def __init__(self) -> None:
        self.lock, self.waited_for = threading.Lock(), threading.Event()

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            self.waited_for.set()
            self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


class Cleared(dict[Any, Any]):
    """Kept calls that another thread forgets, or waits to forget, while the oldest of them is looked for."""

    def __init__(self, lock: Watched, **kept: Any) -> None:
        super().__init__(**kept)
        self.lock = lock

    def __iter__(self) -> Any:
        keys = super().__iter__()
        self.other = threading.Thread(target=self._forget)
        self.other.start()
        self.lock.waited_for.wait()
        return keys

    def _forget(self) -> None:
        call_cache.clear()
        self.lock.waited_for.set()  # also where nobody waits


def test_threads_that_forget_calls_at_once_do_not_disturb_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = Watched()
    store = Cleared(lock, first=None, second=None)
    monkeypatch.setattr(call_cache, "LIMIT", 2)
    monkeypatch.setattr(call_cache, "_kept", store)
    monkeypatch.setattr(call_cache, "_forgetting", lock)
    call_cache._put(store, "third", None)
    store.other.join()
    assert not store
