"""Measured choices per architecture, and the rule for what was not measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from ..plan import Problem


class Config(NamedTuple):
    """Tile shape and compiler options of one launch."""

    rows: int  # query tokens x group
    tile: int  # keys per step
    stages: int
    warps: int
    peel: bool  # a loop without masks for the tiles that all rows see
    programs_per_multiprocessor: int  # what fills the device when keys can be split
    min_tiles: int  # the least share of a segment
    max_registers: int | None = None


# Shared memory that one program may use, bytes
_SHARED = {"sm80": 166912, "sm86": 101376, "sm89": 101376, "sm90": 232448, "sm100": 232448, "gfx942": 65536, "gfx950": 163840}


def decode_config(p: Problem) -> Config:
    """Few rows: memory decides, so small tiles and several programs per multiprocessor."""
    if p.device.arch == "interpreter":
        return Config(rows=16, tile=128, stages=1, warps=4, peel=False, programs_per_multiprocessor=1, min_tiles=4)
    return _fit(p, Config(rows=16, tile=64, stages=3, warps=4, peel=False, programs_per_multiprocessor=4, min_tiles=2))


def prefill_config(p: Problem) -> Config:
    """Many rows: arithmetic decides, so tiles as large as registers allow."""
    if p.device.arch == "interpreter":
        return Config(rows=128, tile=128, stages=1, warps=4, peel=True, programs_per_multiprocessor=1, min_tiles=4)
    if p.compute == torch.float32:
        return _fit(p, Config(rows=32, tile=32, stages=2, warps=4, peel=False, programs_per_multiprocessor=2, min_tiles=8))
    return _fit(p, Config(rows=128, tile=64, stages=3, warps=8, peel=True, programs_per_multiprocessor=2, min_tiles=8))


def _fit(p: Problem, config: Config) -> Config:
    """Fewer stages, then smaller tiles, until keys, values and queries fit shared memory."""
    itemsize = p.compute.itemsize
    dim = max(16, 1 << (p.head_dim - 1).bit_length())
    limit = _SHARED.get(p.device.arch, 65536)

    def need(c: Config) -> int:
        return dim * itemsize * (2 * c.tile * max(1, c.stages - 1) + c.rows) + c.rows * c.tile * itemsize

    while need(config) > limit and config.stages > 2:
        config = config._replace(stages=config.stages - 1)
    while need(config) > limit and config.tile > 16:
        config = config._replace(tile=config.tile // 2)
    return config
