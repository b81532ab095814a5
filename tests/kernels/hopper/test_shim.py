"""What the shim promises: today's names where they are, others where they have changed, and a reason where none is."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from paged_attn.kernels.hopper import shim
from tests.support import warm

ROOT = Path(__file__).parents[3]
KERNELS = sorted(path for path in (ROOT / "paged_attn" / "kernels" / "hopper").rglob("*.py") if path.name != "shim.py")
MODULES = ("gl", "tma", "mbarrier", "async_copy")
RENAMED = {"thread_barrier", "async_copy_global_to_shared", "async_copy_shared_to_global", "_reinterpret"}

# Gluon as later versions have it: new names, and what the old ones have become, if anything.
RENAME = """
import functools
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

called = set()

def rename(place, old, new, stays):
    if not hasattr(place, old):  # this Triton is a later one
        old = new
    function = getattr(place, old)

    @functools.wraps(function)
    def renamed(*args, **kwargs):
        called.add(new)
        return function(*args, **kwargs)

    @functools.wraps(function)
    def removed(*args, **kwargs):
        raise RuntimeError(f"{old} has been removed")

    setattr(place, new, renamed)
    if old == new:
        return
    if stays:
        setattr(place, old, removed)
    else:
        delattr(place, old)

rename(gl, "thread_barrier", "barrier", stays=False)
rename(tma, "async_copy_global_to_shared", "async_load", stays=True)
rename(gl.shared_memory_descriptor, "_reinterpret", "reinterpret", stays=False)
"""


def said(program: str, **environ: str) -> list[str]:
    """The lines that a Python of its own prints, whose kernels are compiled."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "PAGED_ATTN_HOPPER": "1"} | environ
    done = warm.run(["-c", program], environment, ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def attributes(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(what, name) of every `what.name` in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.value.id if isinstance(node.value, ast.Name) else "", node.attr


def test_the_first_known_name_is_taken() -> None:
    both, old = SimpleNamespace(new=1, old=2), SimpleNamespace(old=2)
    assert shim.first_of(both, "new", "old") == 1
    assert shim.first_of(old, "new", "old") == 2


def test_names_that_nothing_has_are_told_as_a_failed_import() -> None:
    with pytest.raises(ImportError, match=r"hopper\.tma has no newest or new or old"):
        shim.first_of(shim.tma, "newest", "new", "old")


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_kernels_have_all_of_gluon_from_the_shim(path: Path) -> None:
    tree = ast.parse(path.read_text())
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not any("gluon" in module for module in imported)
    used = set(attributes(tree))
    assert not RENAMED & {name for _, name in used}
    missing = [f"{what}.{name}" for what, name in used if what in MODULES and not hasattr(getattr(shim, what), name)]
    assert missing == []


def test_what_the_shim_offers_is_what_kernels_take() -> None:
    taken = set()
    for path in KERNELS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "shim":
                taken |= {alias.name for alias in node.names}
    assert taken == set(shim.__all__)


# Both read slots as another type.
@pytest.mark.parametrize(
    "variant, names",
    {
        "decode split e4m3": ["async_load", "barrier", "reinterpret"],
        "prefill head_dim 64": ["async_load", "barrier", "reinterpret"],
    }.items(),
)
def test_kernels_compile_under_the_names_of_later_versions(variant: str, names: list[str], tmp_path: Path) -> None:
    program = f"""
from tests.machine_code import compile_calls
from tests.support.variants import calls

kernel, = compile_calls("sm90", [call for call in calls([{variant!r}]) if call[0] == {variant!r}])
print(kernel[1].metadata.name)
print(*sorted(called))
"""
    # what was compiled under other names is found on disk
    kernel, called = said(RENAME + program, TRITON_CACHE_DIR=str(tmp_path))
    assert kernel in ("shares_kernel", "blocks_kernel")
    assert called.split() == names


def test_without_a_name_the_portable_kernels_run_with_one_warning() -> None:
    program = """
import warnings
from triton.experimental.gluon import language as gl

for name in ("thread_barrier", "barrier"):
    if hasattr(gl, name):
        delattr(gl, name)
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    from paged_attn.kernels.hopper import dialect
    from paged_attn.launching import triton_trial
    print(dialect.gluon_available(), dialect.gluon_available(), len(heard))
print(dialect.why_no_gluon())
"""
    reason = "they need another Triton: triton.experimental.gluon.language has no barrier or thread_barrier"
    assert said(program) == ["False False 1", reason]


@pytest.mark.parametrize(("asked", "taken"), [("", False), ("0", False), ("1", True)])
def test_a_triton_that_is_not_known_runs_the_hopper_kernels_where_asked_to(asked: str, taken: bool) -> None:
    """Where no GPU can try them."""
    program = """
import triton, warnings

triton.__version__ = "9.9.0"
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    from paged_attn.kernels.hopper import dialect
    from paged_attn.launching import triton_trial
print(dialect.gluon_available(), triton_trial.why_untrusted("sm90") is None, len(heard))
"""
    assert said(program, PAGED_ATTN_HOPPER=asked, CUDA_VISIBLE_DEVICES="") == [f"{taken} False 0"]


def test_without_a_name_a_call_runs_on_the_portable_kernels() -> None:
    """The planner of the Hopper kernels is imported, and asked, where Gluon is not to be had."""
    program = """
import torch
from triton.experimental.gluon import language as gl

for name in ("thread_barrier", "barrier"):
    if hasattr(gl, name):
        delattr(gl, name)
import paged_attn

cache, table, lens = torch.ones(2, 16, 2, 64), torch.ones(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
print(float(paged_attn.paged_attention(torch.ones(1, 4, 64), cache, cache.clone(), table, lens).sum()))
"""
    assert said(program, TRITON_INTERPRET="1") == [str(4.0 * 64)]
