"""The serving benchmark: one engine gives the same tokens over every backend, and says of times what happened."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import Tensor

pytest.importorskip("rich")

from benchmarks import __main__ as bench
from benchmarks.serve import command
from benchmarks.serve.backends import BACKENDS, Backend, FlashAttn2, FlashAttn3, PagedAttn, Sdpa, TorchVarlen, error_of
from benchmarks.serve.engine import Engine, Limits
from benchmarks.serve.model import SHAPES, Model
from benchmarks.serve.replay import Record, figures, percentile, replay
from paged_attn.cli import main
from paged_attn.serving.trace import Request

TINY, PAGE = SHAPES["tiny"], 8
# All arrive at once.  Chunks of a budget of 24 end inside of prompts; of 7 pages the first needs one of the second's.
REQUESTS = [Request(0.0, 22, 4), Request(0.0, 30, 3), Request(0.0, 1, 2), Request(0.0, 14, 5)]
PROMPTS = [torch.arange(r.prompt) * 37 % 211 + i for i, r in enumerate(REQUESTS)]


@pytest.fixture(scope="module")
def model(device: str) -> Model:
    return Model(TINY, torch.float32, torch.device(device), longest=64, compiled=False)


def served(model: Model, backend: Backend, pages: int = 30, graphs: bool = True) -> tuple[list[list[int]], Record]:
    limits = Limits(backend.page_size(PAGE), pages, max_seqs=4, budget=24, longest=64, requests=len(REQUESTS))
    engine = Engine(model, backend, limits, graphs)
    engine.start(PROMPTS)
    record = replay(engine, REQUESTS, limit=math.inf)
    return engine.tokens([r.prompt for r in REQUESTS], [len(times) for times in record.times]), record


def dense(model: Model) -> list[list[int]]:
    """Greedy tokens of each request without a cache."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    made = []
    for request, prompt in zip(REQUESTS, PROMPTS):
        tokens = prompt.to(model.device)
        for _ in range(request.output):
            h = model(tokens, torch.arange(len(tokens), device=model.device), attend)
            tokens = torch.cat([tokens, model.greedy(h[-1:])])
        made.append(tokens[request.prompt :].tolist())
    return made


@pytest.fixture(scope="module")
def wanted(model: Model) -> list[list[int]]:
    return dense(model)


@pytest.mark.parametrize("pages", [30, 7], ids=["room", "preemption"])
def test_the_engine_gives_the_tokens_of_dense_attention(model: Model, wanted: list[list[int]], pages: int) -> None:
    got, record = served(model, PagedAttn(), pages)
    assert got == wanted
    assert (record.preemptions > 0) == (pages == 7)
    assert [len(times) for times in record.times] == [r.output for r in REQUESTS]
    assert all(times == sorted(times) for times in record.times)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it has graphs")
