"""Analysis of SASS as text: loops, instructions under asynchronous products, waits, reads of unwritten registers.

An instruction is a string; a label is a string that ends with a colon.
"""

import collections
import functools
import itertools
import re
from collections.abc import Callable, Set

LEAVES = {"BRA", "BRX", "EXIT", "RET"}
MATRIX = ("HMMA", "HGMMA", "QGMMA")
COPY = "UMOV"  # copies a uniform register
# Opcodes that access or prefetch global memory.
TOUCHES = {"ATOM", "ATOMG", "CCTL", "LD", "LDG", "LDGSTS", "RED", "ST", "STG", "UBLKPF", "UTMALDG"}
Effects = Callable[[str], tuple[Set[int], Set[int]]]  # registers that an instruction writes and reads


@functools.cache
def operation(instruction: str) -> str:
    """Return the opcode without modifiers: HGMMA for '@P0 HGMMA.64x64x16.F32 ...'; for a label the label."""
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0].split(".")[0]


def whole_operation(instruction: str) -> str:
    """Return the opcode with its modifiers: STG.E.128 for '@!P1 STG.E.128 ...'."""
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0]


def operations(code: list[str]) -> collections.Counter:
    return collections.Counter(operation(x) for x in code if not x.endswith(":"))


def _blocks(code: list[str]) -> list[list[str]]:
    """Split code into basic blocks."""
    blocks: list[list[str]] = [[]]
    for x in code:
        if x.endswith(":"):
            blocks.append([])
        blocks[-1].append(x)
        if operation(x) in LEAVES:
            blocks.append([])
    return [block for block in blocks if block]


def _ways(blocks: list[list[str]]) -> list[list[int]]:
    """Return the successors of each block, as indices of blocks."""
    named = {block[0][:-1]: i for i, block in enumerate(blocks) if block[0].endswith(":")}
    ways = []
    for i, block in enumerate(blocks):
        leaves = operation(block[-1]) in LEAVES
        # a comment of an indirect branch lists its targets
        ways.append([named[x] for x in re.findall(r"\.L_x_\d+", block[-1])] if leaves else [])
        always = leaves and not re.search(r"^@|\bBRA\.DIV\b|\bBRA\S*\s+!?U?P", block[-1])
        ways[-1] += [i + 1] if not always and i + 1 < len(blocks) else []
    return ways


def before_waiting(code: list[str]) -> list[str]:
    """Return opcodes that access memory on a path to the wait for the previous launch (`griddepcontrol.wait`).

    Other warp partitions wait for the warps on these paths, so their code does not count.
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


def exits_before_waiting(code: list[str]) -> int:
    """Count the places where the next launch is let begin, on a way without a wait for the previous launch."""
    blocks = _blocks(code)
    ways = _ways(blocks)
    reached, found = [0], 0
    for i in reached:
        for x in blocks[i]:
            found += operation(x) == "PREEXIT"
            if operation(x) == "ACQBULK":
                break
        else:
            reached += [j for j in dict.fromkeys(ways[i]) if j not in reached]
    return found


def natural_loops(code: list[str]) -> list[list[str]]:
    """Return the natural loops, as code, smallest first.

    A backward branch closes a loop only if its target dominates it.  Other backward branches return from rare code,
    which lies behind the rest.
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
    passed = [everything if i and sources[i] else 1 << i for i in range(len(blocks))]  # bit sets of dominators
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
    """Return the operations of each loop that holds a matrix instruction, smallest loop first."""
    counts = [operations(loop) for loop in natural_loops(code)]
    return [count for count in counts if any(count[x] for x in MATRIX)]


def innermost(code: list[str]) -> list[list[str]]:
    """Return the loops with matrix instructions that hold no other such loop, as code."""
    found = [loop for loop in natural_loops(code) if any(operation(x) in MATRIX for x in loop if x[-1] != ":")]
    held = [{x for x in loop if x.endswith(":")} for loop in found]
    return [loop for loop, labels in zip(found, held) if not any(other < labels for other in held)]


def named_barriers(code: list[str]) -> set[int]:
    """Return the barriers at which code waits by an immediate number: all of Triton's; ping-pong uses a register."""
    found = (re.search(r"\bBAR\.SYNC\S* (0x[0-9a-f]+)", x) for x in code)
    return {int(match[1], 16) for match in found if match}


def loops_in_turn(code: list[str]) -> int:
    """Count innermost loops whose products begin behind a barrier and are sent before an arrival at another barrier."""
    marks = {"BAR.SYNC": "s", "BAR.ARV": "a", "WARPGROUP.DEPBAR": "w"} | {f"{name}.": "m" for name in MATRIX}
    orders = ("".join(mark for x in loop for name, mark in marks.items() if name in x) for loop in innermost(code))
    return sum(bool(re.fullmatch("sm+aw[^m]*", order)) for order in orders)


