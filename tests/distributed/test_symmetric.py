"""Whether ranks share memory, without GPUs: all get one answer, whichever rank has a reason against it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paged_attn.distributed import symmetric
from paged_attn.distributed.symmetric import Shared

HERE = torch.device("cuda", 0)
PLACES = [("a host", "device 0"), ("a host", "device 1"), ("a host", "device 2")]


class Ranks:
    """This rank is the first of three, and torch's memory is a stand-in; the others answer as they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reasons: list[str | None] = [None, None, None]
        self.places = list(PLACES)
        self.errors: list[str | None] = [None, None, None]
        self.fails: Exception | None = None
        self.asked: list[Any] = []
        memory = SimpleNamespace(empty=lambda count, **_: torch.ones(count), rendezvous=self.rendezvous)
        monkeypatch.setattr(symmetric, "_module", lambda: memory)
        monkeypatch.setattr(symmetric, "_why_not_here", lambda device: self.reasons[0])
        monkeypatch.setattr(symmetric, "_where", lambda device: self.places[0])
        monkeypatch.setattr(symmetric.dist, "get_world_size", lambda group: 3)
        monkeypatch.setattr(symmetric.dist, "all_gather_object", self.gather)
        monkeypatch.setattr(symmetric.dist, "barrier", lambda group: self.asked.append("barrier"))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setenv(symmetric.NO_MULTICAST, "1")

    def rendezvous(self, own: torch.Tensor, group: Any) -> Any:
        self.asked.append("rendezvous")
        if self.fails:
            raise self.fails
        return SimpleNamespace(buffer_ptrs=[own.data_ptr(), 32, 48])

    def gather(self, answers: list[Any], own: Any, group: Any) -> None:
        later = own[1] is None
        others = [[x, None] for x in self.errors] if later else [list(x) for x in zip(self.reasons, self.places)]
        answers[:] = [own, *others[1:]]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


def test_memory_is_zero_before_any_rank_writes(ranks: Ranks) -> None:
    shared = symmetric.share(8, HERE, None)
    assert isinstance(shared, Shared)
    assert not shared.own.any()
    assert shared.addresses[1:] == [32, 48]
    assert ranks.asked == ["rendezvous", "barrier"]


def test_a_reason_of_any_rank_is_that_of_all(ranks: Ranks) -> None:
    ranks.reasons[2] = "devices do not reach each other's memory"
    assert symmetric.share(8, HERE, None) == "rank 2: devices do not reach each other's memory"
    assert ranks.asked == [], "nobody begins what the others do not"


@pytest.mark.parametrize(
    ("places", "reason"),
    [
        ([PLACES[0], ("b host", "device 0"), PLACES[2]], "ranks are on 2 hosts"),
        ([PLACES[0], PLACES[1], PLACES[1]], "several ranks have one device: call torch.cuda.set_device first"),
    ],
)
def test_ranks_have_a_device_each_of_one_host(places: Any, reason: str, ranks: Ranks) -> None:
    ranks.places = places
    assert symmetric.share(8, HERE, None) == reason


def test_what_fails_on_one_rank_has_no_rank(ranks: Ranks) -> None:
    ranks.errors[1] = "torch could not share memory: OSError of that rank"
    assert symmetric.share(8, HERE, None) == "rank 1: torch could not share memory: OSError of that rank"
    ranks.errors[1], ranks.fails = None, ValueError("no such thing")
    assert symmetric.share(8, HERE, None) == "rank 0: torch could not share memory: ValueError no such thing"