def test_padded_decodes_in_the_inputs_of_a_graph_give_the_same_tokens(
    model: Model, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph is here what it would replay: the call that was made while it was captured."""
    captured: list[tuple[Any, ...]] = []
    replayed: list[int] = []

    class Graph:
        def replay(self) -> None:
            replayed.append(self.call[2])
            run(*self.call)

    @contextlib.contextmanager
    def capturing(graph: Any, pool: None) -> Iterator[None]:
        yield
        graph.call = captured[-1]

    def recorded(*call: Any) -> None:
        captured.append(call)
        run(*call)

    run = Engine.run
    for name, value in dict(
        graph_pool_handle=lambda: None, synchronize=lambda: None, CUDAGraph=Graph, graph=capturing
    ).items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(Engine, "run", recorded)
    limits = Limits(PAGE, 30, max_seqs=5, budget=24, longest=64, requests=len(REQUESTS))
    engine = Engine(model, PagedAttn(), limits, graphs=False)
    engine.capture()
    engine.start(PROMPTS)
    replay(engine, REQUESTS, limit=math.inf)
    assert engine.tokens([r.prompt for r in REQUESTS], [r.output for r in REQUESTS]) == wanted
    assert set(replayed) <= {1, 2, 4, 5}
    assert len(replayed) > 2


@pytest.mark.gpu
def test_what_is_compiled_is_the_same_model(model: Model, wanted: list[list[int]]) -> None:
    compiled = Model(TINY, torch.float32, model.device, longest=64, compiled=True)
    assert served(compiled, PagedAttn())[0] == wanted


@pytest.mark.gpu
def test_graphs_and_calls_give_the_same_tokens(model: Model, wanted: list[list[int]]) -> None:
    assert served(model, PagedAttn(), graphs=False)[0] == wanted


def test_sdpa_over_gathered_pages_gives_the_same_tokens(model: Model, wanted: list[list[int]]) -> None:
    got, record = served(model, Sdpa(PAGE, torch.float32))
    assert got == wanted
    assert record.prompt_tokens == sum(r.prompt for r in REQUESTS)


def test_decodes_gathered_in_groups_are_those_gathered_at_once(
    model: Model, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sdpa, "GATHERED", 1)
    assert served(model, Sdpa(PAGE, torch.float32))[0] == wanted


@pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in is for the CPU")
@pytest.mark.parametrize("make", [FlashAttn2, FlashAttn3], ids=["2", "3"])
def test_flash_attention_is_called_as_it_is_defined(
    make: Callable[[], Backend], model: Model, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through this library's stand-in, which takes its arguments and no others."""
    import sys

    from paged_attn.integrations import flash_attn

    for name in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, flash_attn)  # type: ignore[arg-type]
    assert error_of(make(), TINY, PAGE, torch.float32, torch.device("cpu")) < 1e-4
    assert served(model, make())[0] == wanted


@pytest.mark.parametrize("paged", [True, False])
def test_torch_varlen_is_called_with_pages_or_with_gathered_keys(
    paged: bool, model: Model, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    plain = PagedAttn()

    def over_pages(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: None, max_q: int, max_k: int, *,
        window_size: tuple[int, int], enable_gqa: bool, seqused_k: Tensor, block_table: Tensor,
    ) -> Tensor:  # fmt: skip
        assert window_size == (-1, 0)
        assert enable_gqa
        return attention(q, k, v, block_table, seqused_k, cu_q)

    def over_keys(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, is_causal: bool = False
    ) -> Tensor:
        assert is_causal
        # Keys one after another are pages of one token.
        lens = cu_k.diff()
        table = cu_k[:-1, None] + torch.arange(int(lens.max()), device=q.device)
        return attention(q, k[:, None], v[:, None], table.int(), lens, cu_q)

    def attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lens: Tensor, starts: Tensor) -> Tensor:
        from benchmarks.serve.backends import Batch

        return plain.attend(q, k, v, Batch(table, lens, starts, 64, 64), None)

    monkeypatch.setattr(varlen, "varlen_attn", over_pages if paged else over_keys)
    backend = TorchVarlen(PAGE)
    assert backend.paged == paged
    assert served(model, backend, graphs=False)[0] == wanted


def test_a_backend_that_is_wrong_is_found_before_it_is_timed(device: str) -> None:
    class Wrong(PagedAttn):
        def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Any, prepared: Any) -> Tensor:
            return super().attend(q, k_cache, v_cache, replace(batch, seq_lens=batch.seq_lens - 1), prepared)

    sizes = (TINY, PAGE, torch.float32, torch.device(device))
    assert error_of(PagedAttn(), *sizes) < 1e-4
    assert error_of(Wrong(), *sizes) > 1e-1


# What is made of times.


def test_figures_are_those_of_the_times() -> None:
    record = Record([0.0, 1.0, 2.0, 3.0], [[1.0, 1.5, 2.5], [3.0], [], []], [3, 2, 4, 4], seconds=2.5, steps=7)
    record.prompt_tokens = 100
    got = figures(record)
    assert (got["new_tokens"], got["finished"], got["requests"]) == (4, 1, 4)
    assert got["new_tokens_per_second"] == pytest.approx(4 / 2.5)
    assert got["tokens_per_second"] == pytest.approx(104 / 2.5)
    assert got["between_tokens"] == {"p50": 0.5, "p99": 1.0}
    # The third has waited half a second and counts; the fourth had not come.
    assert got["without_a_token"] == 1
    assert got["first_token"] == {"p50": 1.0, "p99": 2.0}


