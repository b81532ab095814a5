"""What SASS does, read as text: loops, what runs under products, who waits for whom, registers that nobody wrote.

An instruction is one string, a label one that ends with a colon.
"""

import collections
import functools
import itertools
import re
from collections.abc import Callable, Set

LEAVES = {"BRA", "BRX", "EXIT", "RET"}
MATRIX = ("HMMA", "HGMMA", "QGMMA")
COPY = "UMOV"  # of a uniform register
# of the device's memory
TOUCHES = {"ATOM", "ATOMG", "CCTL", "LD", "LDG", "LDGSTS", "RED", "ST", "STG", "UBLKPF", "UTMALDG"}
Effects = Callable[[str], tuple[Set[int], Set[int]]]  # registers that an instruction writes and reads


@functools.cache
def operation(instruction: str) -> str:
    """HGMMA of '@P0 HGMMA.64x64x16.F32 ...'; of a label itself."""
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0].split(".")[0]


def whole_operation(instruction: str) -> str:
    """STG.E.128 of '@!P1 STG.E.128 ...'."""
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0]


def operations(code: list[str]) -> collections.Counter:
    return collections.Counter(operation(x) for x in code if not x.endswith(":"))


def _blocks(code: list[str]) -> list[list[str]]:
    """Code without branches into it or out of it, but at its ends."""
    blocks: list[list[str]] = [[]]
    for x in code:
        if x.endswith(":"):
            blocks.append([])
        blocks[-1].append(x)
        if operation(x) in LEAVES:
            blocks.append([])
    return [block for block in blocks if block]


def _ways(blocks: list[list[str]]) -> list[list[int]]:
    """Where each block may go on."""
    named = {block[0][:-1]: i for i, block in enumerate(blocks) if block[0].endswith(":")}
    ways = []
    for i, block in enumerate(blocks):
        leaves = operation(block[-1]) in LEAVES
        # an indirect branch tells its targets in a comment
        ways.append([named[x] for x in re.findall(r"\.L_x_\d+", block[-1])] if leaves else [])
        always = leaves and not re.search(r"^@|\bBRA\.DIV\b|\bBRA\S*\s+!?U?P", block[-1])
        ways[-1] += [i + 1] if not always and i + 1 < len(blocks) else []
    return ways


def before_waiting(code: list[str]) -> list[str]:
    """What touches memory on the way to where the launch ahead of this one has ended (`griddepcontrol.wait`).

    Partitions wait for the warps that come by there.
    """
    blocks = _blocks(code)
    ways = _ways(blocks)
    waits = [next((n for n, x in enumerate(block) if operation(x) == "ACQBULK"), None) for block in blocks]
    reached = [0]
    for i in reached:
        reached += [j for j in dict.fromkeys(ways[i]) if j not in reached] if waits[i] is None else []
    leading = [i for i in reached if waits[i] is not None]
    for i in leading:
        leading += [j for j in reached if i in ways[j] and waits[j] is None and j not in leading]
    return sorted(TOUCHES & {operation(x) for i in leading for x in blocks[i][: waits[i]]})


def natural_loops(code: list[str]) -> list[list[str]]:
    """The loops, as code, smallest first.

    A branch backwards makes one where every way to it passes its target: rare code lies behind the rest and comes back.
    """
    blocks = _blocks(code)
    ways = _ways(blocks)
    sources: list[list[int]] = [[] for _ in blocks]
    for i, targets in enumerate(ways):
        for target in targets:
            sources[target].append(i)
    reached = [0]
    for i in reached:
        reached += [target for target in dict.fromkeys(ways[i]) if target not in reached]
    sources = [[j for j in of if j in reached] for of in sources]
    everything = (1 << len(blocks)) - 1
    passed = [everything if i and sources[i] else 1 << i for i in range(len(blocks))]  # bits: by every way to a block
    settled = False
    while not settled:
        before = list(passed)
        for i in range(1, len(blocks)):
            if sources[i]:
                passed[i] = functools.reduce(int.__and__, [passed[j] for j in sources[i]]) | 1 << i
        settled = passed == before
    bodies: dict[int, set[int]] = {}
    for i in reached:
        for head in ways[i]:
            if passed[i] >> head & 1:
                body, left = bodies.setdefault(head, {head}), [i]
                while left:
                    block = left.pop()
                    if block not in body:
                        body.add(block)
                        left += sources[block]
    return sorted(([x for i in sorted(body) for x in blocks[i]] for body in bodies.values()), key=len)


