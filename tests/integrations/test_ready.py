"""Kernels of an engine before its first request: once for a host, in processes that may not have children, and no fault
that would stop it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from click.testing import CliRunner

from paged_attn.cli import main
from paged_attn.integrations import engine_kernels as home
from paged_attn.launching import platform
from paged_attn.preparation import subprocess as apart
from paged_attn.preparation.engine_steps import Padded, Served, plain
from paged_attn.preparation.manifest import Asked
from paged_attn.preparation.model import Model, distinct, variants_of
from paged_attn.preparation.prepare import Summary
from tests.preparation.asked import H200, TINY
from tests.preparation.models import BF16, LLAMA
from tests.support.own_process import run

compiles = pytest.mark.skipif(
    "nvidia" not in triton.backends.backends, reason="this Triton does not compile for nvidia"
)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a host hears; nothing was made ready before."""
    monkeypatch.setattr(home, "_done", set())
    monkeypatch.delenv(home.VARIABLE, raising=False)
    return []


def make_ready(told: list[str], served: Any = lambda: [TINY], device: Any = H200) -> Summary | None:
    return home.ready(served, device, told.append, lambda text: told.append(f"WARNING {text}"))


# ---- whether, and how often ----------------------------------------------------------------------------------------


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    asked: list[Asked] = []

    def prepare(what: Asked) -> tuple[Summary, bool]:
        asked.append(what)
        return Summary(7, 5, 1.25), True

    monkeypatch.setattr(home, "_prepare", prepare)
    return asked


def test_one_line_says_what_was_done(told: list[str], prepared: list[Asked]) -> None:
    assert make_ready(told, lambda: [TINY, TINY]) == Summary(7, 5, 1.25)
    assert told == [
        "paged_attn: 7 kernels, 5 of them compiled now, in 1.2 s; those of steps of few new tokens follow meanwhile"
    ]
    assert prepared == [Asked((TINY,), H200, local=False)]


def test_what_was_made_ready_is_not_again(told: list[str], prepared: list[Asked]) -> None:
    other = TINY._replace(max_seqs=2)
    make_ready(told)
    assert make_ready(told) is None
    make_ready(told, lambda: [TINY, other])
    assert [x.served for x in prepared] == [(TINY,), (other,)]