@pytest.mark.parametrize("share, value", [(50, 2.0), (75, 3.0), (76, 4.0), (99, 4.0), (100, 4.0)])
def test_a_percentile_is_a_value_that_occurred(share: float, value: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], share) == value
    assert percentile([], share) == 0.0


def test_a_limit_ends_a_run(model: Model) -> None:
    limits = Limits(PAGE, 30, max_seqs=4, budget=24, longest=64, requests=len(REQUESTS))
    engine = Engine(model, PagedAttn(), limits, graphs=False)
    engine.start(PROMPTS)
    record = replay(engine, [*REQUESTS[:1], replace(REQUESTS[1], arrival=1e9)], limit=0.0)
    assert record.steps == 0
    assert figures(record)["new_tokens_per_second"] == 0


# The command.

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{46 + second}.0000000,{prompt},{output}\n"
    for second, prompt, output in ((0, 20, 3), (1, 9, 2), (2, 15, 4), (8, 5, 5))
)


def test_a_slice_of_a_trace_comes_faster(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE, encoding="utf-8")
    got = command.chosen(path, first=1, seconds=2, rate=4, most=None)
    assert [(r.arrival, r.prompt) for r in got] == [(0.0, 9), (0.25, 15)]
    assert len(command.chosen(path, 0, 100, 1, most=3)) == 3
    with pytest.raises(SystemExit, match="no request arrives between second 100 and 110"):
        command.chosen(path, 100, 10, 1, None)


def test_the_command_writes_figures_and_a_picture_of_every_backend(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE, encoding="utf-8")
    words = f"serve --model tiny --trace {trace} --seconds 5 --rate 100 --budget 32 --max-seqs 4 --page-size 8 --eager"
    words += " --limit inf --backends paged_attn,sdpa,flash_attn"
    bench.main([*words.split(), "--output", str(tmp_path)])
    report = json.loads((tmp_path / "serve.json").read_text(encoding="utf-8"))
    assert [*report["engines"], *report["skipped"]] == ["paged_attn", "sdpa", "flash_attn"]
    for got in report["engines"].values():
        assert got["finished"] == got["requests"] == 3
        assert got["new_tokens"] == 9
        assert got["first_tokens_as_ours"] == 1
        assert got["without_a_token"] == 0
    assert report["skipped"]["flash_attn"].startswith("not installed")
    assert (tmp_path / "serve.png").stat().st_size > 10_000
    bench._draw(tmp_path, bench.Console(quiet=True))  # the other pictures' reader passes over it


def test_the_library_failing_is_an_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(page_size: int, dtype: torch.dtype) -> Backend:
        raise RuntimeError("of a kernel")

    monkeypatch.setitem(BACKENDS, "paged_attn", fails)
    words = ["--model", "tiny", "--requests", "1", "--backends", "paged_attn", "--output", str(tmp_path), "--eager"]
    with pytest.raises(SystemExit, match="paged_attn failed"):
        command.main(words)
    assert "of a kernel" in json.loads((tmp_path / "serve.json").read_text(encoding="utf-8"))["skipped"]["paged_attn"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_only_a_tiny_model_is_served() -> None:
    with pytest.raises(SystemExit, match="needs a GPU"):
        command.main(["--model", "llama-3.1-8b"])


def test_the_verb_reaches_it() -> None:
    result = CliRunner().invoke(main, ["bench", "serve", "--help"])
    assert result.exit_code == 0
    assert "--backends" in result.output


def test_sizes_are_those_of_the_model() -> None:
    assert SHAPES["llama-3.1-8b"].parameters / 1e9 == pytest.approx(8.03, abs=0.01)
    assert SHAPES["llama-3.1-8b"].bytes_per_token(torch.bfloat16) == 131072
