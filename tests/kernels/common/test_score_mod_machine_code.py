"""What compilers make of a user's function in the kernels: ALiBi and softcap as built in, and where Gluon has none."""

from __future__ import annotations

from typing import Any

import pytest
import triton

from tests.machine_code import ARITHMETIC, compiled
from tests.support import warm

FOR_NVIDIA = pytest.mark.skipif(
    "nvidia" not in triton.backends.backends, reason="this Triton does not compile for nvidia"
)
OF_SCORES = (*ARITHMETIC, "I2FP")


def whole_tiles(facts: dict[str, Any]) -> dict[str, int]:
    """Arithmetic of the loop over keys that every row sees: the one without masks."""
    loops = [x for x in facts["innermost"] if x.get("HGMMA", 0) >= 8]
    loop = min(loops, key=lambda x: sum(x.values()))
    return {name: loop.get(name, 0) for name in OF_SCORES}


@FOR_NVIDIA
@pytest.mark.thorough
@pytest.mark.parametrize("mod", ["alibi", "softcap"])
def test_alibi_and_softcap_as_functions_are_the_arithmetic_of_the_built_in_ones(mod: str) -> None:
    names = (f"prefill {mod}", f"prefill user {mod}")
    found = {x["variant"]: x for x in compiled("sm90", *names, "--exactly", PAGED_ATTN_HOPPER="0")}
    assert {x["kernel"] for x in found.values()} == {"attention_kernel"}
    assert not any(x["spilled"] for x in found.values())
    assert whole_tiles(found[f"prefill user {mod}"]) == whole_tiles(found[f"prefill {mod}"])


@FOR_NVIDIA
@pytest.mark.thorough
def test_a_function_goes_to_hopper_unless_gluon_does_not_compile_it() -> None:
    names = ("long user alibi", "long user softcap", "long user of own blocks")
    found = {x["variant"]: x for x in compiled("sm90", *names, "--exactly")}
    assert {name: x["kernel"] for name, x in found.items()} == dict(
        zip(names, ("blocks_kernel", "blocks_kernel", "attention_kernel"))
    )
    for name in names[:2]:
        loops = [x for x in found[name]["innermost"] if x.get("HGMMA", 0) >= 8]
        assert not any(x.get("LDL", 0) + x.get("STL", 0) for x in loops), "a loop over keys spills"


@FOR_NVIDIA
def test_explain_says_what_the_compiler_said(tmp_path: Any) -> None:
    import os

    for mod, args, words in (
        ("alibi", "float32", "Hopper's"),
        ("own_blocks", "", "a score_mod that Gluon does not compile (GluonSemantic.arange() missing"),
    ):
        command = ["-m", "paged_attn", "explain", "--device", "h200"]
        command += ["--score-mod", f"tests.support.score_mods:{mod}", "--score-mod-args", args]
        environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
        done = warm.run(command, environment)
        assert done.returncode == 0, done.stderr
        assert words in " ".join(done.stdout.split())
