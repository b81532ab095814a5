"""The dialect of the Hopper kernels (sm_90, in Gluon): whether they run here, launches, and words for `explain`."""

import functools
import warnings
from typing import Any

import torch

from ...launching import triton_trial, triton_version
from ...launching.launch import Step
from ...launching.locks import FIRST
from ...launching.platform import Device
from ...records.formats import INT4, MANTISSA
from ...records.layout import Call
from ...records.plan import Launch, some
from ..portable.dialect import size_of, words_of_pieces
from ..shared_steps import numbers_of
from .planning.coverage import copies, launches, need_of, regime, uncovered

__all__ = [
    "copies",
    "heads_of",
    "kernel_of",
    "launches",
    "need_of",
    "regime",
    "tiles_of",
    "uncovered",
    "warps_of",
]

TITLE = "Hopper's"


@functools.cache
def _why_unnamed() -> str | None:
    """Return a sentence about a name that this Triton's Gluon lacks, and warn once; None: Gluon has all names."""
    try:
        with FIRST:
            from . import shim  # noqa: F401
    except ImportError as error:
        warnings.warn(f"the Hopper kernels need another Triton, the portable ones run instead: {error}", stacklevel=2)
        return f"they need another Triton: {error}"
    return None


def why_no_gluon() -> str | None:
    """Return why all calls go to the portable kernels, else None.

    Reasons are PAGED_ATTN_HOPPER=0, missing names, a Triton that is too old, and an unknown Triton that has not passed
    a trial.  PAGED_ATTN_HOPPER=1 accepts every Triton in which the kernels can be imported.
    """
    if triton_trial.ASKED == "0":
        return "PAGED_ATTN_HOPPER is 0"
    if triton_trial.ASKED != "1" and triton_version.older():
        return triton_trial.why_untrusted("sm90")
    return _why_unnamed() or (None if triton_trial.ASKED == "1" else triton_trial.why_untrusted("sm90"))


def gluon_available() -> bool:
    """Whether the Hopper kernels can be used with this Triton; warns once if names are missing or a trial failed."""
    return why_no_gluon() is None


def why_not_on(device: Device) -> str | None:
    """Return why the Hopper kernels do not run on a device, or in this process; None: they do."""
    if device.arch != "sm90":
        return "the others are for sm90"
    why = why_no_gluon()
    return why and f"not {TITLE}, for {why}"


def read() -> None:
    """Import the kernels."""
    with FIRST:
        from . import launch_arguments  # noqa: F401 (Gluon is optional)


def step(launch: Launch, call: Call) -> Step:
    """Return the step of a launch: kernel, grid and arguments."""
    with FIRST:
        from .launch_arguments import attention  # Gluon is optional

    return attention(launch, call, numbers_of(launch, call))


def multiplies_fp8(launch: Launch) -> bool:
    """Whether both products of the launch have fp8 operands; False if only q @ k^T has."""
    return launch.pipe.FP8_PRODUCTS


def compiled(launch: Launch) -> tuple[object, ...]:
    """Return the fields that decide a launch's compiled kernel; numbers such as `least` do not specialise it."""
    return (launch.shape, launch.pipe, launch.config, launch.shortest, launch.longest)


# ---- words of explain ----------------------------------------------------------------------------


def warps_of(launch: Launch) -> int:
    """Return the number of a program's warps that serve this launch; a launch beside it has other warps."""
    pipe = launch.pipe
    return pipe.CONSUMERS * pipe.ROWS // 16 + 4 * (pipe.CONVERT > 0) + _loading(pipe)


def _loading(pipe: Any) -> int:
    """Return the number of loader warps of a program."""
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
    form = {MANTISSA[torch.int8]: "int8", MANTISSA[INT4]: "int4"}.get(pipe.FP8, "fp8")
    if pipe.CONVERT:
        rings += f" behind {pipe.RAW_STAGES} of {form}, products of {'fp8' if pipe.FP8_PRODUCTS else 'float16'}"
        rings += " by coarse weights (no log-sum-exps)" * pipe.COARSE
        if pipe.FP8_KEYS and not pipe.FP8_PRODUCTS:
            rings += " but for keys, of fp8 by queries in two parts (no log-sum-exps)"
    elif pipe.FP8:
        form += " with scales by token" * pipe.SLOT_SCALES
        rings += f" of {'x-packed ' * pipe.PACKED}{form}, products of float16"
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
    """Return the name of the launch's kernel."""
    kind = "mixed" if launch.beside is not None else "shares" if launch.pipe.SHARES else "blocks"
    return f"{kind}_kernel"
