"""`explain` on dialects and devices: it knows what the planner is told, and says whose kernels a call gets, and why."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from paged_attn.arguments import ARGUMENTS
from paged_attn.explain import explain, question, words
from paged_attn.launching import triton_trial
from paged_attn.planning import planner
from paged_attn.records import problem
from tests.explain.asked import ROOT, ask, call_to, printed, told
from tests.support import warm


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
    lines = told(queries="1x700,63x1", keys="1x2500,63x900", kv_dtype=torch.int8, scales="per_token")
    assert lines["launch 1"].startswith("shares_kernel")
    assert lines["launch 1"].endswith("; they begin while keys are copied")
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
    chunk = dict(queries="256", keys="4096", kv_dtype=torch.float8_e4m3fn)
    in_two = "products of float16 but for keys, of fp8 by queries in two parts (no log-sum-exps)"
    assert in_two in told(**chunk)["  tiles"]
    assert "products of float16, boxes" in told(**chunk, lse=True)["  tiles"]
    assert "products" not in told(**prefill, kv_dtype=torch.float8_e4m3fn)["  tiles"]  # over a copy in 16 bits
    assert "TB/s, 128 TFLOP/s" in told(**prefill, dtype=torch.float32, kv_dtype=torch.float32)["at best"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("head_dim", [64, 72, 128])
@pytest.mark.parametrize("new", [False, True])
def test_the_planner_is_told_what_a_call_would_tell_it(dtype: torch.dtype, head_dim: int, new: bool) -> None:
    asked = ask(queries="64", keys="64", dtype=dtype, kv_dtype=dtype, head_dim=head_dim, new=new, device="sm90")
    given, options, _ = call_to(asked)
    told = problem.problem_of(given, options, asked.device, interpreted=False)
    assert told == asked.problem


@pytest.mark.parametrize("shard", [(0, 2, 16), (2, 3, 7)])
def test_the_planner_is_told_of_a_shard_what_a_call_would_tell_it(shard: tuple[int, int, int]) -> None:
    asked = ask(batch=2, queries="8", keys="4000", window=(1000, -1), shard=shard)
    given, options, _ = call_to(asked._replace(max_seqlen_k=4000))
    told = problem.problem_of(given, options._replace(max_seqlen_k=4000), asked.device, interpreted=False)
    assert told == asked.problem
    assert told.max_seqlen_k == -(-4000 // shard[1] // shard[2]) * shard[2]


def test_own_keys_and_the_exchange_of_a_shard_are_told() -> None:
    """4 ranks read a quarter each, and exchange 3 quarters of [8 tokens, 32 heads, 129] float32."""
    whole, lines = told(batch=8, keys="131072"), told(batch=8, keys="131072", shard=(1, 4, 16))
    assert lines["shard"] == "rank 1 of 4 has 262144 of 1048576 keys, in stripes of 16"
    assert "keys and values 4.29 GB" in whole["memory"]
    assert "keys and values 1.07 GB" in lines["memory"]
    assert "log-sum-exps 1.02 kB" in lines["memory"]
    assert lines["exchange"] == (
        "99.1 kB to other ranks and as much from them, float32 states of 256 rows; behind 1 launch pack_kernel, an "
        "all-to-all and unpack_kernel, or one launch through Peers, which store twice as many bytes"
    )
    assert "exchange" not in whole
    few = told(batch=3, keys="40", window=(3, -1), shard=(2, 4, 16))
    assert few["shard"].startswith("rank 2 of 4 has 24 of 120 keys")
    assert "keys and values 49.2 kB" in few["memory"], "3 sequences of 4 keys that a query sees"


def test_the_planner_is_told_of_a_users_function_what_a_call_would_tell_it() -> None:
    from tests.support.score_mods import relative

    asked = ask(score_mod="tests.support.score_mods:relative", score_mod_args="bfloat16,37")
    given, options, _ = call_to(asked)
    told = problem.problem_of(given, options, asked.device, interpreted=False).score_mod
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
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert gpu == question.gpu_named(None)
    assert question.gpu_named("sm90:114") == "h200"
    assert question.gpu_named("sm80") is None


# options of the command that give each argument whose contents hide or show keys
CONTENTS: dict[str, dict[str, Any]] = {
    **{x.name: {x.name: x.others[0]} for x in ARGUMENTS if x.name in words.ASSUMED and x.others},
    **{name: {name: True} for name in ("head_windows", "causal_seqs", "prefix_lens", "query_positions")},
    **{name: {name: 2} for name in ("spans", "qq_bias", "qq_mask")},
    "score_mod": dict(score_mod="tests.support.score_mods:softcap", score_mod_args="5.0"),
}


@pytest.mark.parametrize("device", ["sm90:132", "cpu"])
@pytest.mark.parametrize("field", CONTENTS)
def test_what_counts_take_for_granted_is_told(field: str, device: str) -> None:
    """Contents of tensors are unknown, so the counts are the counts without the argument."""
    call = dict(queries="300", keys="900", window=(200, -1), device=device)
    plain, given = ask(**call), ask(**call, **CONTENTS[field])
    assert question.operations(given) == question.operations(plain)
    assert dict(explain.explain(given))["assumed"] == words.ASSUMED[field]
    assert "assumed" not in dict(explain.explain(plain))


@pytest.mark.parametrize("field", ["head_windows", "causal_seqs"])
@pytest.mark.parametrize("options", [{}, dict(window=(50, -1)), dict(causal=False)], ids=str)
def test_plain_torch_is_told_as_with_an_option_for_all(field: str, options: dict[str, Any]) -> None:
    call = dict(device="cpu", queries="300", keys="900") | options
    assert told(**call, **{field: True})["group 1"] == told(**call)["group 1"]


def test_whatever_decides_who_sees_what_is_counted_or_told() -> None:
    """Rows of the argument table that reach kernels as modifiers: options that are counted, contents that are told."""
    assert {*words.COUNTED, *words.OF_NO_KEY} <= {x.name for x in ARGUMENTS if x.mods}
    assert {*CONTENTS} == {*words.ASSUMED}
    call = dict(queries="300", keys="900")
    counts = [
        question.operations(ask(**call, **given))
        for given in ({}, dict(causal=False), dict(window=(50, -1)), dict(chunk=64), dict(shard=(1, 2, 16)))
    ]
    assert len({*map(str, counts)}) == len(counts), "counts of options that are counted differ"


def test_a_cpu_has_plain_torch_and_the_way_of_each_group() -> None:
    lines = told(device="cpu", queries="1,1,300", keys="900,910,2000", batch=3)
    assert lines["kernels"].startswith("plain torch: ")
    assert lines["group 1"] == "2 sequences of 1 query at 900 to 910 keys, flash attention of torch"
    assert lines["group 2"] == "1 sequence of 300 queries at 2000 keys, flash attention of torch"
    assert told(device="cpu", softcap=3.0)["group 1"].endswith("blocks over tiles of 512 keys: scores are modified")
    of_a_rank = told(device="cpu", queries="1,300", keys="900,900", batch=2, shard=(1, 2, 16))
    assert of_a_rank["shard"] == "rank 1 of 2 has 896 of 1800 keys, in stripes of 16"
    assert of_a_rank["group 1"].endswith("flash attention of torch")
    assert of_a_rank["group 2"].endswith("blocks over tiles of 512 keys: its keys lie with several ranks")
    bounded = told(device="cpu", queries="300", keys="900", window=(50, -1))["group 1"]
    assert bounded.endswith("a window or a chunk bounds what its queries see")


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(
    ("scales", "way"),
    [
        *((x, "flash attention of torch") for x in ("number", "tensor")),
        *((x, "heads, or keys of the call's own, have scales of their own") for x in ("per_head", "per_seq")),
        ("per_token", "each cached token has a scale of its own"),
    ],
)
def test_a_cpu_takes_flash_attention_where_scales_are_one_number(scales: str, way: str, kv_dtype: torch.dtype) -> None:
    lines = told(device="cpu", queries="1", keys="900", kv_dtype=kv_dtype, scales=scales)
    assert lines["group 1"].endswith(way)


def test_other_devices_have_portable_kernels_and_may_have_no_ceilings() -> None:
    lines = told(device="sm80")
    assert lines["device"] == "sm80, 108 multiprocessors"
    assert lines["kernels"] == "portable; the others are for sm90"
    assert lines["at best"] == "no ceilings are known for sm80"


def test_hopper_kernels_that_are_switched_off_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_trial, "ASKED", "0")
    planner.plan.cache_clear()
    try:
        assert told()["kernels"] == "portable; not Hopper's, for PAGED_ATTN_HOPPER is 0"
    finally:
        planner.plan.cache_clear()


def test_another_triton_runs_the_portable_kernels(tmp_path: Path) -> None:
    program = """
import warnings, triton
triton.__version__ = "9.9.9"
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    from paged_attn.kernels.hopper import dialect
    from paged_attn.launching import triton_trial
    from paged_attn.planning import planner
    from tests.explain.asked import ask
    launches = planner.plan(ask().problem).launches
    assert dialect.gluon_available() is dialect.gluon_available() is False
print(len(heard), len(launches))
print([x.pipe for x in launches], triton_trial.why_untrusted("sm90"))
"""
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONWARNINGS": "", "TRITON_CACHE_DIR": str(tmp_path)}
    done = warm.run(["-c", program], environment, ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["0 1", "[None] nobody has tried them on such a GPU"]


def test_heads_beyond_256_dims_over_fp8_are_for_the_portable_kernel() -> None:
    fp8 = told(head_dim=512, kv_dtype=torch.float8_e4m3fn)["kernels"]
    assert fp8.endswith("which do not take a head_dim other than 40..256 in steps of 8")
    assert told(head_dim=512)["kernels"] == "Hopper's"
    assert "of 64 and values of 512" in printed("--head-dim 64 --value-dim 512 --device sm90")
