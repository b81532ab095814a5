"""Scratch memory that programs of one call share: states of cut blocks, and counters of arrived pieces and of items.

A counter must be zero when a launch begins, and every launch leaves its counters at zero.  So counters are zeroed once,
when they are allocated.  Launches that may run at the same time must not share counters or states:

- Eager calls on one stream follow one another, so they share counters and states.  Two overlapping launches of one
  call have different rooms.
- A captured call has its own counters for ever, because its graph may be replayed beside any other graph.  Its states
  come from the graph's memory pool.

A room is the states and counters of one stream, or of one of two launches that overlap on the stream.  Each device
keeps a few rooms of bounded size.  A call without a kept room gets new memory.
"""

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Thread
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .locks import left_free

# Counters that an arena grows by: 4 MiB.  On 132 multiprocessors this suffices for about
# - 7000 captured decodes, or 2600 with one or two KV heads (1300 in fp8),
# - 490 captured prefills whose blocks may be cut.
COUNTERS_PER_CHUNK = 1 << 20
OWN_ALIGNMENT = 512  # bytes; TMA needs 16, and cache lines have 128
MAX_ROOMS_PER_DEVICE = 8  # kept rooms, mostly one for each stream; more streams are rarely at work at the same time
# float32 elements of states in a device's kept rooms, 256 MiB.  A launch in even shares uses 1/40 to 1/4 of them on an
# H200.
MAX_STATES_PER_DEVICE = 1 << 26
MAX_STATES_PER_ROOM = MAX_STATES_PER_DEVICE // 2  # float32 elements of a launch's states; larger states are not kept


class Need(NamedTuple):
    """Scratch memory that a launch needs, in elements."""

    states: int  # elements of 4 bytes: float32 states, and int32 numbers that tell how blocks are cut
    counters: int  # int32, zero between launches
    two: bool = False  # two launches share the states: the second reads what the first has written


