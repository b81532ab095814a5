"""The catalogue of errors: complete, of nothing else, and each entry produced by a test."""

from __future__ import annotations

import ast
import importlib
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import paged_attn
from paged_attn import distributed
from paged_attn.cli import bench_command, demo_command, main
from paged_attn.distributed import groups
from paged_attn.explain import question
from paged_attn.launching import gpus, launch, platform
from paged_attn.preparation import processes
from paged_attn.preparation.score_mod_ref import named, named_by
from paged_attn.serving import scheduler, trace
from paged_attn.serving.tensors import Caches
from tests.checks.test_swapped import call as swapped_call
from tests.checks.test_wrong_calls import TABLE_OF_WRONG
from tests.support.bad_input import accept, call_of
from tests.support.errors import ANY, ROOT, Entry, catalogue, said

# Tables whose rows end in the exact text of the error with which the row is refused.
TABLES = ("checks.test_check.OPTIONS", "checks.test_check_batch.BATCH", "checks.test_check_write.WRITE")
TABLES += ("checks.test_check_write.MERGE", "checks.test_contents.CONTENTS")
TABLES += ("calls.test_page_copies.REFUSED", "calls.test_page_copies.CHECKED")
TABLES += ("calls.test_page_gathers.REFUSED", "calls.test_page_gathers.CHECKED")
TABLES += ("checks.test_check_write_qkv.WRITE_QKV", "checks.test_check_write_qkv.CONTENTS_OF_WRITES")
TABLES += ("features.test_score_mod.REFUSED", "steps.test_step.REFUSED", "steps.test_padding.REFUSED")
# Warnings of a process with another Triton, of which these tests start one.
ELSEWHERE = {
    "the process that compiles ended with status": "test_a_process_that_fails_says_why",
    "paged-attn was not written for Triton": "test_a_check_that_fails_leaves_the_portable_kernels_with_one_warning",
    "the Hopper kernels need another Triton": "test_without_a_name_the_portable_kernels_run_with_one_warning",
}


def lines(text: str) -> Callable[[Path], object]:
    """Reads a trace of this text."""

    def read(folder: Path) -> object:
        path = folder / "trace"
        path.write_text(text, encoding="utf-8")
        return list(trace.read(path))

    return read


def of(call: str, **changes: Callable[[Any], Any]) -> Callable[[Path], object]:
    """The host's check of a call, some of its arguments changed."""
    inputs = call_of(call, "cpu")
    return lambda folder: accept(inputs | {name: change(inputs) for name, change in changes.items()})


def given_back(*numbers: int) -> Callable[[Path], object]:
    def give(folder: Path) -> None:
        some = scheduler.Pages(4)
        some.take(2)
        some.give(numbers)

    return give


def checked(call: str, **changes: Any) -> Callable[[Path], object]:
    return lambda folder: paged_attn.paged_attention(**call_of(call, "cpu") | changes, check=True)


def written(*slots: int) -> Callable[[Path], object]:
    """A checked write into 2 pages of 4."""
    cache, k = torch.zeros(2, 4, 1, 16), torch.zeros(len(slots), 1, 16)
    return lambda folder: paged_attn.write_kv(k, k, cache, cache.clone(), torch.tensor(slots), check=True)


def without_click(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "click", None)
        runpy.run_path(str(ROOT / "paged_attn" / "cli" / "group.py"))


def warned_of(folder: Path) -> None:
    """Make a call that warns; in tests, all warnings are errors."""
    accept(swapped_call("HND", 32, 8, 16, 100) | dict(kv_layout="NHD"))


