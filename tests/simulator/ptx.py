"""PTX as numbers: instructions, and where in a warp's registers their operands lie."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

WIDE, WORD = 64, 32  # words of 32 lanes that a register takes: of 64 bits, of less; a predicate takes one
SPECIALS = ("%tid.x", "%ctaid.x", "%nctaid.x", "%laneid", "%dynamic_smem_size")
SHARED_BASE = 1024  # where a program's own shared memory begins; as in machine.h
TOKENS = re.compile(r"\[[^\]]*\]|[{}]|[^\s,{}\[\]|]+|\|")
NUMBER = re.compile(r"0[fF][0-9a-fA-F]{8}|-?0x[0-9a-fA-F]+U?|-?\d+U?")


class Parsed(NamedTuple):
    """A kernel's instructions as `machine.cpp` reads them."""

    names: list[str]
    ops: list[tuple[int, int, int, int]]  # name, guard, first operand, how many
    operands: list[int]
    constants: dict[int, int]  # value of the register that lies there
    words: int  # of a warp's registers
    specials: int  # where those of SPECIALS lie
    threads: int
    parameters: list[int]  # sizes in bytes
    lines: list[str]  # of the source, for each instruction


def parse(text: str) -> Parsed:
    """The one kernel of a module."""
    head, _, body = text.partition(".entry")[2].partition("\n{")
    sizes = [_size(x) for x in re.findall(r"\.param ([^\n,]*)", head)]
    names = re.findall(r"(\w+_param_\d+)", head)
    threads = int(re.search(r"\.reqntid (\d+)", head)[1])
    addresses = dict(zip(names, offsets(sizes), strict=True)) | {"global_smem": SHARED_BASE}
    return _Parser(addresses).parse(body, threads, sizes)


