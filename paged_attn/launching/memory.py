"""Memory that is kept from call to call, allocated apart from whatever the caller is in the midst of.

Around a call, torch may take memory from a pool that is not ours to keep: one that the user has put in use, or that of
a graph that torch.compile warms up.  It does so for the calling thread (torch 2.13), or for the current stream (as it
did); and modes of the calling thread may make other tensors of ours.  So another thread allocates, on another stream.
"""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread

import torch
from torch import Tensor

Make = Callable[[], tuple[Tensor, ...]]
_streams: dict[torch.device, torch.cuda.Stream] = {}


def kept(make: Make, device: torch.device) -> tuple[Tensor, ...]:
    """Tensors of a device, made apart by a function, for use on its current stream from now on."""
    if device.type != "cuda":
        return make()
    user = torch.cuda.current_stream(device)

    def work() -> tuple[Tensor, ...]:
        ours = _other_than(user, device)
        with torch.cuda.device(device), torch.cuda.stream(ours):
            tensors = make()
            user.wait_event(ours.record_event())
            for tensor in tensors:
                tensor.record_stream(user)  # once dropped, it is given to nobody until that stream's work is done
        return tensors

    return _in_a_thread(work)


def _other_than(user: torch.cuda.Stream, device: torch.device) -> torch.cuda.Stream:
    """A stream of ours: torch's are a few that it hands out in turn, so the user's may be the same."""
    stream = _streams.get(device) or _streams.setdefault(device, torch.cuda.Stream(device))
    while stream == user:
        stream = torch.cuda.Stream(device)
    return stream


def _in_a_thread(work: Make) -> tuple[Tensor, ...]:
    """What a function returns or raises in a thread of its own; in this one where Python is about to exit."""
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
