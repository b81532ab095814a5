"""Tile shapes of the portable kernels, measured on Hopper, and `fit`, which reduces them to fit shared memory."""

from __future__ import annotations

from typing import Annotated

import torch

from ...records.formats import INT4, next_power_of_2
from ...records.plan import Config, Threshold
from ...records.problem import Problem

KEYS_PER_PIECE: Annotated[
    int,
    Threshold(
        "keys of a piece where results must not depend on the batch",
        "one sequence of 32768 keys has enough pieces for every multiprocessor, and merging the pieces of 131072 keys "
        "takes a twentieth of the time of reading them",
        "decode b1 x 32768 1.30x of the default mode, b64 1.07x",
    ),
] = 1024
PIECES_OF_SHORT_BLOCKS: Annotated[
    int,
    Threshold(
        "pieces of a block of few tiles",
        "a tile takes a program about 1 us; joining a block of up to 8 or 16 pieces takes 4 us",
        "portable b1 x 512: 8 pieces 11.2 us, 4 pieces 12.0, 2 pieces 13.9, uncut 13.4; b1 x 2048: 8 pieces 14.9, "
        "16 pieces 14.6, 32 pieces 17.2",
    ),
] = 8
MAX_KEYS_OF_WHOLE_BLOCKS: Annotated[
    int,
    Threshold(
        "keys",
        "cutting and joining takes as long as a program needs to read so few keys",
        "portable 8 x 512: cut 15.8 us, uncut 14.1; 16 x 512 19.4, 15.8; 64 x 512 45.1, 41.9; but 4 x 512 13.4, 13.7",
    ),
] = 512
# Maximum bytes of scratch for the states of a launch's pieces.
MAX_SCRATCH_BYTES = 1 << 28

# Dims of a head beyond which a state is divided among twice the threads, and blocks have fewer rows.  A state of 512
# dims takes twice the registers of one of 256.
WIDE = 256
WIDE_ROWS, FEW_WIDE_ROWS = 64, 32

# Shared memory that one program may use, bytes
SHARED_MEMORY = {
    "sm80": 166912,
    "sm86": 101376,
    "sm89": 101376,
    "sm90": 232448,
    "sm100": 232448,
    "gfx942": 65536,
    "gfx950": 163840,
}


def decode_config(p: Problem) -> Config:
    """Config of few rows: memory decides, so tiles are small, and a multiprocessor has several programs."""
    if p.device.arch == "interpreter":
        return Config(rows=16, tile=128, stages=1, warps=4, peel=False, resident=1)
    # x-packed values: a dim's slots are contiguous, so loads go along the slots.  Only the peeled loop has no mask of
    # slots, so that these loads are wide and pipelined.
    if p.packed:
        return Config(rows=16, tile=32, stages=3, warps=8 if p.widest > WIDE else 4, peel=True, resident=2)
    if p.latent and p.widest > WIDE:
        return latent_config(p, 16)
    if p.widest > WIDE:
        return Config(rows=16, tile=32, stages=3, warps=8, peel=False, resident=2)
    if p.qq_bias or p.compute == torch.float32 or p.widest > 128:
        return Config(rows=16, tile=32, stages=3, warps=4, peel=False, resident=2)
    return Config(
        rows=16, tile=64, stages=3, warps=4, peel=False, resident=2, least=4,
        pieces=PIECES_OF_SHORT_BLOCKS, whole=MAX_KEYS_OF_WHOLE_BLOCKS,
    )  # fmt: skip


def latent_config(p: Problem, rows: int) -> Config:
    """Config of wide latents with blocks of `rows` rows.

    Every warp reads the queries from shared memory for each tile, so few rows get few warps.  A warpgroup's product
    (wgmma) has 64 rows, and is worth its cost only with tiles of at least 64 keys.
    """
    if p.compute == torch.float32:
        return Config(rows=rows, tile=32, stages=2, warps=8, peel=False, resident=1)
    if rows > FEW_WIDE_ROWS:
        return Config(rows=rows, tile=64, stages=2, warps=8, peel=False, resident=1)
    warps = 4 if rows <= 16 or p.cache.itemsize > 1 else 8
    return Config(rows=rows, tile=32, stages=3, warps=warps, peel=False, resident=2)


