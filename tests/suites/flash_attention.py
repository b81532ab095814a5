"""FlashAttention's own tests over paged_attn.integrations.flash_attn: what stands in for its modules, and what changes.

SUITE names a checkout of Dao-AILab/flash-attention at 0251105.  Tests are read from there.  Changed is this: backward
passes are cut, grids are sampled, the device is this machine's, and races are looked for in 20 runs.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import paged_attn
from paged_attn.integrations import flash_attn as ours
from tests.suites.grids import grid

CHECKOUT = Path(os.environ["SUITE"]) if os.environ.get("SUITE") else None
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
CAPABILITY = (9, 0)  # whose cases are the most
LARGE = types.SimpleNamespace(total_memory=1 << 40)
MOST_ON_A_CPU = 30_000  # queries times keys of a sequence, interpreted
ABSENT = "needs a checkout of FlashAttention: make test-suites SUITE=path"
DROPOUT, BACKWARD, INNER = "with dropout", "backward passes alone", "inner functions of FlashAttention"
DEVICE_VALUES = "errors of the device's values, which checked calls give"
ASIDE = {DROPOUT, BACKWARD}
WHOLE = {
    "test_flash_attn_varlen_paged_kv_num_splits": INNER,
    "test_flash_attn_generator_arg_must_be_none": INNER,
    "test_flash3_bw_compatibility": INNER,
    "test_flash_attn_kvcache_paged_block_table_bounds": DEVICE_VALUES,
} | {
    f"test_flash_attn_{name}": BACKWARD
    for name in ("bwd_overflow", "bwd_transpose", "bwd_varlen_overflow", "deterministic", "varlen_deterministic")
}  # fmt: skip
# Text of the tests by what stands there instead; num_splits and metadata steer nothing here, so one of each is enough.
CHANGES = {
    r"@pytest\.mark\.parametrize\(": "@grid(",
    r"torch\.cuda\.get_device_capability\(": "capability(",
    r"torch\.cuda\.get_device_properties\(": "properties(",
    r"torch\.autograd\.grad\(": "no_gradients(",
    r'"cuda"': "DEVICE",
    r"\brange\(\d{3,}\)": f"range({20 if HAS_GPU else 2})",  # interpreted, nothing races
    r"70 \* 1024 \*\* 3": "1024 ** 3",
    r"= \[1, 3(, 0)?\] if not DISABLE_SPLIT": "= [1] if not DISABLE_SPLIT",
    r"precompute_metadata_vals = \[False, True\]": "precompute_metadata_vals = [False]",
}


def reason(test: str, case: dict[str, Any]) -> str | None:
    return WHOLE.get(test) or (DROPOUT if case.get("dropout_p") else None)


def fits(case: dict[str, Any]) -> bool:
    """Whether this machine can afford a case."""
    keys = [n for name, n in case.items() if name.startswith("seqlen") and type(n) is int]
    area = keys[0] * keys[-1] if keys else 1
    return HAS_GPU or area * max(1, case.get("num_splits") or 1) <= MOST_ON_A_CPU


def load(path: str, namespace: dict[str, Any]) -> None:
    """Run the text of a test file, with what changes, in a module's namespace; skips where there is no checkout."""
    if CHECKOUT is None or not (CHECKOUT / path).is_file():
        pytest.skip(ABSENT if CHECKOUT is None else f"{ABSENT}, for {CHECKOUT} has no {path}", allow_module_level=True)
    stand_in(CHECKOUT)
    text = (CHECKOUT / path).read_text(encoding="utf-8")
    for found, instead in CHANGES.items():
        text = re.sub(found, instead, text)
    namespace.update(grid=grid, DEVICE=DEVICE, capability=lambda _: CAPABILITY, properties=lambda _: LARGE)
    namespace.update(no_gradients=no_gradients)
    exec(compile(text, str(CHECKOUT / path), "exec"), namespace)


def tests_in(namespace: dict[str, Any]) -> list[Any]:
    return [x for name, x in namespace.items() if name.startswith("test_") and callable(x)]