def under_products(code: list[str]) -> list[dict[str, int]]:
    """Count operations between the two waits for products, for each innermost loop that waits twice.

    A third wait may lie behind a vote, in code that is mostly skipped.  `maxima` and `exponentials` are those between
    the waits, `maxima_always` those before the vote.  `functions_always` are special functions of the whole loop,
    except those between the vote and the last wait.
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
    """Return the largest number of results that are exchanged between a product's beginning and the wait for it."""
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
    """Count boxes that are sent in a loop over a warp's distinct operands, where one instruction would suffice."""
    return sum("UTMALDG" in x and any("BRA.U.ANY" in y for y in code[i : i + 6]) for i, x in enumerate(code))


def overtaken_readers(code: list[str]) -> int:
    """Count starts of warp partitions whose arguments are stored where late warps may still read.

    Arguments go through shared memory right before the partitions' own barrier.  Another barrier has to lie between the
    last load from shared memory and these stores.
    """
    overtaken = 0
    for i, x in enumerate(code):
        if re.search(r"BAR\.SYNC\S*\s+0x1\b(?!,)", x) and "STS" in _since_barrier(code[max(0, i - 12) : i]):
            before = [operation(y) for y in code[:i] if not y.endswith(":")]
            last = {name: max((j for j, y in enumerate(before) if y == name), default=-1) for name in ("LDS", "BAR")}
            overtaken += last["LDS"] > last["BAR"]
    return overtaken


def _since_barrier(code: list[str]) -> str:
    """Return the operations behind the last barrier, before which earlier partitions were started or have ended."""
    return " ".join(itertools.takewhile(lambda x: x != "BAR", map(operation, reversed(code))))


def reused_barriers(code: list[str]) -> int:
    """Count mbarriers whose memory threads also read or write, though the mbarriers were not invalidated.

    A multiprocessor caches mbarriers separately and writes them back later, over what has been stored there since.
    """

    def offsets(name: str) -> set[str]:
        return {x[1] for y in code for x in [re.search(rf"\b{name}\b.*\[[^\]]*\b(0x[0-9a-f]+)\]", y)] if x}

    # LDS.U8 reads a warp's partition, at the warp's offset from an address that may be the end of all barriers
    stored = offsets(r"(?:STS|LDS(?!\.U8)|STSM|LDSM)[.\w]*")
    return len((offsets(r"SYNCS\.EXCH[.\w]*") & stored) - offsets(r"SYNCS\.CCTL\.IV"))


@functools.cache
def _written(instruction: str) -> frozenset[int]:
    """Return the numbers of all registers that an instruction writes; an instruction may write several in a row."""
    name, *operands = re.sub(r"^@!?U?P\w+\s+", "", instruction).replace(",", " ").split()
    target = next((x for x in operands if not re.fullmatch(r"U?P\w+", x)), "")  # predicates may come before it
    if not re.fullmatch(r"R\d+", target):
        return frozenset()
    product = re.search(r"GMMA\.64x(\d+)x", name)
    several = 4 if ".128" in name else 2 if re.search(r"\.64|WIDE|^CS2R", name) else 1
    first = int(target[1:])
    return frozenset(range(first, first + (int(product[1]) // 2 if product else several)))


def _converted(instruction: str) -> frozenset[int]:
    """Return the register of fp8 numbers that an instruction converts; other instructions have none."""
    read = re.search(r"F2FP\.F16\.E[45]M[32]\.UNPACK_B R\d+, R(\d+)", instruction)
    return frozenset({int(read[1])} if read else ())


@functools.cache
def _uniform(instruction: str) -> tuple[frozenset[int], frozenset[int]]:
    """Return the numbers of the uniform registers that an instruction (writes, reads)."""
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
        # both descriptors of a product, or only the second if the first operand is in registers
        in_row = range(2 if re.match(r"R\d", operands[1]) else 0, 4) if "gdesc" in x else range(wide)
        read |= {int(n) + i for n in re.findall(r"UR(\d+)", x) for i in in_row}
    return frozenset(written), frozenset(read)


def unwritten(code: list[str]) -> int:
    """Count reads of registers that some path has not written: uniform ones, and those of fp8 numbers to convert.

    A copy does not count as a read, but the copy of an unwritten register is unwritten.

    ptxas 12.8 has two such bugs.  If results of two conversions to fp8 are stored side by side, it merges the
    conversions, and other uses of the lower result read a register that nothing has written.  If the 64-bit descriptors
    of a product are sums of an address and constants in both halves, it adds some constants to unwritten registers.
    """
    blocks = _blocks(code)
    ways = _ways(blocks)
    return sum(
        _uses_of_unwritten(blocks, ways, effects) for effects in (lambda x: (_written(x), _converted(x)), _uniform)
    )


def _after(known: frozenset[int], instruction: str, effects: Effects) -> frozenset[int]:
    """Return the registers that are written after an instruction; a copy of an unwritten register is not."""
    written, read = effects(instruction)
    return known - written if operation(instruction) == COPY and not read <= known else known | written


def _uses_of_unwritten(blocks: list[list[str]], ways: list[list[int]], effects: Effects) -> int:
    """Count instructions, other than copies, that read a register that is unwritten on some path."""
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
