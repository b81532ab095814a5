"""Inline assembly, executed by one warp."""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Sequence

import numpy as np

from .machine import Kernel

LANES = np.arange(32)
UNWRITTEN = 0x7FC0DEAD  # no number of any size; as in machine.h


def run(text: str, operands: Sequence[np.ndarray | None]) -> list[np.ndarray]:
    """The operands $0, $1, ... afterwards, as words [32]; before, of float32 or words, or None: not written yet."""
    memory = np.full((len(operands), 32), UNWRITTEN, np.uint32)
    for words, operand in zip(memory, operands, strict=True):
        if operand is not None:
            words[:] = np.asarray(operand).view(np.uint32)
    at = memory.ctypes.data
    _kernel(text, len(operands)).run(1, [struct.pack("Q", at)], [(at, at + memory.nbytes)])
    return list(memory)


@functools.cache
def _kernel(text: str, count: int) -> Kernel:
    """What loads so many operands, does as the text says and stores them."""
    code = re.sub(r"\$(\d+)", r"%o\1", text)
    loads = "".join(f"ld.global.b32 %o{i}, [%at+{128 * i}];\n" for i in range(count))
    stores = "".join(f"st.global.b32 [%at+{128 * i}], %o{i};\n" for i in range(count))
    return Kernel(
        f""".visible .entry run(
.param .u64 run_param_0
)
.reqntid 32
{{
.reg .b32 %o<{count}>;
.reg .b32 %lane;
.reg .b64 %at;
ld.param.b64 %at, [run_param_0];
mov.u32 %lane, %laneid;
mad.wide.u32 %at, %lane, 4, %at;
{loads}
{code}
{stores}
ret;
}}
"""
    )
