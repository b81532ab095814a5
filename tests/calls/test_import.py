"""Importing the package changes nothing and starts nothing; what a call changes meanwhile is as before when it ends."""

from __future__ import annotations

import pytest
import torch

from tests.support.own_process import run

STATE = """
import os, sys, threading, warnings
import torch, triton
import triton.language as tl

def state():
    modules = (tl, tl.core, tl.standard, tl.math, tl.tensor, tl.core.tensor_descriptor_base)
    # the interpreter adds names of its own to modules whose functions it rewrites: they hide nothing
    language = {(str(m), name): id(value) for m in modules for name, value in vars(m).items()}
    language = {key: language[key] for key in known}
    return (
        dict(os.environ), list(warnings.filters), threading.active_count(), vars(triton.knobs.runtime).copy(),
        torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(), language,
    )

modules = (tl, tl.core, tl.standard, tl.math, tl.tensor, tl.core.tensor_descriptor_base)
known = {(str(m), name) for m in modules for name in vars(m)}
before = state()
import paged_attn
assert state() == before
"""


def test_importing_changes_nothing() -> None:
    run(STATE + "assert not torch.cuda.is_initialized()")


def test_importing_reads_no_kernels() -> None:
    heavy = "{'calls.attend', 'kernels', 'launching.platform', 'launching.launch', 'records', 'preparation'}"
    run(
        f"import sys, paged_attn\nassert not {{f'paged_attn.{{x}}' for x in {heavy}}} & {{*sys.modules}}\n"
        "assert paged_attn.prepare.__name__ == 'prepare' and 'prepare' in dir(paged_attn)"
    )


@pytest.mark.kernels
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU nothing is interpreted")
def test_an_interpreted_call_leaves_triton_as_it_was() -> None:
    """Kernels of the user's, which are compiled, find their language."""
    run(
        STATE + "assert call() < 1e-5\nassert state() == before\n"
        "@triton.jit\ndef kernel(x): tl.store(x, tl.max(tl.arange(0, 4), 0))\n"
        "assert isinstance(kernel, triton.runtime.JITFunction)\n"
        "assert isinstance(tl.max, triton.runtime.JITFunction) and tl.core.is_builtin(tl.core.arange)"
    )


@pytest.mark.kernels
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU nothing is interpreted")
def test_a_failed_interpreted_call_leaves_triton_as_it_was() -> None:
    run(
        STATE + "from paged_attn.kernels.common import softmax\n"
        "def fails(*_): raise RuntimeError('of a helper')\n"
        "softmax.finish.rewritten_fn[softmax.finish.fn] = fails\n"
        "try: call()\nexcept triton.runtime.errors.InterpreterError as error: assert 'of a helper' in str(error)\n"
        "else: raise AssertionError\nassert state() == before"
    )


@pytest.mark.kernels
@pytest.mark.parametrize("asked, interpreted", [("1", True), ("0", False)])
def test_the_user_says_what_is_interpreted(asked: str, interpreted: bool) -> None:
    script = "from paged_attn.launching import platform\n"
    script += "from paged_attn.kernels.portable.attention_kernel import attention_kernel as kernel\n"
    script += "print(platform.INTERPRET, type(kernel).__name__)"
    printed = run(script, TRITON_INTERPRET=asked)
    assert printed.split() == [str(interpreted), "InterpretedFunction" if interpreted else "JITFunction"]


def test_the_first_call_takes_the_place_of_what_imports() -> None:
    """A later one goes straight to it."""
    run(
        "import paged_attn.api as api\nassert api.attend.__module__ == 'paged_attn.calls.untraced'\ncall()\n"
        "from paged_attn.calls import attend\nassert api.attend is attend.attend"
    )


@pytest.mark.gpu
def test_a_child_forked_after_the_import_has_the_gpu() -> None:
    run("import os, torch, paged_attn\nif not os.fork(): os._exit(call() > 1e-2)\nassert os.wait()[1] == 0")


def test_hosts_may_ask_every_value_for_its_attributes() -> None:
    """vLLM asks all values of all modules for their __dict__; anything but an AttributeError ends its worker."""
    run(
        "import pkgutil, importlib, sys, paged_attn\n"
        "for found in pkgutil.walk_packages(paged_attn.__path__, 'paged_attn.'):\n"
        "    if not {'integrations', '__main__', 'cli', 'plots'} & {*found.name.split('.')}:\n"
        "        importlib.import_module(found.name)\n"
        "modules = [m for name, m in sys.modules.items() if name.startswith('paged_attn')]\n"
        "assert any('STREAM' in vars(m) for m in modules)\n"
        "for module in modules:\n"
        "    for value in list(vars(module).values()): hasattr(value, '__dict__'), hasattr(value, 'nothing')\n"
    )


def test_an_argument_without_a_tensor_has_no_attributes() -> None:
    from paged_attn.launching.template import Hole

    assert not hasattr(Hole(-1), "shape")
    assert not hasattr(Hole(0, []), "shape")
    assert not hasattr(Hole.__new__(Hole), "shape")  # as unpickling asks
    assert Hole(0, [torch.zeros(3)]).shape == (3,)
