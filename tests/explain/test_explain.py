"""`paged-attn explain`: it knows what the planner plans, cuts as the device cuts, and counts by hand."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import paged_attn
from paged_attn.arguments import bound
from paged_attn.calls import attend
from paged_attn.cli import main
from paged_attn.explain import explain, question
from paged_attn.explain.question import Question, lengths, question_of
from paged_attn.launching import trust
from paged_attn.launching.template import arguments_for
from paged_attn.planning import plan
from paged_attn.planning.steps import steps_of
from paged_attn.preparation.model import call_of
from paged_attn.records import posed
from tests import warm

ROOT = Path(__file__).parents[2]
OPTIONS: dict[str, Any] = dict(
    batch=None, queries="1", keys="4096", heads=32, kv_heads=8, head_dim=128, value_dim=None, latent=False,
    page_size=16,
    dtype=torch.bfloat16, kv_dtype=torch.bfloat16, layout="NHD", window=(-1, -1), causal=True, softcap=0.0, alibi=False,
    sinks=False, gate=False, qq_bias=0, query_positions=False, new=False, lse=False, batch_invariant=False,
    max_queries=None, max_keys=None, device="sm90:132", score_mod=None, score_mod_args="",
)  # fmt: skip


def ask(**changes: Any) -> Question:
    return question_of(**{**OPTIONS, **changes})


def told(**changes: Any) -> dict[str, str]:
    return dict(explain.explain(ask(**changes)))


def printed(words: str) -> str:
    result = CliRunner().invoke(main, ["explain", *words.split()])
    assert result.exit_code == 0, result.output
    return result.output


def call_to(asked: Question) -> tuple[Any, Any, Any]:
    """The tensors of such a call, never filled, its options and axes."""
    problem = asked.problem
    lengths = question.Lengths(asked.ragged, problem.seqs, problem.tokens, problem.max_seqlen_q, problem.max_seqlen_k)
    given, options = bound(call_of(asked.model, lengths) | dict(batch_invariant=asked.batch_invariant))
    return given, options, paged_attn.checks.arguments.check_attention(given, options)


# ---- dialects


def test_a_plain_decode_on_an_h200_goes_to_hoppers_kernels() -> None:
    lines = told(batch=64)
    assert lines["kernels"] == "Hopper's"
    assert lines["launch"].startswith("shares_kernel, 128 programs")
    assert "237 us, bound by memory" in lines["at best"]


def test_the_row_of_the_planner_that_decided_is_told() -> None:
    assert told(batch=64)["regime"].startswith("decodes: a decode waits for memory alone")
    mixed = told(queries="1x2048,63x1", keys="1x2048,63x4096")
    assert mixed["regime"].startswith("few rows beside blocks: prefills wait for the tensor cores, decodes for memory")
    assert told(queries="2048", keys="2048", page_size=12)["regime"].startswith("blocks: ")
    assert told(page_size=12)["regime"].startswith("decodes: ")
    assert told(queries="4", page_size=12)["regime"].startswith("one block a sequence: ")
    told_as_json = json.loads(printed("--batch 64 --device sm90:132 --json"))
    assert told_as_json["regime"] == told(batch=64)["regime"]


def test_what_tiles_of_an_x_packed_cache_are_is_told() -> None:
    assert "of an x-packed cache, products from registers" in printed("--layout x-packed --device sm90:132")
    assert "of x-packed fp8, products of float16" in printed("--layout x-packed --kv-dtype fp8 --device sm90:132")


def test_launches_of_both_dialects_are_told() -> None:
    lines = told(queries="1x2048,63x1", keys="1x2048,63x4096", window=(127, -1))
    assert lines["kernels"] == "Hopper's, and the portable one for few queries of few keys"
    assert lines["launch 1"].startswith("attention_kernel")
    assert lines["launch 2"].startswith("blocks_kernel")
    assert lines["launch 2"].endswith("; they begin as programs of launch 1 end")
    lines = told(queries="1x1024,31x1", keys="1x4096,31x2048", heads=71, kv_heads=1, head_dim=64)
    assert lines["kernels"] == "Hopper's, and the portable one for few queries of more than 64 heads on a KV head"
    assert ", and behind launch 2 merge_blocks_kernel, 160 programs, for sequences of 1 query" in lines["launch 1"]


def test_copies_in_whole_pages_are_told_and_counted() -> None:
    lines = told(batch=2, queries="2048", keys="2048", page_size=4)
    assert lines["kernels"] == "Hopper's"
    assert lines["regime"].startswith("blocks: ")
    assert lines["copies"] == (
        "copy_pages_kernel, 512 programs of 4 warps: up to 2048 keys of each sequence from pages of 4 into pages of "
        "128 of the call's own, 16.8 MB"
    )
    assert "boxes of 128 keys" in lines["  tiles"]
    assert "keys and values 16.8 MB" in lines["memory"]
    assert "copies, out and in 33.6 MB" in lines["memory"]
    window = told(batch=2, queries="2048", keys="8192", page_size=4, window=(1023, -1))
    assert "copies, out and in 50.3 MB" in window["memory"], "of keys that somebody sees"
    new = told(queries="1024", keys="8192", page_size=4, new=True)
    assert "copies, out and in 58.7 MB" in new["memory"], "of those in the cache"
    assert "copies" not in told(batch=2, queries="2048", keys="2048")


def test_what_the_hopper_kernels_lack_is_named() -> None:
    for changes, reason in (
        (dict(page_size=12), "pages of other than a multiple of 8 tokens"),
        (dict(keys="200"), "few queries of few keys"),
        (
            dict(layout="x-packed", kv_dtype=torch.float8_e4m3fn, queries="2048"),
            "more than few rows or new keys over an x-packed cache",
        ),
        (
            dict(layout="x-packed", page_size=8, queries="2048"),
            "but by prefills over 16 bits in pages of 16 n tokens",
        ),
        (dict(layout="x-packed", batch_invariant=True), "batch_invariant over an x-packed cache"),
        (dict(batch_invariant=True, heads=1024, head_dim=256), "KV head but by long prefills nor batch_invariant"),
        (dict(new=True, kv_dtype=torch.float8_e4m3fn), "keys outside the cache of another type"),
    ):
        lines = told(**changes)
        assert lines["kernels"].startswith("portable; not Hopper's, which do not take"), changes
        assert reason in lines["kernels"]
        assert lines["launch"].startswith("attention_kernel")


def test_products_of_float32_and_of_fp8_have_their_own_rates() -> None:
    prefill = dict(queries="4096", keys="4096")
    fp8 = dict(dtype=torch.float8_e4m3fn, kv_dtype=torch.float8_e4m3fn)
    assert "TB/s, 770 TFLOP/s" in told(**prefill)["at best"]
    assert "TB/s, 1540 TFLOP/s" in told(**prefill, **fp8)["at best"]
    assert "products of fp8 by coarse weights (no log-sum-exps)" in told(**prefill, **fp8)["  tiles"]
    assert "coarse" not in told(**prefill, **fp8, lse=True)["  tiles"]
    cache = dict(kv_dtype=torch.float8_e4m3fn)
    in_two = "products of float16 but for keys, of fp8 by queries in two parts (no log-sum-exps)"
    assert in_two in told(**prefill, **cache)["  tiles"]
    assert "products of float16, boxes" in told(**prefill, **cache, lse=True)["  tiles"]
    assert "TB/s, 128 TFLOP/s" in told(**prefill, dtype=torch.float32, kv_dtype=torch.float32)["at best"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("head_dim", [64, 72, 128])
@pytest.mark.parametrize("new", [False, True])
def test_the_planner_is_told_what_a_call_would_tell_it(dtype: torch.dtype, head_dim: int, new: bool) -> None:
    asked = ask(queries="64", keys="64", dtype=dtype, kv_dtype=dtype, head_dim=head_dim, new=new, device="sm90")
    given, options, _ = call_to(asked)
    told = posed.problem_of(given, options, asked.device, interpreted=False)
    assert told == asked.problem


def test_the_planner_is_told_of_a_users_function_what_a_call_would_tell_it() -> None:
    from tests.score_mods import relative

    asked = ask(score_mod="tests.score_mods:relative", score_mod_args="bfloat16,37")
    given, options, _ = call_to(asked)
    told = posed.problem_of(given, options, asked.device, interpreted=False).score_mod
    assert told == asked.problem.score_mod == (relative, ("*bf16", "i32"))


def test_ceilings_are_those_of_the_gpu_that_is_named() -> None:
    """Decodes as long as the card's memory takes."""
    least = [printed(f"--queries 1 --keys 4096 --batch 64 --device {gpu}") for gpu in ("sm90", "h200", "h100")]
    assert least[0] == least[1]
    assert "237 us, bound by memory" in least[1]
    assert "(an H200: 4.54 TB/s, 770 TFLOP/s)" in least[1]
    assert "346 us, bound by memory" in least[2]
    assert "(an H100: 3.11 TB/s, 816 TFLOP/s)" in least[2]


