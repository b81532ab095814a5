"""The launches of a call with known lengths, and their expected cost, in words."""

from __future__ import annotations

from collections.abc import Iterator

from ..kernels.shared_steps import COPY_WARPS, tiles_of_copies
from ..launching.scratch import Need
from ..planning.dialects import DIALECTS, Dialect, chosen, dialect
from ..planning.planner import in_whole_pages, plan
from ..records.copies import PAGE, Copies
from ..records.plan import UNBOUNDED, Launch, some
from ..records.problem import Problem
from .host_schedule import CutSummary, cut
from .question import Question, bytes_copied, bytes_exchanged, grids, memory, need_of, operations, seconds
from .words import assumed_of, bytes_of, call_of, operations_of, shard_of, time_of


def explained(question: Question) -> Iterator[tuple[str, str]]:
    """Yield the lines of the explanation as (name, text)."""
    made = plan(question.problem)
    (problem, _), launches = in_whole_pages(question.problem), made.launches
    yield "call", call_of(question)
    yield "device", f"{question.device.arch}, {question.device.multiprocessors} multiprocessors"
    if question.shard is not None:
        yield "shard", shard_of(question)
    yield "kernels", _dialect(problem, launches)
    yield "regime", ": ".join(chosen(problem).regime(problem))
    if made.copies is not None:
        yield "copies", _copies(made.copies, question.problem)
    states = 0
    for number, launch in enumerate(launches, 1):
        yield f"launch {number}" if len(launches) > 1 else "launch", _launch(launch)
        for part in launch.parts:
            done = cut(part, question.batch)
            states += 2 * 4 * done.rows * (part.shape.VALUE_PADDED + 2) * part.shape.KV_HEADS
            if part is not launch:
                yield "  beside", f"{dialect(part.dialect).warps_of(part)} warps of each program, for {_served(part)}"
            yield "  tiles", dialect(part.dialect).tiles_of(part)
            yield "  work", _work(part, done)
            if part.shape.SPLIT:
                yield "  pieces", _pieces(part, done)
        if any(part.shape.SPLIT for part in launch.parts):
            yield "  scratch", _scratch(need_of(launch))
    moved = memory(question) | ({"states of pieces, out and in": states} if states else {})
    moved |= {"copies, out and in": 2 * bytes_copied(question, made.copies)} if made.copies is not None else {}
    yield (
        "memory",
        f"{bytes_of(sum(moved.values()))}: " + ", ".join(f"{name} {bytes_of(n)}" for name, n in moved.items()),
    )
    if question.shard is not None:
        yield "exchange", _exchange(question, len(launches) + sum(launch.merge is not None for launch in launches))
    parts = [part for launch in launches for part in launch.parts]
    useful, done_in_tiles = operations(question), sum(_multiplied(x, cut(x, question.batch)) for x in parts)
    share = useful / done_in_tiles if done_in_tiles else 1
    yield (
        "operations",
        f"{operations_of(useful)} that count, {share:.0%} of the {operations_of(done_in_tiles)} that whole tiles take",
    )
    if assumed := assumed_of(question):
        yield "assumed", assumed
    yield "at best", _least(question, sum(moved.values()), useful)


# ---- lines ---------------------------------------------------------------------------------------


def _exchange(question: Question, launches: int) -> str:
    """What ranks send to each other after this rank's launches, and which launches then join the results."""
    rows = sum(question.query_lens) * question.model.heads
    sent = f"{bytes_of(bytes_exchanged(question))} to other ranks and as much from them, float32 states of {rows} rows"
    behind = f"behind {some(launches, 'launch', 'launches')} pack_kernel, an all-to-all and unpack_kernel"
    return f"{sent}; {behind}, or one launch through Peers, which store twice as many bytes"


def _dialect(problem: Problem, launches: tuple[Launch, ...]) -> str:
    """The kernels of a call, and why better dialects do not take the call."""
    used = [name for name in DIALECTS if any(launch.dialect == name for launch in launches)]
    titles = [dialect(name).TITLE for name in used]
    if len(titles) > 1:
        many = problem.heads // problem.kv_heads > 64
        few = "few queries of more than 64 heads on a KV head" if many else "few queries of few keys"
        if problem.slot_scales:
            few = f"sequences of {_count(launches[-2].shortest, launches[-2].longest)} queries"
        return f"{titles[0]}, and the {titles[1]} one for {few}"
    missed = DIALECTS[: DIALECTS.index(used[0])] if used else ()
    return "; ".join(titles + [_why_not(dialect(name), problem) for name in missed])


