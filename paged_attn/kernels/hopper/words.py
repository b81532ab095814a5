"""Words of `explain` about a launch of the Hopper kernels."""

from typing import Any

from ...records.plan import Launch
from ..portable.dialect import size_of, some, words_of_pieces


def warps_of(launch: Launch) -> int:
    """Warps of a program that serve this launch, without those of a launch beside it."""
    pipe = launch.pipe
    return pipe.CONSUMERS * pipe.ROWS // 16 + 4 * (pipe.CONVERT > 0) + _loading(pipe)


def _loading(pipe: Any) -> int:
    """Loader warps of a program."""
    return pipe.LOADERS * (1 if pipe.BRIEF or pipe.VALUE_STAGES == 0 else 2)


def tiles_of(launch: Launch) -> str:
    """Describe a program's rings, warps and rows."""
    pipe = launch.pipe
    rings = f"rings of {pipe.KEY_STAGES} and {pipe.VALUE_STAGES} tiles"
    if launch.shape.REST is not None:
        rings = f"a ring of {pipe.KEY_STAGES} {'halves of ' * pipe.HALVES}tiles of keys that hold their values"
        rings += f" beside {pipe.VALUE_STAGES} of the {launch.shape.REST} dims behind these" * (launch.shape.REST > 0)
    elif pipe.VALUE_STAGES == 0:
        rings = f"a ring of {pipe.KEY_STAGES} slots that tiles of keys and of values take in turn"
    if pipe.CONVERT:
        rings += f" behind {pipe.RAW_STAGES} of fp8, products of {'fp8' if pipe.FP8_PRODUCTS else 'float16'}"
        rings += " by coarse weights (no log-sum-exps)" * pipe.COARSE
        if pipe.FP8_KEYS and not pipe.FP8_PRODUCTS:
            rings += " but for keys, of fp8 by queries in two parts (no log-sum-exps)"
    elif pipe.FP8:
        rings += f" of {'x-packed ' * pipe.PACKED}fp8, products of float16"
    elif pipe.PACKED:
        rings += " of an x-packed cache" + ", products from registers" * pipe.SHARES
    loaders = "1 that loads" if _loading(pipe) == 1 else f"{_loading(pipe)} that load"
    warps = f"{some(pipe.CONSUMERS, 'consumer', 'consumers')} of {pipe.ROWS // 16} warps, {loaders}"
    brought = f"boxes of {pipe.BOX} keys"
    brought += f", of values dims from {pipe.FROM_DIM} on" * (pipe.FROM_DIM > 0)
    parts = [rings, brought, warps] + ["4 that convert"] * bool(pipe.CONVERT)
    parts += [f"up to {pipe.COLUMNS} rows as columns"] * (pipe.COLUMNS > 0 and not pipe.SHARES)
    parts += ["tanh by one instruction, since no log-sum-exps are asked for"] * pipe.TANH
    parts += [f"tanh of small scores by a polynomial of {pipe.TERMS} terms"] * (pipe.TERMS > 0)
    parts += words_of_pieces(launch)
    rows = "columns" if pipe.SHARES and pipe.COLUMNS else "rows"
    return f"{launch.shape.ROWS} {rows} {size_of(launch)}, " + ", ".join(parts)


def heads_of(launch: Launch) -> str:
    """Describe the heads that have blocks of their own: KV heads, pairs of KV heads, or parts of groups."""
    count, parts = launch.shape.KV_HEADS, launch.pipe.PARTS
    if parts > 1:
        return f"{count} parts of {some(count // parts, 'group', 'groups')}"
    return f"{count} pairs of KV heads" if launch.shape.PAIRED else f"{count} KV heads"


def kernel_of(launch: Launch) -> str:
    """The name of the kernel."""
    kind = "mixed" if launch.beside is not None else "shares" if launch.pipe.SHARES else "blocks"
    return f"{kind}_kernel"
