"""Memory that is kept from call to call, allocated outside of any pool or mode that the caller has in use.

Around a call, torch may take memory from a pool that must not be kept: a pool of the user, or the pool of a graph that
torch.compile warms up.  A pool applies to the calling thread (torch 2.13) or to the current stream (earlier versions).
Modes of the calling thread may change how tensors are made.  So another thread allocates, on another stream.
"""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread

import torch
from torch import Tensor

Make = Callable[[], tuple[Tensor, ...]]
_streams: dict[torch.device, torch.cuda.Stream] = {}


def kept(make: Make, device: torch.device) -> tuple[Tensor, ...]:
    """Make tensors by a function in another thread and on another stream, for use on the device's current stream."""
    if device.type != "cuda":
        return make()
    user = torch.cuda.current_stream(device)

    def work() -> tuple[Tensor, ...]:
        ours = _other_than(user, device)
        with torch.cuda.device(device), torch.cuda.stream(ours):
            tensors = make()
            user.wait_event(ours.record_event())
            for tensor in tensors:
                tensor.record_stream(user)  # once dropped, its memory is reused only after that stream's work
        return tensors

    return _in_a_thread(work)


def _other_than(user: torch.cuda.Stream, device: torch.device) -> torch.cuda.Stream:
    """A stream that differs from the user's: torch hands out a few streams in turn, so a new one may be the same."""
    stream = _streams.get(device) or _streams.setdefault(device, torch.cuda.Stream(device))
    while stream == user:
        stream = torch.cuda.Stream(device)
    return stream


def _in_a_thread(work: Make) -> tuple[Tensor, ...]:
    """Call a function in a new thread and return or raise its outcome; in this thread if Python is about to exit."""
    future: Future[tuple[Tensor, ...]] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    thread = Thread(target=run, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no new threads at exit
        return work()
    thread.join()
    return future.result()