def _why_not(missed: Dialect, problem: Problem) -> str:
    if why := missed.why_not_on(problem.device):
        return why
    return f"not {missed.TITLE}, which do not take {' nor '.join(missed.uncovered(problem))}"


def _copies(copies: Copies, problem: Problem) -> str:
    """The launch that copies keys and values into whole pages, before all other launches."""
    keys = f"up to {copies.pages * PAGE} keys of each sequence"
    if copies.shortest > (1 if problem.only is None else 2):
        keys += f" of {copies.shortest} queries or more"
    numbers = f", numbers of {str(copies.dtype).removeprefix('torch.')}" if copies.dtype != problem.cache else ""
    return (
        f"copy_pages_kernel, {tiles_of_copies(copies).programs} programs of {COPY_WARPS} warps: {keys} from pages of "
        f"{copies.from_page} into pages of {PAGE} of the call's own, {bytes_of(copies.bytes)}{numbers}"
    )


def _launch(launch: Launch) -> str:
    warps = sum(dialect(part.dialect).warps_of(part) for part in launch.parts)
    then = ", and behind launch 2 " if launch.shape.LEADS else ", then "
    kernels = then.join(
        f"{name}, {' x '.join(map(str, grid))} programs" + (f" of {warps} warps" if i == 0 else "")
        for i, (name, grid) in enumerate(grids(launch).items())
    )
    begin = ""
    if launch.pipe is not None and launch.pipe.FOLLOWS:
        begin = f"; they begin {'while keys are copied' if launch.pipe.SHARES else 'as programs of launch 1 end'}"
    return f"{kernels}, for {_served(launch)}{begin}"


def _served(launch: Launch) -> str:
    return _span(max(1, launch.shortest), launch.longest)


def _work(launch: Launch, done: CutSummary) -> str:
    heads = f"for each of {dialect(launch.dialect).heads_of(launch)}"
    blocks = f"{some(done.sequences, 'sequence', 'sequences')}, {some(done.blocks, 'block', 'blocks')}"
    text = f"{blocks}, {some(done.tiles, 'tile', 'tiles')} that somebody sees {heads}; "
    span = _count(done.least, done.most)
    if done.schedule == "shares":
        return f"{text}even shares: {done.parts} of {span} tiles"
    if done.schedule == "line":
        return f"{text}even shares of all heads' tiles: {done.parts} of {span} tiles"
    if done.schedule == "counter":
        mixed = launch.pipe is not None and launch.pipe.MIXED
        counter = "two counters, of many rows and of few" if mixed else "a counter"
        return f"{text}from {counter}: {done.parts} items of up to {done.most} tiles"
    return f"{text}a program per block: {span} tiles"


def _pieces(launch: Launch, done: CutSummary) -> str:
    if not done.cut:
        return "no block is cut"
    by = "a merge kernel" if launch.merge is not None else "the program of the last piece"
    return f"{some(done.cut, 'block is', 'blocks are')} cut, into {done.pieces} pieces, joined by {by}"


def _scratch(need: Need) -> str:
    kept = f", {need.counters} counters" if need.counters else ""
    return f"{bytes_of(4 * need.states)} for states{kept}"


def _least(question: Question, moved: int, useful: int) -> str:
    known = seconds(question, moved, useful)
    if known is None:
        return f"no ceilings are known for {question.device.arch}"
    name, ceilings, moving, multiplying = known
    bound = "memory" if moving >= multiplying else "arithmetic"
    at = f"{ceilings.bytes_per_s / 1e12:.2f} TB/s, {ceilings.flops_per_s / 1e12:.0f} TFLOP/s"
    times = f"memory {time_of(moving)}, arithmetic {time_of(multiplying)}"
    return f"{time_of(max(moving, multiplying))}, bound by {bound}: {times} ({name}: {at})"


def _multiplied(launch: Launch, done: CutSummary) -> int:
    """Operations of the visited tiles, including masked rows and keys and padded dims."""
    shape = launch.shape
    dims = shape.DIM + (shape.REST or 0) + shape.VALUE_PADDED
    return 2 * done.tiles * shape.TILE * shape.ROWS * dims * shape.KV_HEADS


def _span(shortest: int, longest: int) -> str:
    if longest == UNBOUNDED:
        return "all sequences" if shortest == 1 else f"sequences of {shortest} queries or more"
    return f"sequences of {_count(shortest, longest)} {'query' if longest == 1 else 'queries'}"


def _count(least: int, most: int) -> str:
    return f"{least}" if least == most else f"{least} to {most}"
