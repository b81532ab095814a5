"""What is kept is bounded by what runs at the same time, not by what has run; nobody else's memory is kept."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import paged_attn
from paged_attn import reference
from paged_attn.calls import call_cache
from paged_attn.launching import driver, launch, scratch, template
from paged_attn.launching.template import AtAddress, Hole
from paged_attn.planning import planner

CPU = torch.device("cpu")
NEED = scratch.Need(1000, 4)


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> dict[Any, scratch.Room]:
    """The kept rooms, none at first."""
    found: dict[Any, scratch.Room] = {}
    monkeypatch.setattr(scratch, "_rooms", found)
    scratch._turned_away.clear()
    # 0 alone cannot be captured, and asking about others needs CUDA
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


def test_rooms_of_a_few_streams_are_kept(rooms: dict[Any, scratch.Room]) -> None:
    for stream in [x for x in range(100) for _ in range(3)]:
        room = scratch.take(NEED, CPU, stream)
        assert not room.counters.any()
        assert room.states_size >= NEED.states
        assert len(rooms) <= scratch.MAX_ROOMS_PER_DEVICE
    assert (None, 99, 0) in rooms, "the latest that called twice"


def test_a_stream_that_calls_again_and_again_keeps_its_room(rooms: dict[Any, scratch.Room]) -> None:
    """Others that call once, or in a ring of too many, do not drive it out, and have rooms of their own each time."""
    mine = scratch.take(NEED, CPU, 0)
    for stream in [*range(1, 100), *range(1, 100)]:
        other = scratch.take(NEED, CPU, stream)
        assert scratch.take(NEED, CPU, 0) is mine
        assert other.counters_at != mine.counters_at


def test_a_room_that_is_dropped_lives_while_somebody_holds_it(rooms: dict[Any, scratch.Room]) -> None:
    held = scratch.take(NEED, CPU, 0)
    states = weakref.ref(held.states)
    for stream in [x for x in range(1, 50) for _ in range(2)]:
        scratch.take(NEED, CPU, stream)
    assert (None, 0, 0) not in rooms
    assert states() is not None
    del held
    gc.collect()
    assert states() is None


def test_large_rooms_are_fewer(rooms: dict[Any, scratch.Room], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "MAX_STATES_PER_DEVICE", 2500)
    monkeypatch.setattr(scratch, "MAX_STATES_PER_ROOM", 1250)
    for stream in [x for x in range(20) for _ in range(2)]:
        scratch.take(NEED, CPU, stream)
        assert sum(room.states_size for room in rooms.values()) <= 2500
    first, second = (scratch.take(NEED._replace(states=2000), CPU, 0) for _ in range(2))
    assert first.states_at != second.states_at, "not kept"
    assert first.states.numel() == 2000
    assert max(room.states_size for room in rooms.values()) <= 1250


def test_kept_memory_is_made_by_another_thread_and_on_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools and modes are of a thread, or of a stream: whatever is in use around a call, it is not in use there."""
    import threading

    seen: list[Any] = []

    class Stream:
        def __init__(self, number: int) -> None:
            self.number = number

        def record_event(self) -> str:
            return f"event of {self.number}"

        def wait_event(self, event: str) -> None:
            seen.append((self.number, event))

    class Kept:
        def record_stream(self, stream: Stream) -> None:
            seen.append(("used on", stream.number))

    class Entered:
        def __init__(self, what: Any) -> None:
            self.what = what

        def __enter__(self) -> None:
            seen.append(getattr(self.what, "number", str(self.what)))

        def __exit__(self, *_: object) -> None:
            pass

    user, numbers = Stream(1), iter([1, 2, 3])
    user_like = {1: user}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: user)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: user_like.get(n := next(numbers)) or Stream(n))
    monkeypatch.setattr(torch.cuda, "stream", Entered)
    monkeypatch.setattr(torch.cuda, "device", Entered)
    monkeypatch.setattr(scratch, "_other_streams", {})
    kept = Kept()

    def make() -> Any:
        seen.append(threading.current_thread() is threading.main_thread())
        return (kept,)

    assert scratch.kept_memory(make, torch.device("cuda", 0)) == (kept,)
    assert seen == ["cuda:0", 2, False, (1, "event of 2"), ("used on", 1)]


