"""Peers: ranks of one host exchange states in one launch, by stores in each other's memory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..checks.options import integer, number, refused
from ..launching.platform import INTERPRET, device_of
from . import groups, symmetric
from .packing import MAX_PROGRAMS, MAX_RANKS, Sizes

if TYPE_CHECKING:
    from ..launching.launch import Launches

PHASES = {"both": {}, "send": {"RECEIVE": False}, "receive": {"SEND": False}}


class Peers:
    """A group of ranks of one host whose devices reach each other's memory, for `distributed.merge`.

    Every rank of the group makes one Peers, with equal arguments, before it captures CUDA graphs.  All layers of a
    model use this Peers, on one stream.

    A merge is then one launch.  Each program stores rows in the memory of the ranks that return them, waits for the
    rows of other ranks, and joins.  Eager merges and replays of CUDA graphs may follow each other in any order that is
    equal on every rank.

    Collectives of the process group serve merges that do not fit.  A merge fits if its results are `head_dim` wide and
    a rank returns at most `max_tokens * heads` rows.  If ranks do not reach each other's memory, collectives serve
    every merge, and `why_not` has the reason.

    On each rank, Peers have 16 * world * max_tokens * heads * head_dim bytes of memory, with max_tokens * heads rounded
    up to a multiple of 4.

    Args:
        process_group: a torch.distributed process group or a DeviceMesh of one dimension.  None: all processes.
        max_tokens, heads: a merge fits if its query tokens times the query heads that a rank returns (`give` of
            merge) are at most max_tokens * heads.
        head_dim: width of results.
        timeout: seconds that a rank waits for another rank.  Rows that come later become NaN.  So do all rows of merges
            that are already launched, and all later replays of graphs.  Later calls raise RuntimeError.  The CUDA
            context stays usable.
        device: device of the results.  None: the current CUDA device, or the CPU if there is no CUDA device or kernels
            are interpreted.
    """

    def __init__(
        self,
        process_group: Any = None,
        *,
        max_tokens: int,
        heads: int,
        head_dim: int,
        timeout: float = 10.0,
        device: torch.device | str | None = None,
    ) -> None:
        for name, value in dict(max_tokens=max_tokens, heads=heads, head_dim=head_dim).items():
            integer(name, value, 1, "an int")
        number("timeout", timeout, "a number of seconds >= 0", 0)
        self.process_group = groups.process_group(process_group)
        self.rank, self.world = groups.rank_and_world(self.process_group)
        self.device = _device(device)
        self._size(max_tokens, heads, head_dim, timeout)
        if device_of(self.device).in_torch:
            shared: Any = "plain torch reaches no other rank's memory"
        else:
            shared = symmetric.share(self._count, self.device, self.process_group)
        self.why_not = shared if isinstance(shared, str) else None
        if not isinstance(shared, str):
            self._shared = shared
            self._begin(shared.own, shared.addresses)

    def _size(self, max_tokens: int, heads: int, head_dim: int, timeout: float) -> None:
        self.timeout, self._dims = timeout, head_dim
        self._room = -(-max_tokens * heads // 4) * 4  # rows that a rank may return, rounded up to a multiple of 4
        self._count = 2 * self.world * self._room * head_dim  # words of 64 bits
        if self.world > MAX_RANKS:
            raise refused("process_group", f"a group of at most {MAX_RANKS} ranks", self.world)
        if self._count >= 1 << 31:
            limit = "such that 2 * world * max_tokens * heads * head_dim < 2^31"
            raise refused("max_tokens", limit, f"{max_tokens} for {self.world} ranks")

    def _begin(self, own: Tensor, addresses: Sequence[int]) -> None:
        """Keep this rank's memory `own`, which holds zeros, and the addresses of all ranks' memory."""
        self._own = own
        self._addresses = tuple(addresses)
        # Entry p is the turn of program p: 0 in one call, 1 in the next, and so on.  The last entry is FAILED,
        # which becomes 1 when a rank does not answer.
        self._turns = torch.zeros(MAX_PROGRAMS + 1, dtype=torch.int32, device=own.device)
        self._process = os.getpid()
        self._word = torch.zeros(1, dtype=torch.int32, pin_memory=own.is_cuda)
        self._absent = ctypes.c_int32.from_address(self._word.data_ptr())
        self._launches: dict[Any, Launches] = {}
        self._compiled = dict(TIMED=not INTERPRET, DEPENDENT=device_of(own.device).dependent)

    @classmethod
    def of_one_process(
        cls, world: int, *, max_tokens: int, heads: int, head_dim: int, timeout: float = 10.0, device: Any = None
    ) -> list[Peers]:
        """Return a Peers for each of `world` ranks in one process on one device, for tests.

        The memory of each rank is a slice of one tensor.  In each merge, callers first call `exchange` of every rank
        with phase "send", then `exchange` of every rank with phase "receive".
        """
        made = []
        for rank in range(world):
            peers = cls.__new__(cls)
            peers.process_group, peers.rank, peers.world, peers.why_not = None, rank, world, None
            peers.device = _device(device)
            peers._size(max_tokens, heads, head_dim, timeout)
            made.append(peers)
        together = torch.zeros(world, made[0]._count, dtype=torch.int64, device=made[0].device)
        for peers, own in zip(made, together):
            peers._begin(own, [x.data_ptr() for x in together])
        return made

    def holds(self, sizes: Sizes) -> bool:
        """Whether a merge of these sizes fits into the shared memory.  If not, collectives serve it.

        Raises RuntimeError in a forked process, and if a rank did not answer an earlier merge, because then collectives
        would wait for it, too.
        """
        if self.why_not is not None:
            return False
        if self._process != os.getpid():
            raise RuntimeError("Peers do not survive a fork: make them in the process that uses them")
        if self._absent.value:
            raise RuntimeError(f"rank {self._absent.value - 1} did not answer within {self.timeout:g} s")
        return sizes.dims == self._dims and sizes.tokens * sizes.given <= self._room

    def exchange(
        self, out: Tensor, lse: Tensor, sinks: Tensor | None, into: Tensor, merged: Tensor | None, sizes: Sizes,
        phase: str = "both",
    ) -> None:  # fmt: skip
        """Join the results of all ranks, and write them to `into` [tokens, heads that a rank returns, dims].

        The merge has to fit (`holds`).
        Unless `merged` is None, joined log-sum-exps are written to it.  phase: "send" stores this rank's rows,
        "receive" waits for rows and joins them, "both" does both in one launch.
        """
        tensors = (into, merged, out, lse, sinks, self._turns)
        given = tuple([x for x in tensors if x is not None])
        key = (
            sizes,
            phase,
            *[(x.dtype, x.stride(), x.data_ptr() % 16) if x is not None else None for x in tensors[:5]],
        )
        launches = self._launches.get(key)
        if launches is not None and launches.kept is not None:
            launches.again([x.data_ptr() for x in given])
            return
        if launches is None:
            from . import steps  # needs Triton

            way = steps.Way(self._addresses, self.rank, self._room, self._word.data_ptr(), int(self.timeout * 1e9))
            more = self._compiled | PHASES[phase]
            launches = self._launches[key] = steps.launches_of(tensors, self.device, way, sizes, more)
        launches.first(given)


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        on_a_cpu = INTERPRET or not torch.cuda.is_available()
        device = "cpu" if on_a_cpu else torch.device("cuda", torch.cuda.current_device())
    found = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if found.type == "cuda" and found.index is None else found