def test_a_variable_turns_it_off(told: list[str], prepared: list[Asked], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(home.VARIABLE, "0")
    assert make_ready(told, lambda: pytest.fail("nothing is asked")) is None
    assert told == []
    assert prepared == []


@pytest.mark.parametrize("interpreted", [True, False])
def test_on_the_cpu_and_in_the_interpreter_there_is_nothing_to_do(
    interpreted: bool, told: list[str], prepared: list[Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(home, "INTERPRET", interpreted)
    for device in [torch.device("cpu")] + [torch.device("cuda")] * interpreted:
        assert make_ready(told, lambda: pytest.fail("nothing is asked"), device) is None
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not home.wanted(torch.device("cuda"))
    monkeypatch.setattr(torch.version, "hip", None)
    assert home.wanted(torch.device("cuda")) != interpreted
    assert (told, prepared) == ([], [])


def test_no_fault_reaches_the_host(told: list[str], prepared: list[Asked], monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_ready(told, lambda: [TINY, 1 / 0]) is None
    monkeypatch.setattr(home, "_prepare", lambda _: (_ for _ in ()).throw(RuntimeError("no disk")))
    assert make_ready(told) is None
    assert [x.split(": ", 1)[1] for x in told] == [
        "kernels will be compiled when a call first needs them: ZeroDivisionError: division by zero",
        "kernels will be compiled when a call first needs them: RuntimeError: no disk",
    ]
    assert all(x.startswith("WARNING") for x in told)


# ---- which ---------------------------------------------------------------------------------------------------------


def test_usual_steps_are_decodes_and_steps_with_prompts() -> None:
    served = Served(Model(**LLAMA), max_seqs=8, max_tokens=512, max_seqlen=4096, bucket=1024, decode=3)
    every, usual = list(served.batches()), list(served.batches(usual=True))
    assert {*usual} < {*every}
    assert {x.max_seqlen_q for x in usual if x.max_seqlen_q < 64} == {1, 3}
    assert {x.max_seqlen_q for x in every} > {2, 5, 33}
    assert {x.max_seqlen_k for x in every} == {1024, 2048, 3072, 4096}
    assert all(x.ragged for x in every)
    assert {x.ragged for x in served._replace(ragged=False).batches() if x.max_seqlen_q == 1} == {False}
    few, all_of = (
        {v for x in distinct(served.model, some, H200) for v in variants_of(served.model, x, H200)}
        for some in (usual, every)
    )
    assert few < all_of
    assert {x.max_seqlen_q for x in served._replace(decodes=True).batches()} == {1, 2, 3}, (
        "of few tokens there are fewer"
    )


# ---- processes -----------------------------------------------------------------------------------------------------

ENGINE = """
import json, multiprocessing, sys
from tests.preparation.asked import H200, TINY

def worker(number):
    from paged_attn.integrations.engine_kernels import ready
    done = ready(lambda: [TINY], H200, print, print)
    print(json.dumps(done), flush=True)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=worker, args=(n,), daemon=True) for n in range(2)]
    for x in workers:
        x.start()
    for x in workers:
        x.join()
"""


@compiles
@pytest.mark.skipif(not platform.INTERPRET, reason="is the same with a GPU")
def test_of_two_daemonic_workers_one_compiles_and_the_other_finds_all(tmp_path: Path) -> None:
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_INTERPRET": "0",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }  # fmt: skip
    environment.pop(home.VARIABLE, None)
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr[-4000:]
    found = [Summary(*json.loads(line)) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(found) == 2, done.stdout
    first, second = sorted(found, key=lambda x: -x.compiled)
    assert first.kernels == first.compiled == second.kernels > 1
    assert second.compiled == 0


def test_the_command_prepares_for_an_image_what_the_host_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names on disk equal those of vLLM's layers, for Llama 8B and for layers with sinks and windows over fp8."""
    asked: list[Asked] = []
    monkeypatch.setattr(apart, "prepare", lambda what: asked.append(what) or Summary(7, 5, 1.5))
    words = [
        "prepare",
        "--host",
        "vllm",
        "--max-seqs",
        "64",
        "--max-tokens",
        "2048",
        "--max-seqlen",
        "8190",
        "--device",
        "h200",
        "--json",
    ]
    for more in ("", "--kv-dtype e4m3 --sinks bfloat16 --window 127 -1 --drafts 3"):
        result = CliRunner().invoke(main, [*words, *more.split()])
        assert result.exit_code == 0, result.output
    sizes: dict[str, Any] = dict(max_seqs=64, max_tokens=2048, max_seqlen=8192, bucket=1024)
    model = plain(heads=32, kv_heads=8, head_dim=128, page_size=16, dtype=BF16, kv_layout="HND", side_by_side=True)
    other = model._replace(cache_dtype=torch.float8_e4m3fn, scales="tensor", sinks=BF16, window_size=(127, -1))
    served = [Served(model, **sizes), Served(other, **sizes, decode=4)]
    assert asked == [Asked((x,), H200, local=False) for x in served]


PADDED = Padded(
    TINY.model, max_seqs=1, max_tokens=64, max_seqlen=16, widths=(16,), bucket=16, step=64, exact=True
)  # fmt: skip
BEGIN = """
import json, os, sys, threading, time
import torch
from paged_attn.integrations.engine_kernels import begin
from tests.preparation.asked import H200
from tests.integrations.test_ready import PADDED

turning = threading.Event()
others = [threading.Thread(target=lambda: [torch.ones(64, 64) @ torch.ones(64, 64) for _ in iter(turning.is_set, True)])
          for _ in range(2)]
for x in others:
    x.start()
torch.set_default_device("meta")
told = []
for served in ([PADDED], [PADDED, PADDED], [PADDED._replace(max_seqlen=15)]):
    begun = begin(lambda: served, H200, told.append, told.append)
    if begun is not None:
        begun.wait()
    print(json.dumps([begun is not None, told]), flush=True)
turning.set()
"""


@compiles
@pytest.mark.skipif(not platform.INTERPRET, reason="is the same with a GPU")
def test_forked_processes_compile_while_the_host_goes_on(tmp_path: Path) -> None:
    """The host has threads that work meanwhile; what it began with, and what lies on disk, is not compiled again."""
    environment = {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_INTERPRET": "0"}
    rows = [json.loads(line) for line in run(BEGIN, **environment).splitlines() if line.startswith("[")]
    assert [begun for begun, _ in rows] == [True, False, True]
    first, second = (line.split(" in ")[0] for line in rows[-1][1])
    count = int(first.split()[1])
    assert count > 2
    assert first == f"paged_attn: {count} kernels, {count} of them compiled now,"
    assert second == f"paged_attn: {count} kernels, 0 of them compiled now,"
    (later,) = (json.loads(x) for x in run(BEGIN, **environment).splitlines()[:1])
    assert later == [False, []], "another process finds them"


def test_no_fault_of_what_is_begun_reaches_the_host(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    warn = lambda text: told.append(f"WARNING {text}")  # noqa: E731
    assert home.begin(lambda: [PADDED, 1 / 0], H200, told.append, warn) is None
    monkeypatch.setattr(home, "Begun", lambda *_: (_ for _ in ()).throw(OSError("no processes")))
    monkeypatch.setattr(home.manifest, "found", lambda _: None)
    assert home.begin(lambda: [PADDED], H200, told.append, warn) is None
    assert [x.split(": ", 2)[2] for x in told] == ["ZeroDivisionError: division by zero", "OSError: no processes"]
    assert home.begin(lambda: pytest.fail("nothing is asked"), torch.device("cpu"), told.append, warn) is None


def test_processes_that_do_not_answer_are_ended(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        """Processes that are done when they are killed."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self.task: Future[Any] = Future()

        def begin(self, *_: Any) -> list[Future[Any]]:
            return [self.task]

        def kill(self) -> None:
            self.task.set_exception(BrokenPipeError("killed"))

        def __exit__(self, *_: object) -> None:
            told.append("closed")

    monkeypatch.setattr(home, "Pool", Silent)
    begun = home.Begun(Asked((PADDED,), H200, local=False), [PADDED.work()], told.append, told.append)
    begun.wait(0.01)
    assert told[0] == "paged_attn: kernels will be compiled when a call first needs them: BrokenPipeError: killed"


def test_padded_batches_are_decodes_by_tables_and_prompts_by_tokens() -> None:
    some = Padded(Model(**LLAMA), 12, 200, 3000, widths=(512,), bucket=1024, step=64, exact=True)
    found = [*some.batches()]
    assert {(x.seqs, x.tokens, x.max_seqlen_k) for x in found if not x.ragged} == {
        (n, n, 512) for n in (1, 2, 4, 8, 12)
    }
    assert {(x.seqs, x.tokens) for x in found if x.ragged} == {(12, n) for n in (64, 128, 192, 200)}
    assert {x.max_seqlen_k for x in found if x.ragged} == {1024, 2048, 3072}
    assert all(x.max_seqlen_q == (x.tokens if x.ragged else 1) for x in found)
    every = some._replace(exact=False)
    assert {x.seqs for x in every.batches() if x.ragged} > {1, 3, 12}
    assert every.covers(some)
    for other in (dict(max_seqs=13), dict(max_seqlen=3001), dict(widths=(1024,)), dict(step=32)):
        assert not every.covers(some._replace(**other)), other


SERVE = """
import json

import torch
import triton

import paged_attn
from paged_attn.integrations.engine_kernels import ready
from paged_attn.preparation.engine_steps import Padded, Served, plain

compiled = []


def listener(*, metadata, cache_hit, **_):
    compiled.extend([] if cache_hit else [metadata["name"]])


print(torch.compile(lambda x: x.pow(2.5) + 1)(torch.ones(8, device="cuda")).sum() > 0)  # as engines do before
bf16 = torch.bfloat16
model = plain(heads=32, kv_heads=8, head_dim=128, page_size=16, dtype=bf16, kv_layout="HND", side_by_side=True)
served = Served(model, max_seqs=64, max_tokens=64, max_seqlen=8192, bucket=1024, decodes=True)
told = []
done = ready(lambda: [served], torch.device("cuda"), told.append, told.append)
assert done is not None, told
assert done.kernels == done.compiled > 3, told
triton.knobs.compilation.listener = listener
k, v = torch.zeros(600, 8, 16, 256, dtype=bf16, device="cuda").split(128, -1)
for seqs in (1, 2, 3, 7, 16, 33, 64):
    q = torch.zeros(seqs, 32, 128, dtype=bf16, device="cuda")
    lens = torch.ones(seqs, dtype=torch.int32, device="cuda")
    table = torch.zeros(seqs, 512, dtype=torch.int32, device="cuda")
    starts = torch.arange(seqs + 1, dtype=torch.int32, device="cuda")
    for most in (1024, 4096, 8192):
        bounds = dict(max_seqlen_q=1, max_seqlen_k=most)
        paged_attn.paged_attention(q, k, v, table, lens, starts, kv_layout="HND", out=torch.empty_like(q), **bounds)
torch.cuda.synchronize()
print(json.dumps(compiled))
"""


@pytest.mark.gpu
def test_decodes_compile_nothing_once_they_are_ready(device: str, tmp_path: Path) -> None:
    """In a process of its own: kernels of tests that call functions of ours make the keys of these in their order."""
    said = run(SERVE, TRITON_CACHE_DIR=str(tmp_path))
    assert json.loads(said.splitlines()[-1]) == []