# ---- many different calls ----------------------------------------------------------------------------------------

MANY = 100_000
CACHES = [planner.plan, template._compiled, template._at]


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls plan, check and keep, and launch nothing."""
    monkeypatch.setattr(launch.Launches, "first", lambda *_: None)
    monkeypatch.setattr(call_cache, "LIMIT", 64)
    call_cache.clear()
    yield
    call_cache.clear()


def lists_and_dicts(module: Any) -> dict[str, int]:
    """Sizes of everything that a module keeps."""
    kept = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    sizes = {name: len(x) for name, x in kept.items() if isinstance(x, (dict, list, set, weakref.WeakSet))}
    sizes |= {name: x.cache_info().currsize for name, x in kept.items() if isinstance(x, functools._lru_cache_wrapper)}
    return sizes


def ours() -> dict[str, dict[str, int]]:
    return {n: lists_and_dicts(m) for n, m in sys.modules.items() if n.startswith("paged_attn") and m is not None}


def test_no_cache_of_ours_is_without_a_bound() -> None:
    """But those whose keys are few, or none: devices, dtypes, forms of boxes, the modules of Triton's language."""
    few = {"device_of", "dialect", "_why_unnamed", "_version", "_start", "_layout", "_cuda", "_primary"}
    few |= {"_interpreted", "_language"}
    for module in [m for n, m in sys.modules.items() if n.startswith("paged_attn") and m is not None]:
        for name, value in vars(module).items():
            if isinstance(value, functools._lru_cache_wrapper):
                assert name in few or value.cache_info().maxsize is not None, f"{module.__name__}.{name}"


