"""What the planner chooses for each benchmark case, as text: a changed choice is a changed line.

`python -m tests.planning.choices` writes the table anew, for a review to look at.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paged_attn.kernels.shared_steps import tiles_of_copies
from paged_attn.planning import planner
from paged_attn.planning.dialects import dialect
from paged_attn.records.plan import UNBOUNDED, Launch
from tests.planning.problems import problem_of_case, suites

TABLE = Path(__file__).with_name("choices.txt")
# Fields of a launch's records that are chosen, without fields that follow from the call or from other fields.
SHAPE = ("LIVE", "PIECE", "MERGE", "WHOLE", "PAIRED", "ONE_BLOCK", "LEADS", "CLEAR", "PEEL")
PIPE = (
    "CONSUMERS", "LOADERS", "BOX", "COLUMNS", "CONVERT", "RAW_STAGES", "JOINED", "GROUPED", "TERMS", "PARTS",
    "QUERY_SLOTS", "BRIEF", "AT_ONCE", "IN_TURN", "AHEAD", "MIXED", "PREFETCH", "FP8_KEYS", "FP8_PRODUCTS", "COARSE",
    "TANH", "QUERY_BOX", "FOLLOWS", "SLOT_SCALES",
)  # fmt: skip
CONFIG = ("stages", "warps", "resident", "pairs", "boxes", "registers")


def choices() -> Iterator[str]:
    """A line for each launch of each case, those beside others with a plus."""
    for suite, case in suites():
        yield f"{suite}: {case.name}"
        made = planner.plan(problem_of_case(case))
        if made.copies is not None:
            whole = made.copies
            yield f"  copies in {whole.most} x {whole.pages} pages, {tiles_of_copies(whole).programs} programs"
        for launch in made.launches:
            for part in launch.parts:
                yield f"  {'' if part is launch else '+ '}{_words(part)}"


def _words(launch: Launch) -> str:
    shape, pipe = launch.shape, launch.pipe
    longest = "" if launch.longest == UNBOUNDED else launch.longest
    rings = (launch.config.stages,) if pipe is None else (pipe.KEY_STAGES, pipe.VALUE_STAGES)
    words = [
        dialect(launch.dialect).kernel_of(launch).removesuffix("_kernel"),
        f"queries {launch.shortest}..{longest}",
        f"{shape.BLOCK_Q} x {shape.GROUP} = {shape.ROWS} rows x {shape.TILE} keys",
        f"slots {' + '.join(map(str, rings))}",
        f"{launch.programs} programs",
        f"pieces from {launch.least} tiles, {launch.slots} states" if shape.SPLIT else "keys whole",
    ]
    if (merge := launch.merge) is not None:
        some = "" if merge.dims == shape.VALUE_PADDED else f" of {merge.dims} dims"
        words.append(f"merge {merge.rows} rows{some} x {merge.lanes}")
    words += [*_set(shape, SHAPE), *_set(pipe, PIPE)] if pipe else [*_set(shape, SHAPE), *_set(launch.config, CONFIG)]
    return ", ".join(words)


def _set(record: Any, fields: tuple[str, ...]) -> Iterator[str]:
    for field in fields:
        value = getattr(record, field)
        if value and (value is True or value != 1):  # one of something is what there is where nothing is said
            yield field if value is True else f"{field} {value}"


if __name__ == "__main__":
    TABLE.write_text("\n".join(choices()) + "\n", encoding="utf-8")