@pytest.mark.parametrize(
    ("name", "gpu"), [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", None)]
)
def test_this_machine_has_its_own_ceilings_if_they_are_known(
    monkeypatch: pytest.MonkeyPatch, name: str, gpu: str | None
) -> None:
    monkeypatch.setattr(question, "INTERPRET", False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert gpu == question.gpu_named(None)
    assert question.gpu_named("sm90:114") == "h200"
    assert question.gpu_named("sm80") is None


def test_other_devices_have_portable_kernels_and_may_have_no_ceilings() -> None:
    lines = told(device="sm80")
    assert lines["device"] == "sm80, 108 multiprocessors"
    assert lines["kernels"] == "portable; the others are for sm90"
    assert lines["at best"] == "no ceilings are known for sm80"


def test_hopper_kernels_that_are_switched_off_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "ASKED", "0")
    plan.plan.cache_clear()
    try:
        assert told()["kernels"] == "portable; not Hopper's, for PAGED_ATTN_HOPPER is 0"
    finally:
        plan.plan.cache_clear()


def test_another_triton_runs_the_portable_kernels(tmp_path: Path) -> None:
    program = """
import warnings, triton
triton.__version__ = "9.9.9"
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    from paged_attn.kernels.hopper import available
    from paged_attn.launching import trust
    from paged_attn.planning import plan
    from tests.explain.test_explain import ask
    launches = plan.plan(ask().problem).launches
    assert available.gluon_available() is available.gluon_available() is False
print(len(heard), len(launches))
print([x.pipe for x in launches], trust.why_untrusted("sm90"))
"""
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONWARNINGS": "", "TRITON_CACHE_DIR": str(tmp_path)}
    done = warm.run(["-c", program], environment, ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["0 1", "[None] nobody has tried them on such a GPU"]


# ---- launches

CALLS: dict[str, dict[str, Any]] = {
    "decode": dict(batch=64),
    "one": dict(keys="32768"),
    "prefill": dict(queries="2048", keys="2048"),
    "chunk": dict(queries="64", keys="16384"),
    "mixed": dict(queries="1x700,63x1", keys="1x2500,63x900"),
    "mixed over fp8": dict(queries="1x700,63x1", keys="1x2500,63x900", kv_dtype=torch.float8_e4m3fn),
    "uneven": dict(queries="1x700,5x1", keys="1x2500,5x900"),
    "window": dict(batch=3, keys="5000", window=(100, -1)),
    "mixed in a window": dict(queries="1x700,63x1", keys="1x2500,63x900", window=(127, -1)),
    "few keys": dict(batch=64, keys="100"),
    "many heads": dict(queries="1x1024,1x70,31x1", keys="1x4096,32x2048", heads=71, kv_heads=1, head_dim=64),
    "new": dict(queries="1x700,5x1", keys="1x2500,5x900", new=True),
    "new decode": dict(batch=5, keys="5000", new=True),
    "invariant": dict(keys="8192", batch_invariant=True),
    "invariant mixed": dict(queries="1x70,2x1", keys="1x2500,2x9000", batch_invariant=True),
    "fp8": dict(batch=5, kv_dtype=torch.float8_e4m3fn),
    "fp8 prefill": dict(queries="2048", keys="2048", kv_dtype=torch.float8_e4m3fn),
}


@pytest.mark.parametrize("target", ["sm80", "sm90"])
@pytest.mark.parametrize("name", CALLS)
def test_kernels_grids_and_scratch_are_those_that_would_be_launched(name: str, target: str) -> None:
    asked = ask(**CALLS[name], device=target)
    planned = plan.plan(asked.problem)
    given, options, axes = call_to(asked)
    with arguments_for((*given.slots, None)) as held:  # no log-sum-exp
        steps = steps_of(planned, attend._call(held, options, axes))
    told = [(kernel, launch) for launch in planned.launches for kernel in question.grids(launch).items()]
    if planned.launches[0].shape.LEADS and planned.launches[0].merge:  # joined behind the launch that follows
        told.insert(2, told.pop(1))
    assert [kernel for kernel, _ in told] == [(step.kernel.fn.__name__, step.grid) for step in steps]
    follows = [x.pipe is not None and x.pipe.FOLLOWS for _, x in told]
    assert follows == [step.room == 1 for step in steps], "scratch of its own where two run at the same time"
    needs = [question.need_of(x) for x in planned.launches if x.shape.SPLIT or x.pipe is not None]
    assert needs == [step.need for step in steps if step.need is not None]


# ---- work


def test_memory_is_counted_by_hand() -> None:
    asked = ask(queries="1,3", keys="20,33", heads=4, kv_heads=2, head_dim=64, kv_dtype=torch.float8_e5m2)
    moved = question.memory(asked)
    assert moved["keys and values"] == 53 * 2 * 2 * 64
    assert moved["queries"] == moved["results"] == 4 * 4 * 64 * 2
    assert moved["page ids"] == 4 * (2 + 3)
    assert "log-sum-exps" not in moved
    assert question.memory(asked._replace(model=asked.model._replace(return_lse=True)))["log-sum-exps"] == 4 * 4 * 4
    assert moved["lengths"] == 4 * (2 + 3)
    assert question.operations(asked) == 4 * 64 * 4 * (20 + 31 + 32 + 33)


def test_a_window_frees_pages_and_new_keys_have_their_own_dtype() -> None:
    asked = ask(queries="4", keys="100", window=(9, -1), new=True, kv_dtype=torch.float8_e4m3fn)
    moved = question.memory(asked)
    assert moved["keys and values"] == 2 * 8 * 128 * (9 * 1 + 4 * 2)
    assert moved["page ids"] == 4 * 2  # positions 87 ... 99 lie in pages 5 and 6
    assert question.operations(asked) == 4 * 128 * 32 * 4 * 10


def test_pieces_are_told() -> None:
    """8 blocks of 128 tiles in halves."""
    told = printed("--queries 256 --keys 16384 --device sm90")
    assert "from a counter: 128 items of up to 64 tiles" in told
    assert "8 blocks are cut, into 16 pieces" in told
    told = printed("--queries 64 --keys 131072 --heads 8 --kv-heads 1 --device sm90")  # four blocks for 132 programs
    assert "from a counter: 128 items of up to 32 tiles" in told


def test_pairs_of_kv_heads_and_parts_of_their_groups_are_told() -> None:
    assert "1024 tiles that somebody sees for each of 8 KV heads; " in told(batch=64, keys="2048")["  work"]
    pairs = told(batch=64, keys="2048", head_dim=64)
    assert "(1 tokens x 8 heads)" in pairs["  tiles"]
    assert "for each of 4 pairs of KV heads; " in pairs["  work"]
    parts = told(batch=2, queries="4096", heads=96)
    assert "(32 tokens x 4 heads)" in parts["  tiles"]
    assert "for each of 24 parts of 8 groups; " in parts["  work"]
    alone = told(batch=2, queries="4096", heads=71, kv_heads=1, head_dim=64)
    assert "for each of 71 parts of 1 group; " in alone["  work"]


def test_how_uneven_queries_are_served_is_told() -> None:
    told = printed("--queries 1x140,63x1 --keys 64x4096 --device sm90")
    assert "from two counters, of many rows and of few: 544 items" in told
    assert "up to 8 rows as columns" in told
    call = "--queries 1x2048,63x1 --keys 1x2048,63x4096 --device sm90"
    told = printed(call)
    assert "mixed_kernel, 132 programs of 16 warps, for sequences of 3 queries or more" in told
    assert "beside     6 warps of each program, for sequences of 1 to 2 queries" in told
    assert "from a counter: 512 items" in told
    assert "even shares: 16 of 252 tiles" in told
    told = printed(f"{call} --kv-dtype fp8")
    assert "for sequences of 3 queries or more" in told
    assert "for sequences of 1 to 2 queries" in told
    told = printed("--queries 4x2048,2x1 --keys 6x4096 --device sm90")
    assert "from a counter" in told
    assert "columns" not in told


def test_even_shares_of_a_line_are_told() -> None:
    """12 sequences of one block, which 8 heads see for each of them: 96 blocks of 128 tiles for 132 programs."""
    told = printed("--queries 32 --keys 16384 --batch 12 --device sm90")
    assert "even shares of all heads' tiles: 132 of 93 to 94 tiles" in told
    assert "12 blocks are cut, into" in told


def test_how_a_softcap_comes_about_is_told() -> None:
    def tiles(**changes: Any) -> str:
        return told(keys="2048", softcap=30.0, **changes)["  tiles"]

    coarse, exact = tiles(queries="2048"), tiles(queries="2048", lse=True)
    assert "tanh by one instruction" in coarse
    assert "tanh of small scores by a polynomial of 3 terms" in coarse
    assert "tanh by one instruction" not in exact
    assert "tanh of small scores by a polynomial of 5 terms" in exact
    assert "tanh" not in tiles(queries="1")


def test_lengths_are_said_in_groups() -> None:
    assert lengths("1x2048,3x1") == [2048, 1, 1, 1]
    assert lengths("7") == [7]


# ---- the command


def test_the_command_tells_a_line_per_fact() -> None:
    output = printed("--batch 64 --device sm90")
    names = [line[:12].strip() for line in output.splitlines()]
    assert names == [
        *(
            "call",
            "device",
            "kernels",
            "regime",
            "launch",
            "tiles",
            "work",
            "pieces",
            "scratch",
            "memory",
            "operations",
        ),
        "at best",
    ]
    assert "64 x 1 query at 4096 keys; 32 heads on 8 of 128, bfloat16, pages of 16 (NHD)" in output


@pytest.mark.parametrize(
    "words",
    [
        "--queries 1x2048,63x1 --keys 1x2048,63x4096",
        "--queries 1x2048,63x1 --keys 1x2048,63x4096 --device sm80",
        "--queries 300 --not-causal --window 20 30 --softcap 30 --alibi --sinks --gate --qq-bias 8 --layout HND",
        "--layout x-packed --dtype fp8 --new --page-size 544 --head-dim 80",
        "--dtype float32 --batch 3 --batch-invariant --device gfx942",
        "--queries 8 --max-queries 64 --max-keys 131072 --device sm89:142",
    ],
)
def test_the_command_takes_every_option(words: str) -> None:
    assert "at best" in printed(words)


@pytest.mark.parametrize(
    "words, text",
    [
        ("--keys many", "lengths must be like 4096 or 1x2048,63x1, got 'many'"),
        ("--keys 0", "lengths must be like"),
        ("--batch 3 --keys 4,5", "lengths must pair up"),
        ("--queries 5 --keys 4", "there cannot be fewer than queries"),
        ("--heads 9", "heads must be a multiple of kv_heads = 8, got 9"),
        ("--kv-dtype float32", "a cache beside torch.bfloat16 must be one of"),
        ("--layout x-packed --head-dim 20", "wants a head_dim divisible by 8"),
        ("--new --batch-invariant", "batch_invariant is not to be had"),
        ("--device sm86", "or with its multiprocessors, like sm89:142, got 'sm86'"),
    ],
)
def test_the_command_says_what_is_wrong(words: str, text: str) -> None:
    result = CliRunner().invoke(main, ["explain", *words.split()])
    assert result.exit_code == 2
    assert text in " ".join(result.output.split())


def test_json_has_the_lines_and_their_numbers() -> None:
    words = "--queries 1x1024,31x1 --keys 1x4096,31x2048 --heads 71 --kv-heads 1 --head-dim 64 --device h200"
    asked = ask(queries="1x1024,31x1", keys="1x4096,31x2048", heads=71, kv_heads=1, head_dim=64, device="h200")
    told = json.loads(printed(f"{words} --json"))
    assert [x["launch"] for x in told["launches"]] == [t for n, t in explain.explain(asked) if n.startswith("launch")]
    assert told["memory_bytes"] == question.memory(asked)
    assert told["useful_operations"] == question.operations(asked)
    assert told["least_seconds"]["memory"] == pytest.approx(sum(told["memory_bytes"].values()) / 4.54e12)
    mixed = json.loads(printed("--queries 1x2048,63x1 --keys 1x2048,63x4096 --device h200 --json"))
    assert {"warps", "tiles", "work"} <= mixed["launches"][0]["beside"].keys()


@pytest.mark.parametrize("words", ["--window 127 -1", "--window -1 0"])
def test_a_window_is_two_numbers(words: str) -> None:
    assert "Hopper" in printed(f"{words} --device h200")


@pytest.mark.parametrize("name, arch", [("b200", "sm100"), ("H200", "sm90"), ("a100", "sm80"), ("mi300x", "gfx942")])
def test_a_device_has_the_name_that_people_have_for_it(name: str, arch: str) -> None:
    assert json.loads(printed(f"--device {name} --json"))["device"].startswith(f"{arch}, ")


def test_values_of_another_width_are_told_and_counted() -> None:
    both = told(head_dim=192, value_dim=128)
    assert "32 heads on 8 of 192 and values of 128" in both["call"]
    assert both["kernels"] == "Hopper's"
    assert "values of another width" in told(head_dim=192, value_dim=36)["kernels"]
    asked, keys = ask(head_dim=192, value_dim=128), 8 * 4096
    assert question.memory(asked)["keys and values"] == 2 * keys * (192 + 128)
    assert question.memory(asked)["queries"] == 2 * 32 * 192
    assert question.memory(asked)["results"] == 2 * 32 * 128
    assert question.operations(asked) == 2 * 32 * 4096 * (192 + 128)


def test_heads_beyond_256_dims_over_fp8_are_for_the_portable_kernel() -> None:
    fp8 = told(head_dim=512, kv_dtype=torch.float8_e4m3fn)["kernels"]
    assert fp8.endswith("which do not take a head_dim other than 40..256 in steps of 8")
    assert told(head_dim=512)["kernels"] == "Hopper's"
    assert "of 64 and values of 512" in printed("--head-dim 64 --value-dim 512 --device sm90")


def test_scratch_is_as_wide_as_values() -> None:
    for head_dim, value_dim, padded in ((512, 64, 64), (64, 512, 512), (192, 128, 128)):
        asked = ask(head_dim=head_dim, value_dim=value_dim, page_size=4)  # of the portable kernel
        (launch,) = plan.plan(asked.problem).launches
        states = launch.slots * launch.programs * launch.shape.KV_HEADS * launch.shape.LIVE * (padded + 2)
        assert question.need_of(launch).states - (launch.cuts if launch.merge else 0) == states


def test_a_latent_cache_is_read_once_and_its_heads_are_shared_out() -> None:
    deepseek = dict(heads=128, kv_heads=1, head_dim=576, value_dim=512, latent=True)
    both, asked = told(**deepseek), ask(**deepseek)
    assert "128 heads on 1 of 576 whose first 512 are values" in both["call"]
    assert question.memory(asked)["keys and values"] == 2 * 4096 * 576
    assert question.operations(asked) == 2 * 128 * 4096 * (576 + 512)
    latent = "--kv-heads 1 --head-dim 576 --value-dim 512 --latent --device sm90"
    words = printed(f"--heads 128 {latent} --page-size 4")
    assert "keys that are their values read once" in words
    assert "2 parts of 64 heads, on one KV head" in words
    words = printed(f"--heads 128 {latent}")
    assert "tiles of keys that hold their values beside" in words
    assert "2 parts of 1 group" in words
    assert "parts of" not in printed(f"--heads 64 {latent}")


def test_a_question_about_a_latent_cache_that_cannot_be_is_refused() -> None:
    for wrong in (dict(layout="x-packed"), dict(value_dim=80)):
        with pytest.raises(ValueError, match="are the first dims of its keys, which are not x-packed"):
            ask(**dict(kv_heads=1, head_dim=64, latent=True) | wrong)
    with pytest.raises(ValueError, match="head_dim must be between 1 and 512, got 576"):
        ask(head_dim=576)
