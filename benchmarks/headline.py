"""The README's speed table and the picture beside it: twelve rows, read from the JSON of committed runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peers import OURS

# Columns of the table, and which peers' figures stand there: a run has one kernel of FlashInfer.
COLUMNS: Mapping[str, Sequence[str]] = {
    OURS: (OURS,),
    "FlashInfer": ("flashinfer fa3", "flashinfer fa2"),
    "cuDNN, paged": ("cudnn paged",),
    "SDPA cuDNN, contiguous": ("sdpa cudnn",),
}
MICROSECONDS, MILLISECONDS = "us", "ms"
IN_A_SECOND = {MICROSECONDS: 1e6, MILLISECONDS: 1e3}


class Row(NamedTuple):
    """A case of one run; without a case all of the run's, summed, where every peer has all of them."""

    name: str
    report: str
    case: str | None
    unit: str = MICROSECONDS


ROWS = (
    Row("decode, 1 sequence of 8192 keys", "flashinfer/decode", "decode b1 x 8192"),
    Row("decode, 64 x 4096", "flashinfer/decode", "decode b64 x 4096"),
    Row("decode, 256 x 1024, heads 32/32", "decode", "decode b256 x 1024, heads 32/32"),
    Row("decode, 64 x 4096, e4m3 cache", "fp8", "decode b64 x 4096, e4m3 cache"),
    Row("decode, one of 131072 keys beside 63 of 512", "ragged", "decode 1 x 131072 + 63 x 512"),
    Row("8 drafted tokens each, 16 x 8192", "spec", "speculate b16 x 8192, q_len 8"),
    Row("prefill, 8 x 1024", "flashinfer/prefill", "prefill b8 x 1024"),
    Row("prefill, 4 x 4096", "flashinfer/prefill", "prefill b4 x 4096"),
    Row("prefill, chunk of 2048 behind 14336 keys", "flashinfer/prefill", "chunk of 2048 at 16384"),
    Row("prefill, 4 x 4096, everything in e4m3", "fp8", "prefill b4 x 4096, all e4m3"),
    Row("prefill of 2048 beside 63 decodes at 4096", "mixed", "1 x 2048 + 63 decodes at 4096"),
    Row("24 steps of a server, chunks of 2048", "flashinfer/trace-2048", None, MILLISECONDS),
)


def figures(folder: Path, row: Row) -> dict[str, float]:
    """Seconds of a row by column, of those who were in that run."""
    report: dict[str, Any] = json.loads((folder / f"{row.report}.json").read_text(encoding="utf-8"))
    results = [r for r in report["results"] if row.case in (None, r["case"])]
    assert results, f"{row.report}.json has no case {row.case!r}"
    found = {}
    for column, peers in COLUMNS.items():
        for peer in peers:
            if all(peer in r["seconds"] for r in results):
                found[column] = sum(r["seconds"][peer] for r in results)
                break
    return found


def table(folder: Path) -> list[str]:
    """The table in Markdown: a unit a row, a figure a cell."""
    lines = [f"| H200, bfloat16 | unit | {' | '.join(COLUMNS)} |", f"|---|---|{'---:|' * len(COLUMNS)}"]
    for row in ROWS:
        found = figures(folder, row)
        cells = [three_digits(found[x] * IN_A_SECOND[row.unit]) if x in found else "" for x in COLUMNS]
        lines.append(f"| {row.name} | {row.unit} | {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |"))
    return lines


def factors(folder: Path) -> list[tuple[str, dict[str, float]]]:
    """How many times the library's time everyone takes, row by row, where somebody else was in the run."""
    rows = [(row.name, figures(folder, row)) for row in ROWS]
    return [(name, {x: found[x] / found[OURS] for x in found}) for name, found in rows if len(found) > 1]


def three_digits(number: float) -> str:
    """Three digits that count, and no exponent."""
    return f"{number:.0f}" if number >= 99.95 else f"{number:.1f}" if number >= 9.995 else f"{number:.2f}"
