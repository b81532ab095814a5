"""The page "All figures" of the site: every case of the committed runs, from their JSON.

mkdocs.yml names this file as a hook, so the page is made with the site and never committed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.headline import PEERS_RUN, PORTABLE_RUN, three_digits
from benchmarks.peers import BOUNDS, OURS

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

H200, H100 = "h200", "h100-80gb-hbm3"
# Folder of a card -> reports that are shown, in order.
REPORTS: Mapping[str, Sequence[str]] = {
    H200: (
        "decode", "flashinfer/decode", "fp8", "ragged", "spec", "single", "mixed", "prefill", "flashinfer/prefill",
        "window", "flashinfer/window", "features", "masks", "invariant", "layouts/survey", "models", "layers",
        "wide", "mla", "flashmla/mla",
    ),
    H100: ("decode", "fp8", "ragged", "spec", "mixed", "prefill", "features"),
}  # fmt: skip
# Runs that have times only: no bytes, no operations, no rates of the card.
PLAIN = {
    PEERS_RUN: "38 cases beside FlashAttention-3 and cuDNN",
    PORTABLE_RUN: "portable kernels beside vLLM's Triton kernel",
}
TRACES = ("trace-2048", "trace-256", "flashinfer/trace-2048", "flashinfer/trace-256")
TITLES = {
    "spec": "several query tokens each",
    "single": "few queries of one sequence",
    "mixed": "prefills beside decodes",
    "layouts/survey": "layouts, survey",
    "models": "layers of models",
    "layers": "layers of models that ask for more than sizes",
    "masks": "chunks, images, prefixes",
    "wide": "wide heads, and values of another width",
    "mla": "latents",
    "invariant": "batch_invariant, and the default mode",
}
PEERS = {"flashinfer": "FlashInfer", "flashmla": "FlashMLA"}  # folder of runs with another peer -> the peer's name
INTRODUCTION = """# All figures

Every case of the committed runs, written from `benchmarks/results/` when the site is built.
[Performance](performance.md) says how to read them. Times are medians in microseconds: CUDA-graph replays behind a
flushed L2. "Of roof" is the share of what the card did at the time, reading or multiplying 16-bit numbers, whichever
bounds the case; products of fp8 may be faster than that roof.

bfloat16, heads 32/8 of 128 dims, pages of 16 tokens unless said. `b64 x 4096` are 64 sequences of 4096 keys; "(bound)"
marks a contiguous cache. An empty cell: the peer was not in that run, or cannot do the case. SDPA's figures for
prefills of several sequences include a copy of its results, but for those of the 38 cases.
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page to the site that mkdocs builds."""
    from mkdocs.structure.files import File

    results = Path(config.config_file_path).parent / "benchmarks" / "results"
    files.append(File.generated(config, "tables.md", content=page(results)))
    return files


def page(results: Path) -> str:
    """Return the whole page in Markdown."""
    return "\n".join(line for part in _parts(results) for line in part) + "\n"


def _parts(results: Path) -> Iterator[list[str]]:
    yield INTRODUCTION.splitlines()
    for name, title in PLAIN.items():
        report = _read(results / H200, name)
        said = f"Commit {report['commit']}, torch {report['versions']['torch']}, Triton {report['versions']['triton']}."
        yield ["", f"## {_card(report)}: {title}", "", f"{said} {report['how']}", "", *_plain(report)]
    for folder, names in REPORTS.items():
        for name in names:
            report = _read(results / folder, name)
            suite = name.rpartition("/")[2]
            title = TITLES.get(name, TITLES.get(suite, suite))
            yield ["", f"## {_card(report)}: {title}{_beside(name)}", "", _run(report), "", *_table(report)]
    yield [
        "",
        "## Steps of a server",
        "",
        "24 steps each, cut from Azure's conversation trace by continuous batching, summed.",
        "",
    ]
    yield ["| chunk budget | commit | peer | paged-attn, ms | peer, ms |", "|---|---|---|---:|---:|"]
    for name in TRACES:
        report = _read(results / H200, name)
        for peer, total in report["totals"].items():
            if peer not in (OURS, "best rival"):
                times = (f"{1e3 * total[x]:.2f}" for x in ("ours", "seconds"))
                yield [f"| {name.rpartition('-')[2]} | {report['commit']} | {peer} | {' | '.join(times)} |"]


def _read(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return found


def _card(report: Mapping[str, Any]) -> str:
    return str(report["device"]).removeprefix("NVIDIA ").split()[0]


def _beside(name: str) -> str:
    peer = PEERS.get(name.partition("/")[0])
    return f", with {peer}" if peer else ""


def _run(report: Mapping[str, Any]) -> str:
    limits, versions = report["ceilings"], report["versions"]
    memory, compute = limits["bytes_per_second"] / 1e12, limits["operations_per_second"] / 1e12
    return (
        f"Commit {report['commit']}, torch {versions['torch']}, Triton {versions['triton']}; "
        f"the card read {memory:.2f} TB/s and multiplied {compute:.0f} TFLOP/s."
    )


def _plain(report: Mapping[str, Any]) -> list[str]:
    """Return a table of microseconds, with a row for each case and a column for each entry of the run."""
    names = [*dict.fromkeys(name for result in report["results"] for name in result["seconds"])]
    lines = [f"| case | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    for result in report["results"]:
        cells = [three_digits(1e6 * result["seconds"][x]) if x in result["seconds"] else "" for x in names]
        lines.append(f"| {result['case']} | {' | '.join(cells)} |")
    return lines


def _table(report: Mapping[str, Any]) -> list[str]:
    limits, results = report["ceilings"], report["results"]
    peers = [x for x in dict.fromkeys(x for r in results for x in r["seconds"]) if x != OURS]
    names = [f"{peer} (bound)" if peer in BOUNDS else peer for peer in peers]
    lines = [
        f"| case | {OURS} | of roof |{''.join(f' {x} |' for x in names)}",
        f"|---|---:|---:|{'---:|' * len(peers)}",
    ]
    for result in results:
        seconds = result["seconds"]
        roof = max(result["bytes"] / limits["bytes_per_second"], result["operations"] / limits["operations_per_second"])
        cells = [f" {three_digits(1e6 * seconds[x])} |" if x in seconds else " |" for x in peers]
        ours = seconds[OURS]
        lines.append(f"| {result['case']} | {three_digits(1e6 * ours)} | {roof / ours:.0%} |{''.join(cells)}")
    return lines
