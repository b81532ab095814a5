"""Digests of the machine code of plain calls for sm_90: what such a call does not use must not change it.

A change that is meant to alter their code writes the table anew, `python -m tests.kernels.digests`, so that a review
sees which kernels it alters.  Digests hold for one version of Triton, the first line of the table.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import triton

from tests.machine_code import compiled

TABLE = Path(__file__).with_name("digests.txt")
# Variants that the tests of machine code compile anyhow, by dialect.
PLAIN = {
    "portable": (
        "decode", "decode split", "decode split e4m3", "decode packed", "prefill", "prefill split", "prefill e4m3",
        "prefill all fp8",
    ),
    "hopper": (
        "lone decode", "lone decode e4m3", "lone draft", "decode split all fp8", "draft of 8 x-packed", "narrow",
        "prompts of 2048", "prefills e4m3, no lse", "prompts x-packed", "long", "two lists", "mixed",
        "mixed e4m3, no lse", "invariant 4096",
    ),
}  # fmt: skip


def lines(dialect: str, found: Iterable[dict[str, Any]]) -> list[str]:
    """Lines of the table for those reports of compiled kernels that it has."""
    return [
        f"{dialect}, {x['variant']}: {x['kernel']} {x['sass'][:16]}" for x in found if x["variant"] in PLAIN[dialect]
    ]


def changed(dialect: str, found: Iterable[dict[str, Any]]) -> list[str]:
    """What the table does not know of these reports; nothing under another Triton than that of the table."""
    version, *known = TABLE.read_text().splitlines()
    return [] if version != f"Triton {triton.__version__}" else sorted({*lines(dialect, found)} - {*known})


def main() -> None:
    table = [f"Triton {triton.__version__}"]
    for dialect, variants in PLAIN.items():
        environment = {"PAGED_ATTN_HOPPER": "0"} if dialect == "portable" else {}
        table += sorted(lines(dialect, compiled("sm90", *variants, "--exactly", **environment)))
    TABLE.write_text("\n".join(table) + "\n")


if __name__ == "__main__":
    main()
