"""Records of the Hopper kernels; those of the portable ones travel along unchanged."""

from typing import Any, NamedTuple


class Pipe(NamedTuple):
    """How a kernel's warps share the work: compile-time."""

    CONSUMERS: int  # warpgroups of 64 rows
    KEY_STAGES: int  # slots of the two rings
    VALUE_STAGES: int
    LOADERS: int  # warps per ring: each loads its part of every tile
    BOX: int  # keys that one message of the copy engine brings
    ROWS_PER_PAGE: Any  # the caches as the copy engine sees them: rows of one slot's stride
    OUT_BOX: bool  # full blocks leave through shared memory and the copy engine


class Ring(NamedTuple):
    """Slots of shared memory that loaders fill and consumers empty, with a barrier of each kind for every slot."""

    slots: Any  # [STAGES, TILE, 1, DIM]
    full: Any  # [STAGES, 1]
    empty: Any


class Turn(NamedTuple):
    """Where in a ring a loader or consumer is."""

    stage: Any
    phase: Any  # parity of the rounds made


class Queries(NamedTuple):
    """A block's queries in shared memory, and the results on their way out."""

    slots: Any  # [CONSUMERS, tokens, GROUP, DIM]
    full: Any  # [CONSUMERS, 1]
    empty: Any
    out: Any  # like slots, if results leave as boxes


class Mail(NamedTuple):
    """Two letters by which the scheduling warp hands out items."""

    letters: Any  # int32 [2 * FIELDS, 1]
    full: Any  # [2, 1]
    empty: Any


class Item(NamedTuple):
    """One piece of one block of queries x one KV head."""

    block: Any  # Block
    kv_head: Any  # -1: no more work
    begin: Any  # tiles [begin, end)
    end: Any
    piece: Any
    pieces: Any  # of the block; 1: not cut
    slot: Any  # of the first piece's state


class Jobs(NamedTuple):
    """What a partition needs to know its work."""

    mail: Any
    counter: Any  # int32 [2]: items taken, programs done; zero before and after every launch
    batch: Any  # Batch
    mods: Any  # Modifiers


class Results(NamedTuple):
    """Where results go, beside `out`: its compile-time field would not survive in a record that a kernel builds."""

    lse: Any
    partial: Any  # Partial
    box: Any  # the output as the copy engine sees it; None: registers write it
    scales: Any  # Scales
