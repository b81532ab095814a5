"""Forks at any moment, spawned processes, and the end of a process: nothing of ours hangs or is half there."""

from __future__ import annotations

import pytest
import torch

from tests.support.own_process import ended, run

on_the_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA itself does not survive a fork")
FORK = """
import os, sys, threading, time
import torch
torch.set_num_threads(1)  # torch's own threads do not survive a fork
import paged_attn
# nor does what one of its functions makes when it is first called, if another thread is in the midst of that
given = inputs()
want = paged_attn.reference.paged_attention(*given)
float((torch.empty_like(given[0], memory_format=torch.contiguous_format) - want).abs().max()), torch.zeros(0)

def fork():
    child = os.fork()
    if not child:
        code = 1
        try:
            code = int(not call(1) < 1e-5)
        finally:
            os._exit(code)
    return child

def well(child): assert os.waitpid(child, 0)[1] == 0
"""


@on_the_cpu
@pytest.mark.parametrize("calls", [0, 1, 2])
def test_a_child_calls_after_any_number_of_calls(calls: int) -> None:
    run(FORK + f"for seed in range({calls}): call(seed)\nwell(fork())\nassert call() < 1e-5")


@on_the_cpu
@pytest.mark.parametrize(
    "moment",
    [
        "first.wait()",
        "'paged_attn.launching.platform' in sys.modules",
        "'paged_attn.kernels' in sys.modules",
        "launched",
    ],
)
def test_a_child_calls_whatever_another_thread_was_in_the_midst_of(moment: str) -> None:
    """The first import, the reading of kernels, an interpreted launch: the fork waits for what is not whole."""
    wait = "first.wait()" if "wait" in moment else f"while not ({moment}): time.sleep(0)"
    run(
        FORK
        + f"""
from triton.runtime import interpreter
launched, first = [], threading.Event()
plain = interpreter.GridExecutor.__call__
def noted(*args, **options):
    launched.append(1)
    return plain(*args, **options)
interpreter.GridExecutor.__call__ = noted
def work():
    first.set()
    paged_attn.paged_attention(*given)
thread = threading.Thread(target=work)
thread.start()
{wait}
children = [fork() for _ in range(2)]
thread.join()
for child in children: well(child)
"""
    )


@on_the_cpu
def test_locks_are_free_in_a_child_whoever_held_them() -> None:
    run(
        FORK
        + """
call()
from paged_attn.calls import call_cache
from paged_attn.launching import locks, scratch
held, done = threading.Event(), threading.Event()
def hold():
    with call_cache._forgetting, scratch._keeping, scratch.arena(torch.device("cpu")).lock:
        held.set()
        done.wait()
thread = threading.Thread(target=hold)
thread.start()
held.wait()
child = fork()
if child:
    well(child)
    done.set()
    thread.join()
"""
    )


@pytest.mark.parametrize("call", ["call()", "paged_attn.prepare"])
def test_a_fork_waits_for_whatever_a_first_call_imports(call: str) -> None:
    """Else a child may inherit the lock of a module that another thread was importing, and wait for it for ever."""
    run(
        f"""
import sys
import paged_attn
from paged_attn.launching.locks import FIRST
inputs()
began = []
def hook(event, args):
    if event == "import" and args[0].split(".")[0] in ("paged_attn", "triton"):
        began.append(args[0])
        assert FIRST._is_owned(), args[0]
sys.addaudithook(hook)
{call}
assert "paged_attn.planning.dialects" in began or "paged_attn.preparation.prepare" in began, began
"""
    )


@on_the_cpu
def test_a_fork_inside_of_what_a_fork_waits_for_does_not_wait() -> None:
    run(FORK + "from paged_attn.launching.locks import FIRST\nwith FIRST: child = fork()\nwell(child)")


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_of_multiprocessing_call(method: str) -> None:
    """Also where the parent has called before."""
    run(
        f"""
import multiprocessing
if __name__ == "__main__":
    assert call() < 1e-2
    with multiprocessing.get_context("{method}").Pool(2) as pool:
        errors = pool.map(call, range(2))
    assert len(errors) == 2 and max(errors) < 1e-2
"""
    )


def test_a_process_ends_while_a_daemon_thread_calls() -> None:
    """The process does not hang.  Python before 3.14 ends such a thread at its return, where torch's C++ may abort."""
    done = ended(
        "import threading\ncall()\nbegun = threading.Event()\n"
        "def work():\n    while True:\n        begun.set()\n        call(1)\n"
        "threading.Thread(target=work, daemon=True).start()\nbegun.wait()\nprint('ends', flush=True)"
    )
    assert done.stdout == "ends\n"
    assert done.returncode == 0 or "terminate called without an active exception" in done.stderr, done.stderr


def test_a_call_at_exit_works() -> None:
    """Compiled before, for Python starts no compiler when it exits."""
    assert "error" in run("import atexit\ncall()\natexit.register(lambda: print('error', call() < 1e-2 or 1 / 0))")


@on_the_cpu
def test_a_first_call_at_exit_works() -> None:
    assert "error" in run("import atexit\natexit.register(lambda: print('error', call() < 1e-2 or 1 / 0))")
