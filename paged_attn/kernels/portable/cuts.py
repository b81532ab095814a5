"""How the portable kernel cuts a batch whose lengths are known."""

from ...records.plan import Launch
from ..cuts import CutSummary, KnownBatch, blocks_of, counted, even_shares, whole


def cut(launch: Launch, batch: KnownBatch) -> CutSummary:
    """What the launch's programs will find to do: even shares of each KV head, or a program for each block."""
    blocks = list(blocks_of(launch, batch))
    if not launch.shape.SPLIT:
        return whole(launch, batch, blocks)
    return counted(launch, batch, blocks, "shares", *even_shares(launch, blocks, launch.programs, launch.slots))
