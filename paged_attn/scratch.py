"""Memory between the programs of one call: states of cut blocks, and counters of the pieces that have arrived.

A counter must be zero when a launch begins, and every launch leaves it at zero.  So it is zeroed once, and who may use
it at the same time is all that matters:
- eager calls on one stream follow one another, and share counters and states; two launches of one call that overlap
  have their own;
- a captured call has counters of its own for ever, since its graph may be replayed beside any other; its states come
  from the graph's memory pool.
"""

import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Counters that an arena grows by: 4 MiB, some 7000 captured decodes of a device with 132 multiprocessors, 2600 of one
# or two KV heads (over fp8 1300), or 490 prefills whose blocks may be cut.
CHUNK = 1 << 20


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
        self.device, self.lock = device, threading.Lock()
        self.chunks: list[Tensor] = []  # graphs know their addresses, so they stay
        self.left = 0  # counters of the last chunk that nobody has
        self.low = device.type == "cuda"  # whether the next eager call should let it grow

    def grow(self, least: int = CHUNK) -> None:
        """Add a chunk, zeroed before anybody can be handed a part of it."""
        chunk = torch.zeros(least, dtype=torch.int32, device=self.device)
        if self.device.type == "cuda":  # a graph may be replayed on another stream than this one
            torch.cuda.current_stream(self.device).synchronize()
        with self.lock:
            self.chunks.append(chunk)
            self.left, self.low = least, False

    def take(self, count: int) -> Tensor:
        """So many counters for a captured call; zeroed inside its graph if the arena has run out."""
        with self.lock:
            self.low = self.left < count + CHUNK // 2
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


NONE = Room(None, None)
_rooms: dict[tuple[int | None, int, int], Room] = {}  # by device, stream and number: what eager calls share
_arenas: dict[torch.device, Arena] = {}


def take(need: Need, device: torch.device, stream: int, number: int = 0) -> Room:
    """Room for a launch on this stream of the device, which is the current one.

    number: launches that run at the same time have different ones.
    """
    if stream and torch.cuda.is_current_stream_capturing():  # the default stream, 0, cannot be captured
        return _room(_empty(need.states, torch.float32, device), arena(device).take(need.counters))
    place = device.index, stream, number
    room = _rooms.get(place)
    shared = 0 if need.two else need.states
    if room is None or room.states_size < shared or room.counters_size < need.counters or room.arena.low:
        room = _rooms[place] = _grown(room or NONE, shared, need.counters, device)
    if need.two:  # between which another thread may use the same stream
        states = _empty(need.states, torch.float32, device)
        return room._replace(states=states, states_at=states.data_ptr())
    return room


def arena(device: torch.device) -> Arena:
    """The counters of a device that captured calls take from."""
    return _arenas.get(device) or _arenas.setdefault(device, Arena(device))


def _grown(room: Room, states: int, counters: int, device: torch.device) -> Room:
    """Room for so many and all that came before, and an arena from which a call like this may be captured."""
    if arena(device).low:
        arena(device).grow()
    zeros = torch.zeros(max(room.counters_size, counters), dtype=torch.int32, device=device)
    return _room(_empty(max(room.states_size, states), torch.float32, device), zeros, arena(device))


def _room(states: Tensor, counters: Tensor, arena: Arena | None = None) -> Room:
    return Room(states, counters, states.data_ptr(), counters.data_ptr(), states.numel(), counters.numel(), arena)


def _empty(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(count, dtype=dtype, device=device)