def without_matplotlib(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        demo_command._check_output(folder / "demo.png")


def prepare_for_the_interpreter(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "INTERPRET", True)
        main(["prepare"], standalone_mode=False)


def command(words: str) -> Callable[[Path], object]:
    return lambda folder: main(words.split(), standalone_mode=False)


def outside_of_a_clone(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_attn, "__file__", str(folder / "paged_attn" / "__init__.py"))
        bench_command.of_checkout("benchmarks.__main__")


def without_triton(call: Callable[[], object]) -> Callable[[Path], object]:
    """In an environment that has none."""

    def run(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(platform, "HAS_TRITON", False)
            patch.setattr(question, "HAS_TRITON", False)
            call()

    return run


def asked_for(dialect: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGED_ATTN_DIALECT", dialect)
        platform._asked()


def in_plain_torch(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "device_of", lambda device: platform.Device("cpu", 2))
        paged_attn.paged_attention(**call_of("plain", "cpu"), score_mod="relu")


def in_the_interpreter(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "INTERPRET", True)
        processes.compile_only(platform.Device("sm90", 132), print)


def sharded(**given: Any) -> Callable[[Path], object]:
    shard: Any = dict(shard=(0, 2, 16), **given)
    return lambda folder: paged_attn.paged_attention(**call_of("plain", "cpu") | shard)


def with_other_lengths(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "gather", lambda x, group: torch.stack([x, x + 1]))
        patch.setattr(torch.distributed, "get_rank", lambda group: 0)
        groups.agree(None, seq_lens=torch.ones(2))


def without_a_rank(folder: Path) -> None:
    peers = distributed.Peers.of_one_process(2, max_tokens=1, heads=2, head_dim=8, timeout=0.0, device="cpu")[0]
    for _ in range(2):
        distributed.merge(torch.zeros(1, 2, 8), torch.zeros(1, 2), peers)


def forked(folder: Path) -> None:
    peers = distributed.Peers.of_one_process(1, max_tokens=1, heads=1, head_dim=8, device="cpu")[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.getpid", lambda: -1)
        distributed.merge(torch.zeros(1, 1, 8), torch.zeros(1, 1), peers)


def captured_at_once(folder: Path) -> None:
    from paged_attn.calls import page_launches

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_launches, "_capturing", lambda device: True)
        patch.setattr(page_launches, "_tables", {})
        paged_attn.copy_pages(torch.zeros(3, 5, 7), torch.tensor([0]), torch.tensor([1]))


def traced_with_a_score_mod(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        paged_attn.paged_attention(**call_of("plain", "cpu"), score_mod=print)


def without_metadata(folder: Path) -> None:
    class Compiled:
        metadata = None

    launch.resize(Compiled, [])


def without_names(folder: Path) -> None:
    shim = pytest.importorskip("paged_attn.kernels.hopper.shim")
    shim.first_of(torch, "nothing", "no_thing")


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
MEMORY = torch.zeros(6, 6, 32, dtype=torch.bfloat16)
NEGATED = torch._neg_view(torch.zeros(6))
PROVOKED: tuple[Callable[[Path], object], ...] = (
    of("plain", alibi_slopes=lambda c: NEGATED),
    lambda folder: paged_attn.copy_pages(MEMORY.to(torch.complex64).conj(), torch.tensor([0]), torch.tensor([1])),
    of("plain", q=lambda c: MEMORY[:5], out=lambda c: MEMORY[1:]),
    of("plain", out=lambda c: MEMORY.as_strided((5, 6, 32), (32, 32, 1))),
    of("plain", sinks=lambda c: c["sinks"].to("meta")),
    of("plain", q=lambda c: c["q"].clone().requires_grad_()),
    of("plain", q=lambda c: c["q"].to("meta")),
    of("plain", sinks=lambda c: c["sinks"].to_sparse()),
    of("plain", q=lambda c: torch.zeros(5, 7, 32, dtype=torch.bfloat16)),
    warned_of,
    lambda folder: paged_attn.merge_states(v=MEMORY, s=MEMORY),
    checked("plain", query_positions=torch.full((5,), 1 << 20, dtype=torch.int32)),
    checked("plain", q_scale=torch.zeros(5)),
    of("plain", window_size=lambda c: (5, -1), head_windows=lambda c: torch.ones(6, 2, dtype=torch.int32)),
    of("plain", qq_mask=torch.zeros(5, 33, dtype=torch.int32)),
    lambda folder: paged_attn.tree(*[torch.zeros(2, dtype=torch.int32)] * 3, nodes=2000),
    lambda folder: paged_attn.tree(torch.tensor([0]), torch.tensor([1]), torch.tensor([0, 1])),
    checked("plain", seq_lens=torch.tensor([1 << 40, 3, 33])),
    written(8),
    written(3, 3),
    without_click,
    outside_of_a_clone,
    without_matplotlib,
    prepare_for_the_interpreter,
    command("demo --output /dev/null/demo.png"),
    command("prepare --heads 3 --kv-heads 2"),
    command("prepare --drafts 3 --device h200"),
    command("prepare --device h200 --layout x-packed --head-dim 20"),
    command("prepare --device h200 --dtype float16 --kv-dtype bfloat16"),
    lambda folder: asked_for("triton"),
    without_triton(lambda: asked_for("interpreter")),
    without_triton(lambda: question.device_named("h200")),
    without_triton(lambda: main(["prepare"], standalone_mode=False)),
    in_plain_torch,
    in_the_interpreter,
    traced_with_a_score_mod,
    captured_at_once,
    sharded(),  # sinks are given
    sharded(sinks=None, batch_invariant=True),
    sharded(sinks=None, gate=torch.zeros(5, 6, 32, dtype=torch.bfloat16)),
    sharded(sinks=None, out=torch.empty(5, 6, 32, dtype=torch.float8_e4m3fn), out_scale=1.0),
    sharded(sinks=None, **{name: torch.zeros(5, 2, 32, dtype=torch.bfloat16) for name in ("k_new", "v_new")}),
    with_other_lengths,
    without_a_rank,
    forked,
    lambda folder: named(lambda score: score, ()),
    lambda folder: named_by("nothing:alibi", ""),
    without_metadata,
    without_names,
    lambda folder: gpus.named("h900"),
    lambda folder: question.lengths("many", "keys"),
    lambda folder: paged_attn.prepare(heads=16, kv_heads=1, head_dim=64, latent=True, kv_layout="x"),
    lambda folder: paged_attn.prepare(heads=16, kv_heads=1, head_dim=64, side_by_side=True, kv_layout="x"),
    lambda folder: paged_attn.prepare(heads=16, kv_heads=1, head_dim=64, page_stride=8),
    lambda folder: paged_attn.prepare(heads=16, kv_heads=1, head_dim=64, rotary_dim=64),
    lambda folder: Caches.allocate("x-packed", 1, 16, 1, 12, torch.float16, torch.device("cpu")),
    lambda folder: scheduler.Pages(0),
    lambda folder: scheduler.Pages(3).take(-1),
    lambda folder: scheduler.Pages(3).take(4),
    given_back(4),
    given_back(3),
    given_back(0, 0),
    lambda folder: scheduler.Scheduler(scheduler.Pages(4), 16, budget=1, max_seqs=2),
    lambda folder: scheduler.Scheduler(scheduler.Pages(4), 16, 8, 2).submit(trace.Request(0.0, 100, 1, ())),
    lambda folder: list(trace.shrink([], 0)),
    lines("a,b\n1,2\n"),
    lines(""),
    lines(AZURE + "yesterday,1,1\n"),
    lines('{"timestamp": 0, "input_length": 1}\n'),
    lines('{"timestamp": 0, "input_length": 0, "output_length": 1}\n'),
)


def provoked(folder: Path) -> Iterator[str]:
    """What each of them says."""
    wrong = [lambda folder, call=x.call: call() for x in TABLE_OF_WRONG]
    for number, call in enumerate((*PROVOKED, *wrong)):
        try:
            call(folder)
        except (Exception, SystemExit) as error:
            yield str(error)
        else:
            raise AssertionError(f"number {number} of PROVOKED raises nothing")


def tabled() -> Iterator[str]:
    for table in TABLES:
        module, _, name = table.rpartition(".")
        yield from (row[-1] for row in getattr(importlib.import_module(f"tests.{module}"), name))


def test_every_message_of_the_source_has_an_entry() -> None:
    entries = {(entry.template, error) for entry in catalogue() for error in entry.error.split(", ")}
    missing = [x for x in said() if x.template != ANY and (x.template, x.error) not in entries]
    assert not missing, "docs/errors.md has no entry for\n" + "\n".join(
        f"{x.where}: {x.error} {x.template}" for x in missing
    )


def test_every_entry_is_said_somewhere() -> None:
    sources = {(x.template, x.error) for x in said()}
    stale = [
        (x.template, error) for x in catalogue() for error in x.error.split(", ") if (x.template, error) not in sources
    ]
    assert not stale


@pytest.mark.kernels  # whose functions must be under @triton.jit
def test_every_entry_is_produced_by_a_test(tmp_path: Path) -> None:
    texts = [*tabled(), *provoked(tmp_path)]
    alone = [x for x in catalogue() if not any(x.matches(text) for text in texts) and not _elsewhere(x)]
    assert not alone, "no test makes\n" + "\n".join(x.template for x in alone)


def _elsewhere(entry: Entry) -> bool:
    files = ("kernels/hopper/test_shim.py", "launching/test_trial.py", "preparation/test_apart.py")
    source = "".join((ROOT / "tests" / x).read_text(encoding="utf-8") for x in files)
    tests = [test for words, test in ELSEWHERE.items() if entry.template.startswith(words)]
    return any(f"def {test}(" in source for test in tests)


def test_every_entry_says_why_and_what_to_do() -> None:
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert len(catalogue()) == text.count("\n### ")
    assert all(len(x.cause) > 10 and len(x.cure) > 3 for x in catalogue())


def test_a_message_without_an_entry_is_told_by_its_template() -> None:
    entry = Entry("{} must be {}, got {}", "TypeError", "", "")
    assert entry.matches("q must be float16, got int32")
    assert not entry.matches("q must be float16")
    source = ast.parse('raise ValueError(f"a{b!r} c" + (d if e else "") + "f")')
    from tests.support.errors import _template

    call = next(node for node in ast.walk(source) if isinstance(node, ast.Call))
    assert _template(call.args[0]) == "a{} c{}f"
