"""Plain torch alone: what is chosen and why, memory, threads, forks, the caller's modes, functions of torch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import paged_attn
from paged_attn.kernels.torch import blocks, cache, plain
from paged_attn.launching import platform
from paged_attn.planning.dialects import torch_dialect
from tests.support import torch_ways
from tests.support.cases import Case, build, compare, run
from tests.support.own_process import ended
from tests.support.own_process import run as run_script

LENGTHS: dict[str, Any] = dict(query_lens=(1, 20, 5, 0, 7, 1), seq_lens=(70, 60, 5, 9, 90, 33), heads=4, kv_heads=2)


@pytest.fixture(autouse=True)
def in_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls of the test are made in plain torch, whatever the others are made in."""
    if torch.cuda.is_available():
        pytest.skip("tensors of these tests are on the CPU of a machine without a GPU")
    monkeypatch.setattr(platform, "ASKED", "torch")
    monkeypatch.setattr(torch_ways, "IN_TORCH", True)
    monkeypatch.setattr("tests.support.comparing.IN_TORCH", True)
    platform.device_of.cache_clear()
    _forget()
    yield
    monkeypatch.undo()
    platform.device_of.cache_clear()
    _forget()


def _forget() -> None:
    from paged_attn.calls import call_cache

    call_cache.clear()


SCRIPT = """
import sys, torch
assert call() < 1e-5 and call(1) < 1e-5
from paged_attn.launching import platform
print(platform.device_of(torch.device("cpu")).arch, "triton" in sys.modules)
"""


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"PAGED_ATTN_DIALECT": ""}, "cpu False"),
        ({"PAGED_ATTN_DIALECT": "", "TRITON_INTERPRET": "0"}, "cpu False"),
        ({"PAGED_ATTN_DIALECT": "torch", "TRITON_INTERPRET": "1"}, "cpu False"),
    ],
)
def test_a_call_on_the_cpu_imports_no_triton(environ: dict[str, str], told: str) -> None:
    assert run_script(SCRIPT, **environ).strip() == told


@pytest.mark.kernels
@pytest.mark.parametrize("environ", [{"PAGED_ATTN_DIALECT": "interpreter"}, {"TRITON_INTERPRET": "1"}])
def test_the_interpreter_is_asked_for(environ: dict[str, str]) -> None:
    assert run_script(SCRIPT, **{"PAGED_ATTN_DIALECT": "", **environ}).strip() == "interpreter True"


def test_a_word_that_is_no_dialect_is_refused() -> None:
    done = ended("call()", PAGED_ATTN_DIALECT="triton")
    assert "PAGED_ATTN_DIALECT must be torch or interpreter, got triton" in done.stderr