def prefill_config(p: Problem) -> Config:
    """Config of many rows: arithmetic decides, so tiles are as large as registers allow."""
    if p.device.arch == "interpreter":
        return Config(rows=128, tile=128, stages=1, warps=4, peel=True, resident=1)
    config = Config(rows=128, tile=64, stages=3, warps=8, peel=True, resident=1, enough=1)
    if p.compute == torch.float32:
        config = config._replace(rows=16, tile=32, stages=2, warps=4, peel=False, resident=2)
        return config if p.widest <= 128 else config._replace(warps=8)
    if (
        p.cache.itemsize == 1 and p.device.capability < 89 and not (p.latent and p.widest > WIDE)
    ):  # before sm_89, decoding bytes takes more instructions and registers
        return config._replace(rows=64, tile=32, peel=False)
    if p.widest > WIDE:
        if p.latent and most_rows(p) == WIDE_ROWS:
            return config._replace(rows=WIDE_ROWS, tile=64, stages=2)
        return config._replace(rows=most_rows(p), tile=32)
    if p.widest > 128:
        if p.cache == INT4:  # a loop of its own for unmasked tiles would spill
            return config._replace(rows=64, peel=False)
        return config._replace(tile=32)
    if p.qq_bias:
        return config._replace(tile=32)
    if p.packed or p.rescaled or p.slot_scales or p.page_size % 8 or p.device.capability != 90:
        return config
    return config._replace(tile=128, boxes=p.page_size % 128 == 0 and p.boxable)


def of_rows(p: Problem, config: Config, rows: int) -> Config:
    """Return the config for blocks of `rows` rows; more than 64 rows, as large groups have, need eight warps."""
    if p.latent and p.widest > WIDE and p.device.arch != "interpreter" and not (config.peel or config.piece):
        return latent_config(p, rows)
    if rows > config.rows:
        config = config._replace(pieces=0, whole=0)
    if rows <= 64 or config.warps >= 8:
        return config._replace(rows=rows)
    return config._replace(rows=rows, warps=8, resident=1)


def pair_config(p: Problem, config: Config) -> Config:
    """Return the config that reads fp8, int8 and int4 keys and values two bytes at a time, if rows are few.

    Tiles then take fewer bytes of shared memory, so a multiprocessor can hold more programs.
    """
    if not p.pairable or config.rows >= 64 or (p.latent and (p.value_width % 2 or p.value_width <= 16)):
        return config
    config = config._replace(pairs=True)
    if p.cache == INT4:
        return int4_config(p, config)
    if p.device.capability < 89:
        return config
    if config.rows > 16:
        return config._replace(tile=128) if config.tile == 64 else config
    if p.widest > WIDE:
        return config
    if p.rescaled or p.widest > 128 or p.slot_scales:
        return config._replace(resident=3, registers=168)
    return config._replace(resident=4, registers=128)