def loops(code: list[str]) -> list[collections.Counter]:
    """Operations of each loop that holds a matrix instruction, innermost first."""
    counts = [operations(loop) for loop in natural_loops(code)]
    return [count for count in counts if any(count[x] for x in MATRIX)]


def innermost(code: list[str]) -> list[list[str]]:
    """The loops with matrix instructions that hold no other such loop, as code."""
    found = [loop for loop in natural_loops(code) if any(operation(x) in MATRIX for x in loop if x[-1] != ":")]
    held = [{x for x in loop if x.endswith(":")} for loop in found]
    return [loop for loop, labels in zip(found, held) if not any(other < labels for other in held)]


def named_barriers(code: list[str]) -> set[int]:
    """Barriers of a program at which it waits by their number: all of Triton's; turns are by a register."""
    found = (re.search(r"\bBAR\.SYNC\S* (0x[0-9a-f]+)", x) for x in code)
    return {int(match[1], 16) for match in found if match}


def loops_in_turn(code: list[str]) -> int:
    """The innermost loops whose products begin behind one barrier and are sent before an arrival at another."""
    marks = {"BAR.SYNC": "s", "BAR.ARV": "a", "WARPGROUP.DEPBAR": "w"} | {f"{name}.": "m" for name in MATRIX}
    orders = ("".join(mark for x in loop for name, mark in marks.items() if name in x) for loop in innermost(code))
    return sum(bool(re.fullmatch("sm+aw[^m]*", order)) for order in orders)


def under_products(code: list[str]) -> list[dict[str, int]]:
    """Of each innermost loop that waits for products twice, what it does between the waits.

    A third may lie behind a vote, in what is mostly skipped.  Maxima and exponentials, maxima before a vote may skip
    the rest, and special functions of the whole loop but those.
    """
    found = []
    for loop in innermost(code):
        waits = [i for i, x in enumerate(loop) if "WARPGROUP.DEPBAR" in x]
        if len(waits) < 2:
            continue
        under = loop[waits[0] : waits[-1]]
        vote = next((i for i, x in enumerate(under) if operation(x) == "VOTE"), len(under))
        if all(i - waits[0] > vote for i in waits[1:-1]):
            found.append(
                dict(
                    maxima=sum("FMNMX" in x for x in under),
                    maxima_always=sum("FMNMX" in x for x in under[:vote]),
                    exponentials=sum("MUFU.EX2" in x for x in under),
                    functions_always=sum("MUFU" in x for x in loop) - sum("MUFU" in x for x in under[vote:]),
                )
            )
    return found


def results_under_products(code: list[str]) -> int:
    """The most results that are rounded and exchanged between a product's beginning and the wait for it."""
    most, exchanged = 0, None
    for x in code:
        if "WARPGROUP.ARRIVE" in x:
            exchanged = 0
        elif "WARPGROUP.DEPBAR" in x or operation(x) == "VOTE":
            most, exchanged = max(most, exchanged or 0), None
        elif operation(x) == "SHFL" and exchanged is not None:
            exchanged += 1
    return most


def boxes_in_loops(code: list[str]) -> int:
    """Boxes that are sent in a loop over the distinct operands of a warp: what should be one instruction."""
    return sum("UTMALDG" in x and any("BRA.U.ANY" in y for y in code[i : i + 6]) for i, x in enumerate(code))


def overtaken_readers(code: list[str]) -> int:
    """Starts of warp partitions whose arguments are stored where warps that are late may still read.

    They go through shared memory right before the partitions' own barrier: a barrier has to lie between the last load
    from there and them.
    """
    overtaken = 0
    for i, x in enumerate(code):
        if re.search(r"BAR\.SYNC\S*\s+0x1\b(?!,)", x) and "STS" in _since_barrier(code[max(0, i - 12) : i]):
            before = [operation(y) for y in code[:i] if not y.endswith(":")]
            last = {name: max((j for j, y in enumerate(before) if y == name), default=-1) for name in ("LDS", "BAR")}
            overtaken += last["LDS"] > last["BAR"]
    return overtaken


def _since_barrier(code: list[str]) -> str:
    """The operations behind the last barrier: before it partitions were started, or have ended."""
    return " ".join(itertools.takewhile(lambda x: x != "BAR", map(operation, reversed(code))))


