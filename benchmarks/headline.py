"""Tables of speed in README and on the page of performance, and README's picture, from committed runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peers import OURS

SDPA = "SDPA cuDNN, contiguous"
# Columns of the table on the page of performance -> peers whose figure may stand there.  A run has one of FlashInfer's
# two kernels.
COLUMNS: Mapping[str, Sequence[str]] = {
    OURS: (OURS,),
    "FlashInfer": ("flashinfer fa3", "flashinfer fa2"),
    "cuDNN, paged": ("cudnn paged",),
    SDPA: ("sdpa cudnn",),
}
MICROSECONDS, MILLISECONDS = "us", "ms"
IN_A_SECOND = {MICROSECONDS: 1e6, MILLISECONDS: 1e3}


class Row(NamedTuple):
    """A row of the table: a case of a run, or with `case` None the sum over all cases, for peers that did all."""

    name: str
    report: str
    case: str | None
    unit: str = MICROSECONDS
    without: Sequence[str] = ()  # columns whose figure is left out


COPIED = (SDPA,)  # in runs of several sequences with several queries each, SDPA's time includes a copy of its results
ROWS = (
    Row("decode, 1 sequence of 8192 keys", "flashinfer/decode", "decode b1 x 8192"),
    Row("decode, 64 x 4096", "flashinfer/decode", "decode b64 x 4096"),
    Row("decode, 256 x 1024, heads 32/32", "decode", "decode b256 x 1024, heads 32/32"),
    Row("decode, 64 x 4096, e4m3 cache", "fp8", "decode b64 x 4096, e4m3 cache"),
    Row("decode, one of 131072 keys beside 63 of 512", "ragged", "decode 1 x 131072 + 63 x 512"),
    Row("8 drafted tokens each, 16 x 8192", "spec", "speculate b16 x 8192, q_len 8"),
    Row("prefill, 8 x 1024", "flashinfer/prefill", "prefill b8 x 1024", without=COPIED),
    Row("prefill, 4 x 4096", "flashinfer/prefill", "prefill b4 x 4096", without=COPIED),
    Row("prefill, chunk of 2048 behind 14336 keys", "flashinfer/prefill", "chunk of 2048 at 16384"),
    Row("prefill, 4 x 4096, everything in e4m3", "fp8", "prefill b4 x 4096, all e4m3"),
    Row("prefill of 2048 beside 63 decodes at 4096", "mixed", "1 x 2048 + 63 decodes at 4096"),
    Row("24 steps of a server, chunks of 2048", "flashinfer/trace-2048", None, MILLISECONDS),
)


def figures(folder: Path, row: Row) -> dict[str, float]:
    """Return seconds of a row by column, for the peers of that run."""
    report: dict[str, Any] = json.loads((folder / f"{row.report}.json").read_text(encoding="utf-8"))
    results = [r for r in report["results"] if row.case in (None, r["case"])]
    assert results, f"{row.report}.json has no case {row.case!r}"
    found = {}
    for column, peers in COLUMNS.items():
        for peer in peers if column not in row.without else ():
            if all(peer in r["seconds"] for r in results):
                found[column] = sum(r["seconds"][peer] for r in results)
                break
    return found


def table(folder: Path) -> list[str]:
    """Return the table of the page of performance in Markdown; each row names its unit."""
    lines = [f"| H200, bfloat16 | unit | {' | '.join(COLUMNS)} |", f"|---|---|{'---:|' * len(COLUMNS)}"]
    for row in ROWS:
        found = figures(folder, row)
        cells = [three_digits(found[x] * IN_A_SECOND[row.unit]) if x in found else "" for x in COLUMNS]
        lines.append(f"| {row.name} | {row.unit} | {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |"))
    return lines


# README's table: peers of one run of 38 cases.  A peer that was timed with several page sizes has its best figure.
PEERS_RUN, PORTABLE_RUN, H100 = "peers-38", "portable-38", "h100-80gb-hbm3"
PEERS: Mapping[str, Sequence[str]] = {
    OURS: (OURS,),
    "FlashAttention-3": ("fa3", "fa3, pages of 128"),
    "cuDNN, paged": ("cudnn paged",),
    SDPA: ("sdpa cudnn",),
}
FLASHINFER = "FlashInfer, another run"
VLLM = "vllm triton"


class PeerRow(NamedTuple):
    """A case of PEERS_RUN; `flashinfer`: (report, case) of a run that timed FlashInfer beside an earlier paged-attn."""

    name: str
    case: str
    flashinfer: tuple[str, str] | None = None


PEER_ROWS = (
    PeerRow("decode, 1 x 8192", "decode b1 ctx8192 h32/8", ("decode", "decode b1 x 8192")),
    PeerRow("decode, 16 x 4096", "decode b16 ctx4096 h32/8"),
    PeerRow("decode, 64 x 4096", "decode b64 ctx4096 h32/8", ("decode", "decode b64 x 4096")),
    PeerRow("decode, 256 x 1024", "decode b256 ctx1024 h32/8"),
    PeerRow("decode, 64 of 256 to 32768 keys", "decode b64 ctxvar256-32768 h32/8"),
    PeerRow("prefill, 8 x 1024", "prefill b8 q1024 h32/8", ("prefill", "prefill b8 x 1024")),
    PeerRow("prefill, 4 x 4096", "prefill b4 q4096 h32/8", ("prefill", "prefill b4 x 4096")),
    PeerRow("prefill, 1 x 16384", "prefill b1 q16384 h32/8", ("prefill", "prefill b1 x 16384")),
    PeerRow("chunk of 2048, 16384 keys", "chunked b1 q2048 ctx16384 h32/8", ("prefill", "chunk of 2048 at 16384")),
    PeerRow("prefill of 2048 beside 63 decodes at 4096", "mixed 1x2048+63xdec4096 h32/8"),
    PeerRow("4 x 512 at 8192 beside 124 decodes at 2048", "mixed 4x512@8k+124xdec2048 h32/8"),
)
H100_ROWS = (
    Row("H100: decode, 64 x 4096", "decode", "decode b64 x 4096"),
    Row("H100: prefill, 1 x 16384", "prefill", "prefill b1 x 16384"),
)


def read(folder: Path, report: str) -> dict[str, Any]:
    """Read a committed run."""
    found: dict[str, Any] = json.loads((folder / f"{report}.json").read_text(encoding="utf-8"))
    return found


def seconds_of(folder: Path, report: str) -> dict[str, dict[str, float]]:
    """Return seconds of each peer, by case."""
    return {r["case"]: r["seconds"] for r in read(folder, report)["results"]}


def best(seconds: Mapping[str, float], names: Sequence[str]) -> float | None:
    """Return the least time among these entries of one peer; None: the run has none of them."""
    return min((seconds[x] for x in names if x in seconds), default=None)


def flashinfer_factor(folder: Path, row: PeerRow) -> float | None:
    """Return FlashInfer's time divided by paged-attn's in the same run; None: not measured."""
    if row.flashinfer is None:
        return None
    report, case = row.flashinfer
    seconds = seconds_of(folder / "flashinfer", report)[case]
    peer = best(seconds, COLUMNS["FlashInfer"])
    return None if peer is None else peer / seconds[OURS]


def beside_peers(folder: Path) -> list[str]:
    """Return README's table in Markdown: microseconds, and FlashInfer's factors."""
    lines = [
        f"| H200, bfloat16, us | {' | '.join(PEERS)} | {FLASHINFER} |",
        f"|---|{'---:|' * (len(PEERS) + 1)}",
    ]
    run = seconds_of(folder, PEERS_RUN)
    for row in PEER_ROWS:
        factor = flashinfer_factor(folder, row)
        lines.append(_line(row.name, run[row.case], "" if factor is None else f"{factor:.2f}x"))
    for other in H100_ROWS:
        lines.append(_line(other.name, seconds_of(folder.parent / H100, other.report)[str(other.case)], ""))
    return lines


def _line(name: str, seconds: Mapping[str, float], last: str) -> str:
    found = [best(seconds, names) for names in PEERS.values()]
    cells = ["" if x is None else three_digits(x * IN_A_SECOND[MICROSECONDS]) for x in found]
    return " ".join(f"| {' | '.join([name, *cells, last])} |".split())


def portable_beside_vllm(folder: Path) -> list[str]:
    """Return README's table of portable kernels in Markdown: microseconds, and vLLM's time divided by paged-attn's."""
    lines = [
        "| H200, bfloat16, us | portable kernels | vLLM's Triton kernel | vLLM's time / ours |",
        "|---|---:|---:|---:|",
    ]
    names = {row.case: row.name for row in PEER_ROWS} | {
        "decode b1 ctx512 h32/8": "decode, 1 x 512",
        "decode b256 ctx4096 h32/8": "decode, 256 x 4096",
    }
    for case, seconds in seconds_of(folder, PORTABLE_RUN).items():
        ours, theirs = (seconds[x] for x in (OURS, VLLM))
        cells = [three_digits(x * IN_A_SECOND[MICROSECONDS]) for x in (ours, theirs)]
        lines.append(f"| {' | '.join([names[case], *cells])} | {theirs / ours:.2f}x |")
    return lines


