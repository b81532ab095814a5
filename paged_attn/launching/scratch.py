"""Memory between the programs of one call: states of cut blocks, and counters of the pieces that have arrived.

A counter must be zero when a launch begins, and every launch leaves it at zero.  So it is zeroed once, and who may use
it at the same time is all that matters:
- eager calls on one stream follow one another, and share counters and states; two launches of one call that overlap
  have their own;
- a captured call has counters of its own for ever, since its graph may be replayed beside any other; its states come
  from the graph's memory pool.

What is kept is bounded: a few streams' rooms on each device, none of them large.  Others are made for each call.
"""

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import memory
from .locks import left_free

# Counters that an arena grows by: 4 MiB, some 7000 captured decodes of a device with 132 multiprocessors, 2600 of one
# or two KV heads (over fp8 1300), or 490 prefills whose blocks may be cut.
COUNTERS_PER_CHUNK = 1 << 20
OWN_ALIGNMENT = 512  # bytes; the copy engine wants 16, and lines of memory are 128
MAX_ROOMS_PER_DEVICE = 8  # that are kept: as many streams as may well be at work at the same time
# float32 of states in the rooms that are kept, 256 MiB: even shares of an H200 have a fortieth to a quarter of them.
MAX_STATES_PER_DEVICE = 1 << 26
MAX_STATES_PER_ROOM = MAX_STATES_PER_DEVICE // 2  # float32 of one call's states; more are not kept


class Need(NamedTuple):
    """Numbers of elements."""

    states: int  # float32; cuts, which are int32, among them
    counters: int  # int32, zero between launches
    two: bool = False  # launches, the second of which reads what the first has written


class Arena:
    """Zeroed counters of one device, each handed out once: nobody knows when a graph is replayed for the last time.

    It grows outside of capture only, where zeroing is no part of a graph.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.lock = device, left_free()
        self.chunks: list[Tensor] = []  # graphs know their addresses, so they stay
        self.left = 0  # counters of the last chunk that nobody has
        self.low = device.type == "cuda"  # whether the next eager call should let it grow

    def grow(self, least: int = COUNTERS_PER_CHUNK) -> None:
        """Add a chunk, zeroed before anybody can be handed a part of it."""
        (chunk,) = memory.kept(lambda: (self._zeroed(least),), self.device)
        with self.lock:
            self.chunks.append(chunk)
            self.left, self.low = least, False

    def _zeroed(self, count: int) -> Tensor:
        """So many zeros that are there: a graph may be replayed on another stream than this one."""
        chunk = torch.zeros(count, dtype=torch.int32, device=self.device)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return chunk

    def take(self, count: int) -> Tensor:
        """So many counters for a captured call; zeroed inside its graph if the arena has run out."""
        with self.lock:
            self.low = self.left < count + COUNTERS_PER_CHUNK // 2
            if count > self.left or not self.chunks:
                return torch.zeros(count, dtype=torch.int32, device=self.device)
            self.left -= count
            return self.chunks[-1][self.left : self.left + count]


class Room(NamedTuple):
    """What a launch writes to; whoever launches holds it until then."""

    states: Tensor | None
    counters: Tensor | None
    states_at: int = 0
    counters_at: int = 0
    states_size: int = 0
    counters_size: int = 0
    arena: Any = None  # the device's, of a room that eager calls share


class Own(NamedTuple):
    """What the launches of one call hand over to each other, side by side in memory that no other call knows."""

    likes: tuple[Tensor, ...]  # without memory
    begins: tuple[int, ...]  # bytes
    size: int


def side_by_side(likes: Sequence[Tensor]) -> Own:
    """Where each of some tensors lies."""
    ends = list(itertools.accumulate(-(-x.nbytes // OWN_ALIGNMENT) * OWN_ALIGNMENT for x in likes))
    return Own(tuple(likes), (0, *ends[:-1]), ends[-1])


def memory_of(own: Own, device: torch.device) -> Tensor:
    """Memory for one call, of the pool of what is captured, if anything is.

    Whoever is given it next on this stream comes behind this call's launches.
    """
    return _empty(own.size, torch.uint8, device)


def own(own: Own, device: torch.device) -> list[Tensor]:
    """The tensors, in memory for one call."""
    memory = memory_of(own, device)
    return [memory[begin : begin + x.nbytes].view(x.dtype).view(x.shape) for x, begin in zip(own.likes, own.begins)]


NONE = Room(None, None)
Place = tuple[int | None, int, int]  # device, stream and number
_rooms: dict[Place, Room] = {}  # what eager calls share
_turned_away: deque[Place] = deque(maxlen=MAX_ROOMS_PER_DEVICE)  # the latest calls for which no room was kept
_keeping = left_free()
_arenas: dict[torch.device, Arena] = {}


def take(need: Need, device: torch.device, stream: int, number: int = 0) -> Room:
    """Room for a launch on this stream of the device, which is the current one.

    number: launches that run at the same time have different ones.
    """
    if stream and torch.cuda.is_current_stream_capturing():  # the default stream, 0, cannot be captured
        return _room(_empty(need.states, torch.float32, device), arena(device).take(need.counters))
    place = device.index, stream, number
    room = _rooms.get(place)
    alone = need.two or need.states > MAX_STATES_PER_ROOM  # between two, another thread may use the same stream
    shared = 0 if alone else need.states
    if room is None or room.states_size < shared or room.counters_size < need.counters or room.arena.low:
        room = _make(place, room, shared, need.counters, device)
    if alone:
        states = _empty(need.states, torch.float32, device)
        return room._replace(states=states, states_at=states.data_ptr())
    return room


def arena(device: torch.device) -> Arena:
    """The counters of a device that captured calls take from."""
    return _arenas.get(device) or _arenas.setdefault(device, Arena(device))


def _make(place: Place, room: Room | None, states: int, counters: int, device: torch.device) -> Room:
    """Room for so many and all that came before, and an arena from which a call like this may be captured.

    Where all that may be kept are, a place has to ask twice within a few calls to have the oldest one's: otherwise a
    hundred streams in turn would have rooms made to be kept, which takes longer, and use none of them again.
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
    kept_states, kept_counters = memory.kept(lambda: _memory(*wanted, device), device)
    room = _room(kept_states, kept_counters, arena(device))
    with _keeping:
        _rooms.pop(place, None)
        others = _others(place)
        while _too_many(others, room.states_size):
            del _rooms[others.pop(0)]  # who is about to launch there holds it
        _rooms[place] = room
    return room


def _others(place: Place) -> list[Place]:
    """Whose rooms are kept on the same device, the oldest first."""
    return [x for x in _rooms if x[0] == place[0] and x != place]


def _too_many(others: list[Place], states: int) -> bool:
    """Whether one with so many states cannot be kept beside them."""
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