def reused_barriers(code: list[str]) -> int:
    """Barriers whose memory threads read or write, too, though they were not invalidated.

    A multiprocessor keeps barriers apart and writes them back later, over what has been stored there since.
    """

    def offsets(name: str) -> set[str]:
        return {x[1] for y in code for x in [re.search(rf"\b{name}\b.*\[[^\]]*\b(0x[0-9a-f]+)\]", y)] if x}

    # LDS.U8 reads which partition a warp is of, at its number beyond an address that may be the end of all barriers
    stored = offsets(r"(?:STS|LDS(?!\.U8)|STSM|LDSM)[.\w]*")
    return len((offsets(r"SYNCS\.EXCH[.\w]*") & stored) - offsets(r"SYNCS\.CCTL\.IV"))


@functools.cache
def _written(instruction: str) -> frozenset[int]:
    """Numbers of the registers that an instruction writes, those of several in a row included."""
    name, *operands = re.sub(r"^@!?U?P\w+\s+", "", instruction).replace(",", " ").split()
    target = next((x for x in operands if not re.fullmatch(r"U?P\w+", x)), "")  # predicates may come before it
    if not re.fullmatch(r"R\d+", target):
        return frozenset()
    product = re.search(r"GMMA\.64x(\d+)x", name)
    several = 4 if ".128" in name else 2 if re.search(r"\.64|WIDE|^CS2R", name) else 1
    first = int(target[1:])
    return frozenset(range(first, first + (int(product[1]) // 2 if product else several)))


def _converted(instruction: str) -> frozenset[int]:
    """The register of fp8 numbers that an instruction converts."""
    read = re.search(r"F2FP\.F16\.E[45]M[32]\.UNPACK_B R\d+, R(\d+)", instruction)
    return frozenset({int(read[1])} if read else ())


@functools.cache
def _uniform(instruction: str) -> tuple[frozenset[int], frozenset[int]]:
    """Numbers of the uniform registers that an instruction writes and reads."""
    name, *operands = re.sub(r"^@!?U?P\w+\s+", "", instruction).replace(",", " ").split()
    while operands and re.fullmatch(r"!?U?P\w+", operands[0]):
        del operands[0]
    wide = 2 if name.startswith("U") and ".64" in name else 1
    target = re.fullmatch(r"UR(\d+)", operands[0]) if operands else None
    if target and re.match(r"U(?!TMA|BLK|ISETP)|R2UR|S2UR|REDUX|VOTEU|SYNCS", name):
        del operands[0]
    else:
        target = None
    written = range(int(target[1]), int(target[1]) + (2 if "WIDE" in name else wide)) if target else ()
    read: set[int] = set()
    for x in operands:
        # both descriptors of a product, or the second one
        in_row = range(2 if re.match(r"R\d", operands[1]) else 0, 4) if "gdesc" in x else range(wide)
        read |= {int(n) + i for n in re.findall(r"UR(\d+)", x) for i in in_row}
    return frozenset(written), frozenset(read)


def unwritten(code: list[str]) -> int:
    """Uses of registers that not every way there has written: uniform ones, and of fp8 numbers that are converted.

    A copy is no use, but what it wrote is no more written than what it read.

    ptxas 12.8 makes one instruction of two conversions to fp8 whose results are stored side by side, and leaves none
    for what else the lower one is wanted for.  And where 64-bit words that a product is told are sums of an address and
    constants of both halves, it adds some of these to uniform registers that nobody has written.
    """
    blocks = _blocks(code)
    ways = _ways(blocks)
    return sum(
        _uses_of_unwritten(blocks, ways, effects) for effects in (lambda x: (_written(x), _converted(x)), _uniform)
    )


def _after(known: frozenset[int], instruction: str, effects: Effects) -> frozenset[int]:
    """Registers that are written behind an instruction: not the copy of one that is not."""
    written, read = effects(instruction)
    return known - written if operation(instruction) == COPY and not read <= known else known | written


def _uses_of_unwritten(blocks: list[list[str]], ways: list[list[int]], effects: Effects) -> int:
    """Instructions that read a register which not every way to them has written, and are no copies."""
    blocks = [[x for x in block if not x.endswith(":")] for block in blocks]
    before: dict[int, frozenset[int]] = {0: frozenset()}  # written on every way to a block
    changed = [0]
    while changed:
        i = changed.pop()
        known = functools.reduce(lambda known, x: _after(known, x, effects), blocks[i], before[i])
        for target in ways[i]:
            kept = before.get(target, known) & known
            if kept != before.get(target):
                before[target] = kept
                changed.append(target)
    found = 0
    for i, known in before.items():
        for x in blocks[i]:
            found += not (effects(x)[1] <= known or operation(x) == COPY)
            known = _after(known, x, effects)
    return found
