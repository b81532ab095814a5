"""Calls from any thread, first or later: one at a time where Triton can do no more, in a context of CUDA's."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import paged_attn
from paged_attn import reference
from paged_attn.launching import driver, launch, locks, scratch
from tests.support.own_process import run

THREADS = 4


def in_threads(work: Callable[[int], Any], count: int = THREADS) -> list[Any]:
    """What each of some threads returns, all of which begin at once; raises what one of them raised."""
    together, results = threading.Barrier(count), [None] * count
    errors: list[BaseException] = []

    def one(number: int) -> None:
        together.wait()
        try:
            results[number] = work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def error_of(seed: int, device: str, dtype: torch.dtype = torch.float32, dim: int = 32) -> float:
    """Error of a write, a call and a merge of the call's parts, with shapes by the seed."""
    rng = torch.Generator(device).manual_seed(seed)
    seqs = 2 + seed

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, device=device).to(dtype)

    q, new = normal(seqs, 4, dim), normal(seqs, 2, dim)
    k, v = normal(2, 2 * seqs, 16, 2, dim)
    table = torch.arange(2 * seqs, dtype=torch.int32, device=device).view(seqs, 2)
    lens = torch.full((seqs,), 20 + seed % 12, dtype=torch.int32, device=device)  # up to two pages
    slots = table[:, 1].long() * 16 + 3 + seed % 12
    paged_attn.write_kv(new, new, k, v, slots)
    assert torch.equal(k.view(-1, 2, dim)[slots], new)
    out, lse = paged_attn.paged_attention(q, k, v, table, lens, return_lse=True)
    want = reference.paged_attention(q, k, v, table, lens)
    joined, _ = paged_attn.merge_states(torch.stack([out, out]), torch.stack([lse, lse]))
    return max(float((x.double() - want).abs().max()) for x in (out, joined))


def test_threads_give_right_results(device: str) -> None:
    for _ in range(2):  # first calls, and later ones
        assert max(in_threads(lambda number: error_of(number, device))) < 1e-4


@pytest.mark.skipif(torch.cuda.is_available(), reason="of the interpreter")
def test_first_calls_of_a_process_may_be_several_threads() -> None:
    """Several threads import modules, and find kernels and Triton's language like a single thread."""
    run(
        "import threading, torch, paged_attn\nerrors = []\n"
        f"threads = [threading.Thread(target=lambda i=i: errors.append(call(i))) for i in range({THREADS})]\n"
        "[x.start() for x in threads]\n[x.join() for x in threads]\n"
        f"assert len(errors) == {THREADS} and max(errors) < 1e-5, errors"
    )


def test_two_threads_compile_one_after_the_other_and_launch_without_a_lock() -> None:
    """A launch may wait for room in the queue, which another thread's first call may have to make."""
    inside, most, launched = [0], [0], threading.Barrier(2)

    class Kernel:
        def warmup(self, *args: Any, grid: Any) -> Any:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            for _ in range(1000):
                threading.Event().wait(0)
            inside[0] -= 1

        def __getitem__(self, grid: Any) -> Any:
            return lambda *args: launched.wait()  # for the other thread's launch

    kernel = Kernel()
    in_threads(lambda _: launch.run(kernel, (1,)), 2)
    assert most == [1]


def test_code_is_loaded_by_the_thread_that_compiles() -> None:
    """Triton would load it at the first launch, and to a second thread show what is half loaded."""
    owned: list[bool] = []

    class Compiled:
        def _init_handles(self) -> None:
            owned.append(locks.FIRST._is_owned())  # type: ignore[attr-defined]

    class Kernel:
        def warmup(self, *args: Any, grid: Any) -> Any:
            return Compiled()

        def __getitem__(self, grid: Any) -> Any:
            return lambda *args: owned.append(locks.FIRST._is_owned())  # type: ignore[attr-defined]

    launch.run(Kernel(), (1,))
    assert owned == [True, False]


# ---- contexts ----------------------------------------------------------------------------------------------------


class Cuda:
    """Stands in for the driver: contexts by thread."""

    def __init__(self) -> None:
        self.now: dict[int, int] = {}
        self.retained: list[int] = []

    def cuCtxGetCurrent(self, into: Any) -> int:
        into._obj.value = self.now.get(threading.get_ident())
        return 0

    def cuDeviceGet(self, into: Any, index: int) -> int:
        into._obj.value = index + 10
        return 0

    def cuDevicePrimaryCtxRetain(self, into: Any, device: ctypes.c_int) -> int:
        self.retained.append(device.value)
        into._obj.value = 1000 + device.value
        return 0

    def cuCtxSetCurrent(self, context: ctypes.c_void_p) -> int:
        self.now[threading.get_ident()] = context.value or 0
        return 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A driver, and 3 as the current device."""
    stands_in = Cuda()
    monkeypatch.setattr(driver, "_cuda", lambda: stands_in)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    driver._primary.cache_clear()
    yield stands_in
    driver._primary.cache_clear()


def test_a_thread_without_a_context_gets_its_devices(cuda: Cuda) -> None:
    def work(_: int) -> int:
        driver.provide_context()
        return cuda.now[threading.get_ident()]

    assert in_threads(work) == [1013] * THREADS
    assert set(cuda.retained) == {13}


def test_a_context_that_is_there_stays(cuda: Cuda) -> None:
    cuda.now[threading.get_ident()] = 5
    driver.provide_context()
    assert cuda.now == {threading.get_ident(): 5}
    assert not cuda.retained


def test_a_descriptor_is_encoded_in_a_context(cuda: Cuda) -> None:
    boxes = driver.Places(lambda _: [object(), cuda.now.get(threading.get_ident())])
    in_threads(lambda number: boxes[number])
    assert len(cuda.now) == THREADS
    assert len(boxes) == THREADS


def test_what_a_thread_of_ours_raises_is_raised_here() -> None:
    def work() -> tuple[torch.Tensor, ...]:
        raise MemoryError("of the device")

    with pytest.raises(MemoryError, match="of the device"):
        scratch._in_a_thread(work)


# ---- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_new_threads_call_on_the_default_stream() -> None:
    """16-bit queries and caches, which the copy engine reads: a descriptor is encoded in a thread without a context."""
    for _ in range(3):  # every time by new threads
        found = in_threads(lambda number: [error_of(number + 8 * x, "cuda", torch.bfloat16, 128) for x in range(8)], 8)
        assert max(max(errors) for errors in found) < 2e-2


@pytest.mark.gpu
def test_new_threads_call_on_streams_of_their_own() -> None:
    def work(number: int) -> float:
        with torch.cuda.stream(torch.cuda.Stream()):
            return max(error_of(number + 8 * x, "cuda", torch.float16, 128) for x in range(8))

    assert max(in_threads(work, 8)) < 1e-2