def test_many_different_calls_keep_no_more_than_some(stubbed: None, device: str) -> None:
    """Signatures, guards, plans: of several hundred calls, as many stay as of twice as many."""
    k, v = torch.zeros(2, 4, 16, 2, 32, device=device)

    def call(number: int) -> None:
        q = torch.zeros(1, 4, 32, device=device)
        table, lens = (
            torch.zeros(1, 2, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
        )
        paged_attn.paged_attention(q, k, v, table, lens, max_seqlen_k=number, softmax_scale=0.1 + number)

    sizes = []
    for numbers in (range(1, 300), range(300, 600)):
        for number in numbers:
            call(number)
        sizes.append(
            {n: x for n, x in ours().items() if n in ("paged_attn.calls.call_cache", "paged_attn.launching.scratch")}
        )
    assert sizes[0] == sizes[1]
    assert len(call_cache._kept) == len(call_cache._latest or call_cache._kept) == 64
    assert planner.plan.cache_info().maxsize is not None


def test_a_hundred_thousand_signatures_keep_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    call_cache.clear()
    for number in range(MANY):
        call_cache.keep(((number,), ()), number)  # type: ignore[arg-type]
    assert len(call_cache._kept) == call_cache.LIMIT
    assert call_cache._kept[(MANY - 1,)] == MANY - 1
    assert (0,) not in call_cache._kept
    call_cache.clear()


def test_a_hundred_thousand_addresses_keep_descriptors_of_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit counts all launches together, and a descriptor in use stays."""
    monkeypatch.setattr(driver, "provide_context", lambda: None)
    monkeypatch.setattr(driver, "KNOWN_TO_ALL", 2000)
    monkeypatch.setattr(driver.Places, "encodings", 2000)  # whatever others keep is forgotten first
    everyone = [driver.Places(lambda address: [SimpleNamespace(address=address)]) for _ in range(200)]
    for address in range(MANY):
        _, box = everyone[address % 200][address]
        assert box.address == address
        if address % 997 == 0:
            assert sum(map(len, everyone)) <= 2000
    assert max(map(len, everyone)) <= driver.KNOWN
    gone = weakref.ref(everyone.pop())
    gc.collect()
    assert gone() is None


def test_descriptors_at_many_addresses_are_forgotten() -> None:
    forms = [AtAddress(SimpleNamespace(base=Hole(0))) for _ in range(10)]
    for address in range(MANY // 10):
        for form in forms:
            assert form(address).base.data_ptr() == address
    assert template._at.cache_info().currsize <= template._at.cache_info().maxsize


# ---- on a GPU ----------------------------------------------------------------------------------------------------


def inputs(device: str = "cuda", seqs: int = 8, keys: int = 4096) -> dict[str, Any]:
    """A decode whose keys are cut: it takes states and counters."""
    pages = keys // 16
    q = torch.randn(seqs, 32, 128, dtype=torch.bfloat16, device=device)
    k, v = torch.randn(2, seqs * pages, 16, 8, 128, dtype=torch.bfloat16, device=device)
    table = torch.arange(seqs * pages, dtype=torch.int32, device=device).view(seqs, pages)
    lens = torch.full((seqs,), keys, dtype=torch.int32, device=device)
    return dict(q=q, k_cache=k, v_cache=v, page_table=table, seq_lens=lens)


def close(out: torch.Tensor, given: dict[str, Any]) -> bool:
    want = reference.paged_attention(**given)
    return bool(((out.double() - want).abs() < 2e-2).all())


@pytest.mark.gpu
def test_a_hundred_streams_hold_the_memory_of_a_few() -> None:
    """Handles are torch's own, 32 by priority; all calls are right, though streams run beside each other."""
    given = inputs()
    torch.cuda.synchronize()
    assert close(paged_attn.paged_attention(**given), given)  # whose products have a workspace of their own from now on
    before, outs = torch.cuda.memory_allocated(), []
    for _ in range(2):
        for priority in (0, -1):
            for _ in range(50):
                stream = torch.cuda.Stream(priority=priority)
                with torch.cuda.stream(stream):
                    outs.append(paged_attn.paged_attention(**given))
    torch.cuda.synchronize()
    assert all(close(out, given) for out in outs[::7])
    held = sum(room.states_size + room.counters_size for room in scratch._rooms.values()) * 4
    assert len({place[1] for place in scratch._rooms}) <= scratch.MAX_ROOMS_PER_DEVICE
    assert torch.cuda.memory_allocated() - before <= held + sum(x.nbytes for x in outs) + (8 << 20)


@pytest.mark.gpu
def test_a_pool_of_the_users_is_not_kept() -> None:
    """A room in the user's pool would keep the pool, which then could never be given back."""
    given = inputs(seqs=3)
    scratch._rooms.clear()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        outs = [paged_attn.paged_attention(**given) for _ in range(3)]
    assert all(close(out, given) for out in outs)
    del outs
    torch.cuda.synchronize()
    live = [b for s in pool.snapshot() for b in s["blocks"] if b["state"] == "active_allocated"]
    assert live == []
    assert scratch._rooms


@pytest.mark.gpu
@pytest.mark.parametrize("own_out", [False, True], ids=["out made inside", "out given"])
def test_reduce_overhead_finds_no_memory_of_ours_in_its_graphs(own_out: bool) -> None:
    """Warm-up, capture and replays of torch's graph trees, with lengths changed in place; rooms are made in warm-up."""
    given = inputs(seqs=5)
    scratch._rooms.clear()
    call_cache.clear()

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, lens: torch.Tensor) -> Any:
        out = torch.empty_like(q) if own_out else None
        once = paged_attn.paged_attention(q * 1, k, v, table, lens, out=out)
        return paged_attn.paged_attention(once, k, v, table, lens) + 0

    compiled = torch.compile(layer, mode="reduce-overhead")
    with torch.no_grad():
        for number in range(8):
            torch.compiler.cudagraph_mark_step_begin()
            given["seq_lens"].copy_(torch.arange(5, device="cuda").to(torch.int32) * 700 + 1 + 90 * number)
            got = compiled(*given.values()).clone()
            want = layer(*given.values())
            assert torch.equal(got, want), number
    torch._dynamo.reset()


@pytest.mark.gpu
def test_captured_calls_on_a_stream_whose_room_was_dropped_replay_right() -> None:
    given = inputs()
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        paged_attn.paged_attention(**given)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph, stream=side):
        out = paged_attn.paged_attention(**given)
    for _ in range(2 * scratch.MAX_ROOMS_PER_DEVICE):
        stream = torch.cuda.Stream()
        for _ in range(2):
            with torch.cuda.stream(stream):
                paged_attn.paged_attention(**given)
    for keys in (4096, 17, 2000):
        given["seq_lens"].fill_(keys)
        graph.replay()
        torch.cuda.synchronize()
        assert close(out, given)