@pytest.mark.parametrize("features", [{}, dict(softcap=3.0), dict(window_size=(30, -1)), dict(batch_invariant=True)])
def test_no_operation_is_as_large_as_tokens_times_keys(
    features: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All scores of 48 queries at 20000 keys of 8 heads are 30 MB; no tensor of an operation has a quarter of that."""
    from torch.utils._python_dispatch import TorchDispatchMode

    case = Case("long", (48,), (20_000,), heads=8, kv_heads=1, head_dim=16, page_size=64, **features)
    inputs = build(case)
    monkeypatch.setattr(blocks, "SCORES", 1 << 17)
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            made = function(*args, **kwargs or {})
            for x in made if isinstance(made, tuple) else (made,):
                if isinstance(x, torch.Tensor):
                    largest = max(largest, x.untyped_storage().nbytes() // x.itemsize)
            return made

    caches = inputs["k_cache"].numel()
    with Sizes():
        out, lse = paged_attn.paged_attention(**inputs)
    compare(case, out, lse, inputs)
    assert largest <= max(caches, 48 * 20_000 * 8 // 4)


def test_scores_whose_logarithms_lose_bits_go_to_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are joined by log-sum-exps, which are exact only while they are small."""
    made: list[Any] = []
    attend = blocks.attend
    monkeypatch.setattr(blocks, "attend", lambda *args: made.append(args) or attend(*args))
    for scale, by_blocks in ((0.2, False), (40.0, True)):
        made.clear()
        with torch_ways.cut(3, 16):
            run(Case("far", (1, 1), (70, 90), softmax_scale=scale), "cpu")
        assert bool(made) == by_blocks


@pytest.mark.parametrize(("causal", "query_len", "by_flash"), [(True, 1, 1), (True, 5, 0), (False, 5, 1)])
def test_flash_attention_serves_keys_of_a_rank_where_queries_need_no_place_among_them(
    causal: bool, query_len: int, by_flash: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    flash = plain.FLASH
    monkeypatch.setattr(plain, "FLASH", lambda *args, **options: made.append(args) or flash(*args, **options))
    case = Case("rank", (query_len,), (90,), causal=causal, page_size=8, shard=(1, 3, 4))
    run(case, "cpu")
    assert len(made) == by_flash
    with torch_ways.cut(3, 8):
        run(case, "cpu")


@pytest.mark.parametrize("own", [False, True])
def test_pages_in_a_row_are_read_where_they_lie(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []
    copied = cache._copied
    monkeypatch.setattr(cache, "_copied", lambda *args: copies.append(1) or copied(*args))
    for pages_in_a_row, run_of in ((True, 6), (False, 1)):
        copies.clear()
        case = Case("row", (1,), (90,), run=run_of, pages=6, new=own, heads=2, head_dim=16)
        run(case, "cpu")
        assert bool(copies) != pages_in_a_row


def test_threads_have_memory_of_their_own() -> None:
    cases = [Case(f"thread {i}", (1, 1), (90 + i, 200), heads=4, seed=i) for i in range(4)]
    inputs = [build(case) for case in cases]
    wanted = [paged_attn.paged_attention(**x | {"out": None})[0] for x in inputs]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(20):
            out = paged_attn.paged_attention(**inputs[number] | {"out": None})[0]
            if not torch.equal(out, wanted[number]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forked_child_makes_calls() -> None:
    script = "import os, torch\ntorch.set_num_threads(1)\nassert call() < 1e-5\nchild = os.fork()\n"
    script += "if not child: os._exit(int(not call(1) < 1e-5))\nassert os.waitpid(child, 0)[1] == 0"
    run_script(script, PAGED_ATTN_DIALECT="torch")


def test_modes_of_the_caller_change_no_result() -> None:
    case = Case("modes", **LENGTHS, sinks=True, alibi=True)
    inputs = build(case)
    wanted = paged_attn.paged_attention(**inputs | {"out": None})[0]
    with torch.inference_mode():
        inference = paged_attn.paged_attention(**inputs | {"out": None})[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        autocast = paged_attn.paged_attention(**inputs | {"out": None})[0]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        default = paged_attn.paged_attention(**inputs | {"out": None})[0]
    finally:
        torch.set_default_dtype(before)
    again = paged_attn.paged_attention(**inputs | {"out": None})[0]
    for got in (inference, autocast, default, again):
        assert torch.equal(got, wanted)


def test_a_function_in_torch_is_called_as_the_reference_calls_it() -> None:
    def bias(score: Any, query_pos: Any, key_pos: Any, head: Any, slopes: Any, size: int) -> Any:
        return torch.where((query_pos - key_pos) % size == 1, -torch.inf, score + slopes[head] * key_pos)

    case = Case("function", **LENGTHS)
    inputs = build(case) | dict(score_mod=bias, score_mod_args=(torch.linspace(-0.02, 0.02, 4), 3))
    for _ in range(2):
        out, lse = paged_attn.paged_attention(**inputs)
        compare(case, out, lse, inputs)


@pytest.mark.parametrize("name", ["attention", "write", "write_qkv", "merge_states", "ways"])
def test_the_dialect_has_what_its_interface_says(name: str) -> None:
    from paged_attn.planning.dialects import Direct

    assert callable(getattr(torch_dialect(), name))
    assert hasattr(Direct, name)


def test_without_flash_attention_every_call_is_made_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on other devices than CPUs."""
    monkeypatch.setattr(plain, "FLASH", None)
    for dtype in (torch.float32, torch.bfloat16):
        run(Case("blocks", **LENGTHS, dtype=dtype, sinks=True), "cpu")


def test_runs_of_keys_that_meet_in_a_tile_leave_the_same_bits_in_any_chunks() -> None:
    """The window of the first query of a chunk decides where its keys behind the prefix begin."""
    torch.manual_seed(0)
    q, cache, table = torch.randn(600, 4, 16), torch.randn(2, 40, 16, 2, 16), torch.arange(40, dtype=torch.int32)[None]

    def said(begin: int, end: int) -> torch.Tensor:
        lens, starts, prefix = (torch.tensor(x, dtype=torch.int32) for x in ([end], [0, end - begin], [270]))
        mine: Any = (q[begin:end], *cache, table, lens, starts)
        return paged_attn.paged_attention(*mine, prefix_lens=prefix, window_size=(40, -1), batch_invariant=True)

    whole = said(270, 600)
    for begin, end in ((270, 300), (313, 314), (300, 330), (330, 600)):
        assert torch.equal(said(begin, end), whole[begin - 270 : end - 270]), (begin, end)


def test_gathering_by_pages_brings_no_slot_behind_a_sequence() -> None:
    """Sequences as long as the longest, and those that end with a page, are gathered by pages; others slot by slot."""
    for keys in ((70, 70, 70), (64, 70, 70), (63, 70, 70), (70, 48, 64)):
        run(Case(f"{keys}", (1, 1, 1), keys, page_size=16, heads=4, kv_heads=2), "cpu")
    assert cache._in_whole_pages([cache.Span(16, 70), cache.Span(32, 64)], 16)
    assert not cache._in_whole_pages([cache.Span(16, 70), cache.Span(32, 63)], 16)
    assert not cache._in_whole_pages([cache.Span(8, 62)], 16)


def test_caches_made_in_inference_mode_are_written_outside_of_it() -> None:
    with torch.inference_mode():
        k_cache, v_cache = torch.zeros(2, 3, 4, 1, 8)
        q_out, out = torch.zeros(2, 2, 4, 8)
    tokens, slots = torch.randn(2, 1, 8), torch.tensor([0, 5])
    paged_attn.write_kv(tokens, tokens, k_cache, v_cache, slots)
    assert torch.equal(k_cache.flatten(0, 1)[slots], tokens)
    qkv = torch.randn(2, 6 * 8)
    queries = paged_attn.write_qkv(qkv, k_cache, v_cache, slots, q_out=q_out)
    assert torch.equal(queries.flatten(1), qkv[:, : 4 * 8])
    table, lengths = torch.tensor([[0], [1]]), torch.tensor([1, 2])
    want = paged_attn.paged_attention(queries, k_cache, v_cache, table, lengths)
    assert torch.equal(paged_attn.paged_attention(queries, k_cache, v_cache, table, lengths, out=out), want)
    assert not want.is_inference()