class Arena:
    """Zeroed counters of one device, each handed out once, because no replay of a graph is known to be the last.

    An arena grows only outside of capture, because zeroing during capture would become part of the graph.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.lock = device, left_free()
        self.chunks: list[Tensor] = []  # never freed, because graphs have addresses in these chunks
        self.left = 0  # counters of the last chunk that are not handed out
        self.low = device.type == "cuda"  # whether the next eager call should let the arena grow

    def grow(self, least: int = COUNTERS_PER_CHUNK) -> None:
        """Add a chunk of counters.  The chunk is zeroed before anybody can take a part of it."""
        (chunk,) = kept_memory(lambda: (self._zeroed(least),), self.device)
        with self.lock:
            self.chunks.append(chunk)
            self.left, self.low = least, False

    def _zeroed(self, count: int) -> Tensor:
        """Zeroed counters, after a sync: a graph may be replayed on another stream than this one."""
        chunk = torch.zeros(count, dtype=torch.int32, device=self.device)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return chunk

    def take(self, count: int) -> Tensor:
        """Take `count` counters for a captured call; if too few are left, new ones are zeroed inside the graph."""
        with self.lock:
            self.low = self.left < count + COUNTERS_PER_CHUNK // 2
            if count > self.left or not self.chunks:
                return torch.zeros(count, dtype=torch.int32, device=self.device)
            self.left -= count
            return self.chunks[-1][self.left : self.left + count]


class Room(NamedTuple):
    """Scratch memory that a launch writes to.  The caller holds the room until the launch is made."""

    states: Tensor | None
    counters: Tensor | None
    states_at: int = 0
    counters_at: int = 0
    states_size: int = 0
    counters_size: int = 0
    arena: Any = None  # the device's arena; None in a captured call's room


class Own(NamedTuple):
    """Offsets, in one allocation, of tensors with which launches of a call hand results to later launches."""

    likes: tuple[Tensor, ...]  # meta tensors
    begins: tuple[int, ...]  # offset of each tensor, bytes
    size: int  # bytes of the allocation


def side_by_side(likes: Sequence[Tensor]) -> Own:
    """Place tensors one after the other, each at a multiple of OWN_ALIGNMENT."""
    ends = list(itertools.accumulate(-(-x.nbytes // OWN_ALIGNMENT) * OWN_ALIGNMENT for x in likes))
    return Own(tuple(likes), (0, *ends[:-1]), ends[-1])


def memory_of(own: Own, device: torch.device) -> Tensor:
    """Memory for one call, from the graph's pool during capture.

    Once the memory is freed, torch reuses it only for later work on this stream, which runs after this call's launches.
    """
    return _empty(own.size, torch.uint8, device)


def own(own: Own, device: torch.device) -> list[Tensor]:
    """The tensors of `own`, in new memory for one call."""
    memory = memory_of(own, device)
    return [memory[begin : begin + x.nbytes].view(x.dtype).view(x.shape) for x, begin in zip(own.likes, own.begins)]


Make = Callable[[], tuple[Tensor, ...]]
NONE = Room(None, None)
Place = tuple[int | None, int, int]  # device, stream and number
_rooms: dict[Place, Room] = {}  # kept rooms, which eager calls share
_turned_away: deque[Place] = deque(maxlen=MAX_ROOMS_PER_DEVICE)  # latest places for which no room was kept
_keeping = left_free()
_other_streams: dict[torch.device, torch.cuda.Stream] = {}  # for `kept_memory`
_arenas: dict[torch.device, Arena] = {}


def take(need: Need, device: torch.device, stream: int, number: int = 0) -> Room:
    """Return the room of a launch on this stream of the current device.

    number: launches that run at the same time have different numbers.
    """
    if stream and torch.cuda.is_current_stream_capturing():  # the default stream, 0, cannot be captured
        return _room(_empty(need.states, torch.float32, device), arena(device).take(need.counters))
    place = device.index, stream, number
    room = _rooms.get(place)
    alone = need.two or need.states > MAX_STATES_PER_ROOM  # two: another thread may use the stream between the launches
    shared = 0 if alone else need.states
    if room is None or room.states_size < shared or room.counters_size < need.counters or room.arena.low:
        room = _make(place, room, shared, need.counters, device)
    if alone:
        states = _empty(need.states, torch.float32, device)
        return room._replace(states=states, states_at=states.data_ptr())
    return room


def arena(device: torch.device) -> Arena:
    """The counters of a device from which captured calls take theirs."""
    return _arenas.get(device) or _arenas.setdefault(device, Arena(device))


def _make(place: Place, room: Room | None, states: int, counters: int, device: torch.device) -> Room:
    """Make a room of at least these sizes; a kept room is also at least as large as the place's old room.

    An arena that runs low grows first, so that later captures find counters.

    If the device's kept rooms are at their limit, a place first gets a room that is not kept.  If the place asks again
    within a few calls, its room is kept, and the oldest rooms are dropped.  A hundred streams in turn thus make no
    kept rooms, which take longer to make and would not be used again.
    """
    if arena(device).low:
        arena(device).grow()
    with _keeping:
        keep = place in _turned_away or not _too_many(_others(place), states)
        if not keep:
            _turned_away.append(place)
    if not keep:
        return _room(*_memory(states, counters, device), arena(device))
    had = room or NONE
    wanted = max(had.states_size, states), max(had.counters_size, counters)
    kept_states, kept_counters = kept_memory(lambda: _memory(*wanted, device), device)
    room = _room(kept_states, kept_counters, arena(device))
    with _keeping:
        _rooms.pop(place, None)
        others = _others(place)
        while _too_many(others, room.states_size):
            del _rooms[others.pop(0)]  # a thread that is about to launch there holds the room
        _rooms[place] = room
    return room


def _others(place: Place) -> list[Place]:
    """Other places whose rooms the device keeps, the oldest first."""
    return [x for x in _rooms if x[0] == place[0] and x != place]


def _too_many(others: list[Place], states: int) -> bool:
    """Whether a room with `states` elements cannot be kept beside the rooms of the places `others`."""
    return len(others) >= MAX_ROOMS_PER_DEVICE or (
        bool(others) and states + sum(_rooms[x].states_size for x in others) > MAX_STATES_PER_DEVICE
    )


def _memory(states: int, counters: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """States, and counters that are zero."""
    return _empty(states, torch.float32, device), torch.zeros(counters, dtype=torch.int32, device=device)


def _room(states: Tensor, counters: Tensor, arena: Arena | None = None) -> Room:
    return Room(states, counters, states.data_ptr(), counters.data_ptr(), states.numel(), counters.numel(), arena)


def _empty(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(count, dtype=dtype, device=device)


# ---- kept memory ---------------------------------------------------------------------------------

# During a call, torch may allocate from a special pool: a pool of the user, or the pool of a graph that torch.compile
# warms up.  Kept memory must not come from a special pool.  Such a pool applies to the calling thread (torch 2.13) or
# to the current stream (earlier versions).  Modes of the calling thread may change how tensors are made.  So another
# thread allocates, on another stream.


def kept_memory(make: Make, device: torch.device) -> tuple[Tensor, ...]:
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
    stream = _other_streams.get(device) or _other_streams.setdefault(device, torch.cuda.Stream(device))
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
