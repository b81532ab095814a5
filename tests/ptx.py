"""Inline assembly on a CPU: the PTX of one warp, an instruction at a time for all 32 lanes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import torch

LANES = np.arange(32)
Register = np.ndarray  # [32] of float32, bool, bits as uint32 or uint16, or pairs of float32 for words of two


def _exp2(x: Register) -> Register:
    return np.exp2(x.astype(np.float64)).astype(np.float32)


def _fma(a: Register, b: Register, c: Register) -> Register:
    return (a.astype(np.float64) * b + c).astype(np.float32)


def _saturated(a: Register, b: Register, c: Register) -> Register:
    """In [0, 1]; 0 where it is not a number."""
    x = _fma(a, b, c)
    return np.where(x > 0, np.minimum(x, 1), 0).astype(np.float32)


def _pick(a: Register, b: Register, selector: int) -> Register:
    """Bytes of two words, a's the lower four, by the digits of the selector."""
    source = np.stack([a, b], 1).view(np.uint8)
    return np.stack([source[:, selector >> 4 * i & 7] for i in range(4)], 1).copy().view(np.uint32)[:, 0]


def _e4m3(x: Register) -> Register:
    """Two float16 of a word as bytes of e4m3."""
    numbers = torch.from_numpy(x.copy().view(np.float16).reshape(32, 2)).float().clamp(-448, 448)
    return numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy().copy().view(np.uint16)[:, 0]


def _bits(x: Register) -> Register:
    return x.view(np.uint32) if x.dtype == np.float32 else x


def _any_bit(a: Register, b: Register, c: Register, table: int) -> Register:
    if table != 0xFE:
        raise ValueError(f"of three words only their union is known, not {table:#x}")
    return _bits(a) | _bits(b) | _bits(c)


OPERATIONS: dict[str, Callable[..., Register]] = {
    "mov": lambda a: a,
    "add.f32": lambda a, b: a + b,
    "sub.f32": lambda a, b: a - b,
    "max.f32": np.fmax,  # of a number and none the number
    "mul.f32": lambda a, b: a * b,
    "rcp.approx.ftz.f32": lambda a: (1 / a).astype(np.float32),
    "lop3.b32": _any_bit,
    "or.b32": lambda a, b: _bits(a) | _bits(b),
    "and.b32": lambda a, b: _bits(a) & np.uint32(b),
    "sub.u32": lambda a, b: np.uint32(a) - _bits(b),
    "setp.ne.u32": lambda a, b: a != b,
    "fma.rn.f32": _fma,
    "fma.rn.sat.f32": _saturated,
    "prmt.b32": _pick,
    "cvt.rn.satfinite.e4m3x2.f16x2": _e4m3,
    "joined": lambda lower, upper: lower | upper.astype(np.uint32) << 16,
    "ex2.approx.ftz.f32": _exp2,
    "selp.b32": lambda a, b, p: np.where(p.reshape(-1, *[1] * (a.ndim - 1)), a, b),
    "setp.gt.f32": lambda a, b: a > b,
    "max.NaN.f32": np.maximum,
    "setp.gtu.f32": lambda a, b: ~(a <= b),
    "setp.eq.f32": lambda a, b: a == b,
    "setp.eq.or.f32": lambda a, b, p: (a == b) | p,
    "setp.gt.and.f32": lambda a, b, p: (a > b) & p,
    "or.pred": lambda p, q: p | q,
    "vote.sync.any.pred": lambda p, _: np.full(32, p.any()),
    "shfl.sync.bfly.b32": lambda a, n, *_: a[LANES ^ n],
    # a word is told by its halves, the lower first: rounding is the machine's affair
    "cvt.rn.bf16x2.f32": lambda upper, lower: np.stack([lower, upper], 1),
    "cvt.rn.f16x2.f32": lambda upper, lower: np.stack([lower, upper], 1),
}


def run(text: str, operands: Sequence[Register | None]) -> list[Register | None]:
    """The operands $0, $1, ... after the assembly; None: not written yet.  Reading such a one is an error."""
    values: dict[str, Register | None] = {f"${i}": x for i, x in enumerate(operands)}
    code = [x.strip() for x in re.split(r";|(?<=:)\s", text.strip().removeprefix("{").removesuffix("}")) if x.strip()]
    labels = {x[:-1]: i for i, x in enumerate(code) if x.endswith(":")}

    def read(name: str) -> Register | int:
        if name.startswith("0f"):
            return np.full(32, np.frombuffer(bytes.fromhex(name[2:]), ">f4")[0], np.float32)
        if name.startswith("0x") or name.lstrip("-").isdigit():
            return int(name, 0)
        found = LANES.astype(np.uint32) if name == "%laneid" else values[name]
        if found is None:
            raise ValueError(f"{name} is read before it is written")
        return found

    at = 0
    while at < len(code):
        found = re.fullmatch(r"(?:@(!?)(\w+) )?([\w.]+) (.*)", code[at])
        at += 1
        if found is None or found[3].startswith(".reg"):
            continue
        lanes = np.full(32, True) if found[2] is None else np.asarray(read(found[2])) ^ bool(found[1])
        target, *sources = (x.strip() for x in found[4].replace("{", "").replace("}", "").split(","))
        if found[3] == "bra":
            if lanes.any() != lanes.all():
                raise ValueError(f"a warp divides at {code[at - 1]!r}")
            at = labels[target] if lanes.all() else at
            continue
        name = ("mov" if len(sources) == 1 else "joined") if found[3].startswith("mov.") else found[3]
        with np.errstate(all="ignore"):
            result = OPERATIONS[name](*map(read, sources))
        before = values.get(target)
        if before is not None and not lanes.all():
            result = np.where(lanes.reshape(-1, *[1] * (result.ndim - 1)), result, before)
        values[target] = result
    return [values[f"${i}"] for i in range(len(operands))]
