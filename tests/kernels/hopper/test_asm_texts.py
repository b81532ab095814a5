"""What is known of texts of assembly: kernels on disk by their digest, readers by an example of each module."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

import paged_attn.kernels.hopper.asm
from paged_attn.kernels.hopper.asm.weights import weigh_again, weigh_pairs
from paged_attn.kernels.hopper.consuming import row_softmax


@pytest.mark.parametrize("function", [weigh_pairs, weigh_again, row_softmax.powers_of])
def test_kernels_on_disk_are_known_by_what_is_looked_up(function: Any) -> None:
    """Triton's key does not cover dicts that a `constexpr_function` reads, so a digest of them is a global."""
    assert function.cache_key
    assert any(name.startswith("DIGEST_OF_") for name, _ in function.used_global_vals)


SHOWN = {
    "barriers": lambda of: [of._AWAIT.value, of._TAKE_TURN.value],
    "maxima": lambda of: [of._ASM_32.value],
    "conversions": lambda of: [of._EXP2_WORDS.value, of._E4M3_APART.value],
    "instructions": lambda of: [of._LOGISTIC.value, of._BRING.value, of._BRING_LINE.value],
    "products": lambda of: [of._cores.fn(64, 16, 64, "bf16")],
    "registers": lambda of: [of._BESIDE_BF16.value],
    "weights": lambda of: [of._PAIRS["bf16", 1], of.exactly_capped("m0", "m0", "$96", 3)],
}


def test_every_module_of_assembly_shows_a_text() -> None:
    folder = Path(paged_attn.kernels.hopper.asm.__file__).parent
    assert SHOWN.keys() == {path.stem for path in folder.glob("*.py")} - {"__init__"}


@pytest.mark.parametrize("module", SHOWN)
def test_what_a_docstring_shows_is_what_its_module_makes(module: str) -> None:
    """From the beginning on; `...` stands for what is left out."""
    of = importlib.import_module(f"paged_attn.kernels.hopper.asm.{module}")
    shown = re.findall(r"(?:^    .*\n)+", of.__doc__, re.M)
    made = [" ".join(text.split()) for text in SHOWN[module](of)]
    assert len(shown) == len(made)
    for example, text in zip(shown, made, strict=True):
        parts = [re.escape(" ".join(part.split())) for part in example.split("...")]
        assert re.match(".*".join(parts), text), text
