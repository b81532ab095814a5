"""What the library will do for a call whose lengths are known, and what that should cost, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from ..kernels.portable import plan
from ..kernels.portable.plan import UNBOUNDED, Launch, Problem
from ..launching.backend import why_no_gluon
from ..launching.scratch import Need
from ..records.layout import is_fp8
from . import cuts
from .cuts import Cut
from .question import Question, grids, memory, need_of, operations, seconds


def explain(question: Question) -> Iterator[tuple[str, str]]:
    """(what, text) line by line."""
    problem = question.problem
    launches = plan.plan(problem).launches
    yield "call", _call(question)
    yield "device", f"{question.device.arch}, {question.device.multiprocessors} multiprocessors"
    yield "kernels", _dialect(problem, launches)
    states = 0
    for number, launch in enumerate(launches, 1):
        yield f"launch {number}" if len(launches) > 1 else "launch", _launch(launch)
        for part in launch.parts:
            done = cuts.cut(part, question.batch)
            states += 2 * 4 * done.rows * (part.shape.DIM + 2) * part.shape.KV_HEADS
            if part is not launch:
                yield "  beside", f"{_warps(part)} warps of each program, for {_served(part)}"
            yield "  tiles", _tiles(part, done)
            yield "  work", _work(part, done)
            if part.shape.SPLIT:
                yield "  pieces", _pieces(part, done)
        if any(part.shape.SPLIT for part in launch.parts):
            yield "  scratch", _scratch(need_of(launch))
    moved = memory(question) | ({"states of pieces, out and in": states} if states else {})
    yield "memory", f"{_bytes(sum(moved.values()))}: " + ", ".join(f"{name} {_bytes(n)}" for name, n in moved.items())
    parts = [part for launch in launches for part in launch.parts]
    useful, done_in_tiles = operations(question), sum(_multiplied(x, cuts.cut(x, question.batch)) for x in parts)
    share = useful / done_in_tiles if done_in_tiles else 1
    yield "operations", f"{_flop(useful)} that count, {share:.0%} of the {_flop(done_in_tiles)} that whole tiles take"
    yield "at best", _least(question, sum(moved.values()), useful)


# ---- lines ---------------------------------------------------------------------------------------


def _call(question: Question) -> str:
    model = question.model
    counts = Counter(zip(question.query_lens, question.seq_lens))
    batch = " + ".join(f"{n} x {_some(q, 'query', 'queries')} at {k} keys" for (q, k), n in list(counts.items())[:4])
    batch += f" + {len(counts) - 4} other kinds" if len(counts) > 4 else ""
    cache = "" if model.cache_dtype == model.dtype else f" over {_name(model.cache_dtype)}"
    sizes = f"{model.heads} heads on {model.kv_heads} of {model.head_dim}, {_name(model.dtype)}{cache}"
    layout = "x-packed" if model.kv_layout == "x" else model.kv_layout
    bounds = f"max_seqlen_q {question.max_seqlen_q}, max_seqlen_k {question.max_seqlen_k}"
    return f"{batch}; {sizes}, pages of {model.page_size} ({layout}); {bounds}"


def _dialect(problem: Problem, launches: tuple[Launch, ...]) -> str:
    """Which kernels, and why not the others."""
    if any(launch.pipe is not None for launch in launches):
        both = any(launch.pipe is None for launch in launches)
        many = problem.heads // problem.kv_heads > 64
        few = "few queries of more than 64 heads on a KV head" if many else "few queries of few keys"
        return "Hopper's" + f", and the portable one for {few}" * both
    if problem.device.arch != "sm90":
        return "portable; the others are for sm90"
    if why := why_no_gluon():
        return f"portable; not Hopper's, for {why}"
    from ..kernels.hopper.planning.plan import uncovered

    return f"portable; not Hopper's, which do not take {' nor '.join(uncovered(problem))}"


def _launch(launch: Launch) -> str:
    warps = sum(map(_warps, launch.parts))
    then = ", and behind launch 2 " if launch.shape.LEADS else ", then "
    kernels = then.join(
        f"{name}, {' x '.join(map(str, grid))} programs" + (f" of {warps} warps" if i == 0 else "")
        for i, (name, grid) in enumerate(grids(launch).items())
    )
    follows = launch.pipe is not None and launch.pipe.FOLLOWS
    return f"{kernels}, for {_served(launch)}" + "; they begin as programs of launch 1 end" * follows


def _served(launch: Launch) -> str:
    return _span(max(1, launch.shortest), launch.longest)


def _warps(launch: Launch) -> int:
    pipe = launch.pipe
    if pipe is None:
        return launch.config.warps
    return pipe.CONSUMERS * pipe.ROWS // 16 + 4 * (pipe.CONVERT > 0) + _loading(pipe)


def _loading(pipe: Any) -> int:
    """Warps that load."""
    return pipe.LOADERS * (1 if pipe.BRIEF else 2)


def _tiles(launch: Launch, done: Cut) -> str:
    shape, pipe, config = launch.shape, launch.pipe, launch.config
    live = f", at most {launch.block_tokens * shape.GROUP} live" if launch.block_tokens < shape.BLOCK_Q else ""
    rows = "columns" if pipe is not None and pipe.SHARES and pipe.COLUMNS else "rows"
    text = f"{shape.ROWS} {rows} ({shape.BLOCK_Q} tokens x {shape.GROUP} heads{live}) x {shape.TILE} keys, "
    fixed = [f"pieces of {shape.PIECE} keys"] * (shape.PIECE is not None)
    if pipe is None:
        notes = [f"{config.stages} stages"]
        notes += ["boxes of whole tiles"] * config.boxes + ["fp8 in pairs"] * config.pairs
        return text + ", ".join(notes + fixed)
    rings = f"rings of {pipe.KEY_STAGES} and {pipe.VALUE_STAGES} tiles"
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
    warps = f"{_some(pipe.CONSUMERS, 'consumer', 'consumers')} of {pipe.ROWS // 16} warps, {loaders}"
    parts = [rings, f"boxes of {pipe.BOX} keys", warps] + ["4 that convert"] * bool(pipe.CONVERT)
    parts += [f"up to {pipe.COLUMNS} rows as columns"] * (pipe.COLUMNS > 0 and not pipe.SHARES)
    parts += ["tanh by one instruction, since no log-sum-exps are asked for"] * pipe.TANH
    parts += [f"tanh of small scores by a polynomial of {pipe.TERMS} terms"] * (pipe.TERMS > 0) + fixed
    return text + ", ".join(parts)


def _heads(launch: Launch) -> str:
    """What has blocks of its own: KV heads, pairs of them, or parts of those that share one."""
    count, parts = launch.shape.KV_HEADS, 1 if launch.pipe is None else launch.pipe.PARTS
    if parts > 1:
        return f"{count} parts of {_some(count // parts, 'group', 'groups')}"
    return f"{count} pairs of KV heads" if launch.shape.PAIRED else f"{count} KV heads"


def _work(launch: Launch, done: Cut) -> str:
    heads = f"for each of {_heads(launch)}"
    blocks = f"{_some(done.sequences, 'sequence', 'sequences')}, {_some(done.blocks, 'block', 'blocks')}"
    text = f"{blocks}, {_some(done.tiles, 'tile', 'tiles')} that somebody sees {heads}; "
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


def _pieces(launch: Launch, done: Cut) -> str:
    if not done.cut:
        return "no block is cut"
    by = "a merge kernel" if launch.merge is not None else "the program of the last piece"
    return f"{_some(done.cut, 'block is', 'blocks are')} cut, into {done.pieces} pieces, joined by {by}"


def _scratch(need: Need) -> str:
    kept = f", {need.counters} counters" if need.counters else ""
    return f"{_bytes(4 * need.states)} for states{kept}"


def _least(question: Question, moved: int, useful: int) -> str:
    known = seconds(question, moved, useful)
    if known is None:
        return f"no ceilings are known for {question.device.arch}"
    name, ceilings, moving, multiplying = known
    bound = "memory" if moving >= multiplying else "arithmetic"
    at = f"{ceilings.bytes_per_s / 1e12:.2f} TB/s, {ceilings.flops_per_s / 1e12:.0f} TFLOP/s"
    times = f"memory {_time(moving)}, arithmetic {_time(multiplying)}"
    return f"{_time(max(moving, multiplying))}, bound by {bound}: {times} ({name}: {at})"


def _multiplied(launch: Launch, done: Cut) -> int:
    """Operations of the tiles that the blocks visit, dead rows, keys and padded dims with them."""
    shape = launch.shape
    return 4 * done.tiles * shape.TILE * shape.ROWS * shape.DIM * shape.KV_HEADS


def _span(shortest: int, longest: int) -> str:
    if longest == UNBOUNDED:
        return "all sequences" if shortest == 1 else f"sequences of {shortest} queries or more"
    return f"sequences of {_count(shortest, longest)} {'query' if longest == 1 else 'queries'}"


def _some(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _count(least: int, most: int) -> str:
    return f"{least}" if least == most else f"{least} to {most}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.") if not is_fp8(dtype) else str(dtype).removeprefix("torch.float8_")


def _bytes(count: int) -> str:
    return _scaled(count, ("bytes", "kB", "MB", "GB", "TB"))


def _flop(count: int) -> str:
    return _scaled(count, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))


def _scaled(count: float, units: tuple[str, ...]) -> str:
    """Three digits and a unit, in steps of 1000."""
    step = 0
    while count >= 999.5 and step < len(units) - 1:
        count, step = count / 1000, step + 1
    return f"{count:.3g} {units[step]}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"