def int4_config(p: Problem, config: Config) -> Config:
    """Return the config of blocks with few rows over int4.  The dims are four parts, and each product has one part.

    If a part of the values has no more dims than the block has rows, Triton gives each warp 16 rows and all keys.  More
    than rows / 16 warps would repeat work.  Blocks with a qq_bias have twice the warps, for registers.
    """
    if p.widest > WIDE:
        return config
    if config.rows < padded_dims(p)[1] // 4:
        few = p.widest <= 128 and p.device.converts_fp8
        return config._replace(tile=64, resident=3, registers=168 if few else None)
    warps = config.rows // 16
    tile = 64 if warps == 1 else 32
    return config._replace(warps=warps * (2 if p.qq_bias else 1), tile=tile, resident=8 // warps)


def split_config(p: Problem, config: Config) -> Config:
    """Return the config for a launch with cut keys: code for whole blocks and for pieces must fit the registers."""
    tile = config.tile if config.pairs else min(config.tile, 64)
    if p.cache == INT4 and config.rows >= 64:
        tile = 32
    return config._replace(tile=tile, peel=p.packed, boxes=False)


def invariant_config(p: Problem) -> Config:
    """Config of batch-invariant calls: decodes and prefills use the same instructions, and add in the same order.

    On sm90 the product of a warpgroup has 64 rows, and a decode, which waits for memory, has time for all of them.
    """
    by_hand = p.cache.itemsize == 1 and p.device.capability < 89
    config = Config(rows=64, tile=64, stages=3, warps=4, peel=False, resident=2, enough=2, piece=KEYS_PER_PIECE)
    if p.device.arch == "interpreter":
        config = config._replace(stages=1, resident=1)
    elif p.compute == torch.float32:
        config = config._replace(rows=16, tile=32)
    elif p.packed or p.qq_bias or p.widest > 128 or p.cache == INT4 or by_hand:
        config = config._replace(tile=32)
    if p.widest > 128:
        config = config._replace(warps=8)
    if p.widest > WIDE:  # registers hold two states: of a piece, and of all pieces before it
        config = config._replace(rows=min(config.rows, FEW_WIDE_ROWS))
    return config._replace(least=KEYS_PER_PIECE // config.tile)


def padded_dims(p: Problem) -> tuple[int, int, int | None]:
    """(padded dims of keys, without a latent's rest; padded dims of values; padded rest, None if not latent)."""
    least = 64 if p.cache == INT4 else 16  # a dot needs 16 dims, and int4 has four parts
    value_dim = max(least, next_power_of_2(p.value_width))
    if not p.latent:
        return max(least, next_power_of_2(p.head_dim)), value_dim, None
    rest = p.head_dim - p.value_width
    return value_dim, value_dim, max(32, next_power_of_2(rest)) if rest else 0  # a dot needs 16, or 32 in pairs


def head_blocks(p: Problem) -> int:
    """Number of equal parts of the query heads on a latent cache's KV head, each of up to `most_rows` heads.

    1: the heads are not divided.  Only heads on wide latents with a single KV head are ever divided.
    """
    group = p.heads // p.kv_heads
    if p.kv_heads > 1 or group <= most_rows(p) or p.widest <= WIDE or not p.latent:
        return 1
    return next(parts for parts in range(2, group + 1) if group % parts == 0 and group // parts <= most_rows(p))


def most_rows(p: Problem) -> int:
    """Maximum rows of a block of wide heads, as registers allow: 64, with exceptions.

    16 rows: latents in products of float32, and all latents on GPUs older than sm_80 or not NVIDIA's.  Blocks over
    fp8 and int8 latents have 16 rows also on GPUs older than sm_89.

    32 rows: other batch-invariant calls, because they hold two states, and other fp8 and int8 latents.  Latents of 16
    bits have 32 rows, too, except on sm_90, where products read shared memory.
    """
    by_hand = p.cache.itemsize == 1 and p.device.capability < 89
    if p.latent and (p.compute == torch.float32 or p.device.capability < 80 or by_hand):
        return 16
    few = p.batch_invariant or (p.latent and (p.cache.itemsize == 1 or p.device.capability != 90))
    return FEW_WIDE_ROWS if few else WIDE_ROWS


def fit(p: Problem, config: Config) -> Config:
    """Return the config with fewer stages, then smaller tiles, then fewer resident programs, to fit shared memory.

    Wide heads get a single stage if they do not fit otherwise.
    """
    dim, value_dim, rest = padded_dims(p)
    row_bytes = (dim + (rest or 0)) * p.compute.itemsize
    stored_dims = dim + value_dim if rest is None else dim + rest
    stored_bytes = stored_dims * (p.cache.itemsize if config.pairs and not p.new else p.compute.itemsize)
    limit = SHARED_MEMORY.get(p.device.arch, 65536)
    # products of 64 rows or more on Hopper and Blackwell read tiles from shared memory; for all others, one of the
    # stages is in registers
    from_shared = p.device.capability in (90, 100) and config.rows >= 64
    # wide x-packed float32 values are transposed through shared memory, and no stage is in registers
    turned = p.packed and p.compute == torch.float32 and p.widest >= WIDE
    all_stages = from_shared or turned

    def need(c: Config) -> int:
        buffers = c.stages if all_stages else c.stages - 1
        # float32 operands of tensor cores pass through shared memory again, split in two
        extra = c.tile + c.rows if p.compute == torch.float32 else 0
        # Weights and transposed x-packed values pass through shared memory.  They count for wide heads only: tiles of
        # narrower heads leave room for them.
        passing = (c.rows + value_dim * (p.packed and not from_shared)) * c.tile * p.compute.itemsize
        # if bytes are read in pairs, products of many rows read a decoded tile, which needs room beside the stages
        decoded = stored_dims * p.compute.itemsize * c.tile * (c.pairs and from_shared)
        passing = passing * (p.widest > WIDE or turned) + decoded
        return stored_bytes * c.tile * buffers + row_bytes * (c.rows + extra) + passing

    while need(config) > limit and config.stages > 2:
        config = config._replace(stages=config.stages - 1)
    while need(config) > limit and config.tile > 16:
        config = config._replace(tile=config.tile // 2)
    if need(config) > limit and p.widest > WIDE:
        config = config._replace(stages=1)
    return config._replace(resident=max(1, min(config.resident, limit // need(config))))