def offsets(sizes: list[int]) -> list[int]:
    """Of parameters of such sizes, each at a multiple of its size."""
    found, at = [], 0
    for size in sizes:
        at = -(-at // size) * size
        found.append(at)
        at += size
    return found


def _size(kind: str) -> int:
    """Bytes of a parameter: `.u32 name`, `.align 64 .b8 name[128]`."""
    array = re.search(r"\[(\d+)\]", kind)
    return int(array[1]) if array else int(re.search(r"\.[usfb](\d+)", kind)[1]) // 8


class _Parser:
    """Instructions in order, in scopes that have registers and labels of their own."""

    def __init__(self, addresses: dict[str, int]) -> None:
        self.addresses = addresses
        self.words = 0
        self.constants: dict[int, int] = {}
        self.constant_at: dict[int, int] = {}
        self.names: dict[str, int] = {}
        self.ops: list[tuple[int, int, int, int]] = []
        self.operands: list[int] = []
        self.lines: list[str] = []
        self.scopes: list[dict[str, int]] = [{}]  # where registers lie
        self.labels: list[dict[str, int]] = [{}]
        self.open: list[list[tuple[int, str]]] = [[]]  # operands that are labels of a scope
        self.tables: dict[str, list[str]] = {}

    def parse(self, body: str, threads: int, sizes: list[int]) -> Parsed:
        specials = self.take(WIDE * len(SPECIALS))
        self.scopes[0] |= {name: specials + WIDE * i for i, name in enumerate(SPECIALS)}
        self.scopes[0]["_"] = self.take(WIDE)
        for name, targets in re.findall(r"([$\w]+):\s*\.branchtargets([^;]*);", body):
            self.tables[name] = [x.strip() for x in targets.split(",")]
        for line, statement in _statements(body):
            if statement == "{":
                self.scopes.append({})
                self.labels.append({})
                self.open.append([])
            elif statement == "}" and len(self.scopes) == 1:
                break  # what follows is for debuggers
            elif statement == "}":
                self.close()
            elif statement.endswith(":"):
                self.labels[-1][statement[:-1]] = len(self.ops)
            elif statement.startswith(".reg"):
                self.declare(statement)
            elif ".branchtargets" not in statement:
                self.instruction(statement, line)
        missing = self.resolved()
        if missing:
            raise ValueError(f"these are nowhere: {', '.join(sorted({name for _, name in missing}))}")
        names = list(self.names)
        return Parsed(names, self.ops, self.operands, self.constants, self.words, specials, threads, sizes, self.lines)

    def close(self) -> None:
        """The end of a scope: labels that are not its own are those of the one around it."""
        self.scopes.pop()
        outside = self.resolved()
        self.open[-1] += outside

    def resolved(self) -> list[tuple[int, str]]:
        """Operands of the innermost scope that are no labels of its own."""
        labels, waiting = self.labels.pop(), self.open.pop()
        for place, name in waiting:
            if name in labels:
                self.operands[place] = labels[name]
        return [(place, name) for place, name in waiting if name not in labels]

    def take(self, words: int) -> int:
        self.words += words
        return self.words - words

    def declare(self, statement: str) -> None:
        _, kind, names = statement.split(None, 2)
        words = {".pred": 1, ".b64": WIDE, ".u64": WIDE, ".s64": WIDE}.get(kind, WORD)
        for name in names.split(","):
            counted = re.fullmatch(r"(\S+)<(\d+)>", name.strip())
            every = [f"{counted[1]}{i}" for i in range(int(counted[2]))] if counted else [name.strip()]
            self.scopes[-1] |= {x: self.take(words) for x in every}

    def constant(self, value: int) -> int:
        if value not in self.constant_at:
            self.constant_at[value] = at = self.take(WIDE)
            self.constants[at] = value
        return self.constant_at[value]

    def place(self, name: str) -> int | None:
        """Where a register, a number or an address lies; None of a label."""
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        if NUMBER.fullmatch(name):
            if name[:2].lower() == "0f":
                return self.constant(struct.unpack(">I", bytes.fromhex(name[2:]))[0])
            return self.constant(int(name.rstrip("U"), 0))
        if name in self.addresses:
            return self.constant(self.addresses[name])
        return None

    def instruction(self, statement: str, line: str) -> None:
        found = re.fullmatch(r"(?:@(!?)(\S+)\s+)?([\w.:]+)\s*(.*)", statement, re.S)
        assert found is not None, statement
        guard = 0
        if found[2]:
            guard = self.place(found[2]) + 1
            guard = -guard if found[1] else guard
        name, rest = found[3].replace("shared::cta", "shared"), found[4]
        if name.startswith("mov.b") and "{" in rest:
            name = f"{'halve' if rest.startswith('{') else 'unite'}.{name[4:]}"
        first = len(self.operands)
        for token in TOKENS.findall(rest):
            if token[0] in "{}|":
                continue
            for part in _parts(token):
                if isinstance(part, int):
                    self.operands.append(part)
                elif part in self.tables:
                    for target in self.tables[part]:
                        self.label(target)
                elif (place := self.place(part)) is not None:
                    self.operands.append(place)
                else:
                    self.label(part)
        number = self.names.setdefault(name, len(self.names))
        self.ops.append((number, guard, first, len(self.operands) - first))
        self.lines.append(line)

    def label(self, name: str) -> None:
        self.open[-1].append((len(self.operands), name))
        self.operands.append(-1)


def _parts(token: str) -> Iterator[str | int]:
    """Of [a+4] a and 4, of [a, {b, c}] a, 0, b and c, else the token."""
    if token[0] != "[":
        yield token
        return
    address, *more = [x.strip(" {}") for x in token[1:-1].split(",")]
    base, _, offset = address.replace(" ", "").partition("+")
    yield base
    yield int(offset or 0)
    yield from more


def _statements(body: str) -> Iterator[tuple[str, str]]:
    """(line of the source, statement): instructions, declarations, labels with their colon, single braces."""
    line, pending = "", ""
    for text in body.split("\n"):
        if loc := re.match(r"\s*\.loc\s.*//\s*(.*)", text):
            line = loc[1]
            continue
        text = re.sub(r"//.*", "", text).strip()
        if not text or re.match(r"\.(file|section|b8|pragma)", text):
            continue
        pending += " " + text
        while pending := pending.strip():
            if scope := re.match(r"\{(?=\s*(\.reg|\w+:|$|[a-z@]))", pending):
                yield line, "{"
                pending = pending[scope.end() :]
            elif pending.startswith("}"):
                yield line, "}"
                pending = pending[1:]
            elif label := re.match(r"([$\w]+):(?!:)(?!\s*\.branchtargets)", pending):
                yield line, label[0]
                pending = pending[label.end() :]
            elif ";" in pending:
                statement, _, pending = pending.partition(";")
                yield line, statement.strip()
            else:
                break