def no_gradients(outputs: Any, inputs: Any, *more: Any) -> tuple[torch.Tensor, ...]:
    """Zeros beside zeros."""
    given = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    return tuple([torch.zeros((), device=x.device, dtype=x.dtype).expand(x.shape) for x in given])


def stand_in(checkout: Path) -> None:
    """Modules of FlashAttention's names: our functions, and from the checkout what tests compute references with."""
    if "flash_attn_interface" in sys.modules:
        return
    os.environ |= {f"FLASH_ATTENTION_DISABLE_{name}": "TRUE" for name in ("BACKWARD", "PACKGQA")}  # which is ignored
    torch.cuda.get_device_capability = torch.cuda.get_device_capability if HAS_GPU else lambda *_: CAPABILITY
    package = ours.install()
    package.__path__ = [str(checkout / "flash_attn")]
    func, varlen = ours.flash_attn_func, ours.flash_attn_varlen_func
    # packed calls, which are not offered, as views: they try keys that lie apart
    packed: dict[str, Callable[..., Any]] = dict(
        flash_attn_qkvpacked_func=lambda qkv, *more, **named: func(*qkv.unbind(2), *more, **named),
        flash_attn_kvpacked_func=lambda q, kv, *more, **named: func(q, *kv.unbind(2), *more, **named),
        flash_attn_varlen_qkvpacked_func=lambda qkv, cu, most, *more, **named: varlen(
            *qkv.unbind(1), cu, cu, most, most, *more, **named
        ),
        flash_attn_varlen_kvpacked_func=lambda q, kv, *more, **named: varlen(q, *kv.unbind(1), *more, **named),
    )
    vars(package).update(packed)
    vars(sys.modules["flash_attn.flash_attn_interface"]).update(_get_block_size_n=None, USE_TRITON_ROCM=False)
    third = types.ModuleType("flash_attn_interface")
    vars(third).update(
        flash_attn_func=func, flash_attn_varlen_func=varlen, flash_attn_with_kvcache=ours.flash_attn_with_kvcache,
        flash_attn_combine=combine, get_scheduler_metadata=lambda *_, **__: torch.zeros(4, device=DEVICE).int(),
    )  # fmt: skip
    sys.modules["flash_attn_interface"] = third
    for name in ("padding", "test_util"):
        _from_file(name, checkout / "hopper" / f"{name}.py")
    if not HAS_GPU:
        importlib.import_module("flash_attn.layers.rotary").apply_rotary_emb = rotate


def combine(outs: torch.Tensor, lses: torch.Tensor, out: Any = None, out_dtype: Any = None) -> Any:
    """flash_attn_combine of [splits, batch, len_q, heads, dim] by merge_states."""
    splits, batch, length, heads, dim = outs.shape
    joined, lse = paged_attn.merge_states(
        outs.reshape(splits, batch * length, heads, dim), lses.reshape(splits, batch * length, heads)
    )
    return joined.view(batch, length, heads, dim).to(out_dtype or joined.dtype), lse.view(batch, length, heads)


def rotate(x: torch.Tensor, cos: Any, sin: Any, interleaved: bool = False, seqlen_offsets: Any = 0) -> torch.Tensor:
    """apply_rotary_emb of [batch, length, heads, dim], whose own kernel wants a GPU."""
    offsets = torch.as_tensor(seqlen_offsets).reshape(-1, 1)
    at = (offsets + torch.arange(x.shape[1])).clamp(max=len(cos) - 1)
    half, turn = cos.shape[1], torch.complex(cos.float(), sin.float())[at][:, :, None]
    parts = x[..., : 2 * half].float()
    pairs = parts.unflatten(-1, (half, 2)) if interleaved else parts.unflatten(-1, (2, half)).transpose(-1, -2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    turned = turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)
    return torch.cat([turned.to(x.dtype), x[..., 2 * half :]], -1)


def _from_file(name: str, path: Path) -> None:
    """A module that tests import by its bare name."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