def mean_factor(folder: Path) -> float:
    """Return the geometric mean, over the cases of PEERS_RUN, of (fastest paged peer's time) / (paged-attn's time).

    A peer has its best page size in each case; paged-attn has pages of 16 tokens in all.
    """
    paged = [name for column, names in PEERS.items() if column != OURS and "contiguous" not in column for name in names]
    factors = [(best(x, paged) or math.nan) / x[OURS] for x in seconds_of(folder, PEERS_RUN).values()]
    return math.exp(sum(map(math.log, factors)) / len(factors))


def factors(folder: Path) -> list[tuple[str, dict[str, float]]]:
    """Return (row of README's table, peers' times as multiples of the library's), row by row."""
    run, found = seconds_of(folder, PEERS_RUN), []
    for row in PEER_ROWS:
        times = {column: best(run[row.case], PEERS[column]) for column in (OURS, "FlashAttention-3", "cuDNN, paged")}
        ours = run[row.case][OURS]
        here = {column: time / ours for column, time in times.items() if time is not None}
        if (factor := flashinfer_factor(folder, row)) is not None:
            here["FlashInfer"] = factor
        found.append((row.name, here))
    return found


def three_digits(number: float) -> str:
    """Format a number with three significant digits and without an exponent."""
    return f"{number:.0f}" if number >= 99.95 else f"{number:.1f}" if number >= 9.995 else f"{number:.2f}"
