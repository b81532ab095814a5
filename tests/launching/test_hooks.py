"""Triton's compile hooks, which engines set: they hear of every kernel, and none fails for it."""

from __future__ import annotations

import json

from tests.support.own_process import run

SCRIPT = """
import json
import torch, triton
import tests.support.variants
from tests.machine_code import compile_calls

told = []
def hear(*, repr, compile, **_):
    told.append((repr.partition("[")[0], compile["specialization_data"]))

triton.knobs.runtime.jit_post_compile_hook = hear
triton.knobs.runtime.jit_cache_hook = hear
names = ("prefill user alibi", "decode hnd", "write")
calls = [call for call in tests.support.variants.calls() if call[0] in names]
for _ in compile_calls("sm90", calls): pass
print(json.dumps(told))
"""


def test_a_hook_is_told_of_each_kernel_by_json_that_has_its_records() -> None:
    told = json.loads(run(SCRIPT, TRITON_INTERPRET="0"))
    assert {name for name, _ in told} >= {"attention_kernel", "blocks_kernel", "write_kv_kernel"}
    for name, data in told:
        assert json.loads(data)["name"].endswith(name)
    assert any("alibi" in data for _, data in told)
