"""What planner, prepare(), explain, the command and random calls are told of arguments is what the table says."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
import torch

import paged_attn
import paged_attn.kernels
from paged_attn.arguments import (
    ARGUMENTS,
    OF_MODELS,
    SCALE,
    WITHIN,
    Argument,
    bound,
)
from paged_attn.cli.explain_command import explain
from paged_attn.cli.prepare_command import prepare as prepare_command
from paged_attn.explain import question
from paged_attn.explain.question import Question, question_of
from paged_attn.kernels.common.records import Modifiers
from paged_attn.preparation import prepare as preparing
from paged_attn.preparation.model import OF_WRITE_QKV, Lengths, Model, call_of
from paged_attn.records.problem import Problem, problem_of
from tests.arguments.declared import CALL, H200, Marked, caught, every, given_as, half, lacks
from tests.support import random_calls
from tests.support.cases import Case
from tests.support.score_mods import alibi, relative

# ---- plans -------------------------------------------------------------------------------------------------------


KEYS: torch.Tensor = CALL["k_cache"]
# Values beside those that CALL has, and the defaults; of options those of the table.
OTHER: dict[str, tuple[Any, ...]] = {x.name: x.others for x in ARGUMENTS if x.others} | {
    "q": (half(5, 8, 64), half(4, 4, 32), half(4, 4, 128)[..., :64], CALL["q"].float(), half(4, 4, 65)[..., 1:]),
    "k_cache": (half(6, 16, 1, 64), half(6, 8, 2, 65)[..., 1:], CALL["v_cache"].to(torch.float8_e4m3fn)),
    "v_cache": (half(6, 8, 2, 65)[..., 1:], half(6, 8, 2, 128)[..., :64], half(6, 8, 2, 32), KEYS[..., :32]),
    "page_table": (torch.zeros(4, 5, dtype=torch.int32),),
    "page_starts": (torch.zeros(5, dtype=torch.int32),),
    "seq_lens": (torch.zeros(3, dtype=torch.int32),),
    "cu_seqlens_q": (torch.zeros(5, dtype=torch.int32),),
    "k_new": (None, half(4, 2, 65)[..., 1:]),
    "v_new": (half(4, 2, 65)[..., 1:],),
    "causal_seqs": (torch.ones(4, dtype=torch.bool),),
    "head_windows": (torch.ones(4, 2, dtype=torch.int32),),
    "prefix_lens": (torch.ones(4, dtype=torch.int32),),
    "spans": (torch.zeros(4, 3, 2, dtype=torch.int32),),
    "alibi_slopes": (torch.zeros(4),),
    "sinks": (torch.zeros(4),),
    "qq_bias": (half(4, 4),),
    "qq_mask": (torch.zeros(4, 1, dtype=torch.int32),),
    "query_positions": (torch.zeros(4, dtype=torch.int32),),
    "score_mod": (None, alibi),
    "score_mod_args": ((half(4), 3.0), (half(4).float(), 3)),
    "q_scale": (2.0, torch.ones(4)),
    "k_scale": (2.0, torch.ones(6, 8, 2)),
    "v_scale": (2.0, torch.ones(6, 8, 2)),
    "gate": (half(4, 4, 64),),
    "out": (half(4, 4, 64),),
    "out_scale": (2.0,),
    "check": (True,),
}


# What an argument decides of others that are given.
BESIDE: dict[str, dict[str, Any]] = {"shard": dict(max_seqlen_k=20, window_size=(9, -1))}


def told(**changes: Any) -> Problem:
    return problem_of(*bound(CALL | changes), H200, interpreted=False)


@every
def test_the_planner_is_told_of_an_argument_what_the_table_says(argument: Argument) -> None:
    assert argument.name in OTHER, f"paged_attn/arguments.py, or this file, has no other value of {argument.name}"
    beside = BESIDE.get(argument.name, {})
    before, changed = told(**beside), set()
    for value in OTHER[argument.name]:
        after = told(**beside | given_as(argument, value))
        changed |= {name for name in Problem._fields if getattr(before, name) != getattr(after, name)}
    if argument.name in (
        "q",
        "k_cache",
        "v_cache",
        "kv_layout",
        "k_new",
        "v_new",
    ):  # each has facts that only some values show
        assert changed <= {*argument.plan}, argument.name
        assert changed
    else:
        assert changed == {*argument.plan}, argument.name


def test_every_fact_of_a_problem_has_an_argument_that_decides_it() -> None:
    others = {"device", "copied"}  # which the planner sets where it copies keys first
    lacks("the table's columns of plans", {name for x in ARGUMENTS for name in x.plan}, {*Problem._fields} - others)


def test_every_modifier_is_carried_for_one_argument() -> None:
    """A mask states whether it decides the first key that a query sees, for keys are copied from there on."""
    carried = [field for x in ARGUMENTS for field in x.mods]
    assert sorted(carried) == sorted(Modifiers._fields)
    assert [x.name for x in ARGUMENTS if x.bounds_left and not x.mods] == []


def test_plain_torch_reads_every_argument() -> None:
    """An argument that it forgets would be ignored on every CPU."""
    files = sorted(Path(paged_attn.kernels.__path__[0], "torch").glob("*.py"))
    source = "\n".join(file.read_text(encoding="utf-8") for file in files)
    elsewhere = {"max_seqlen_q", "max_seqlen_k", "softmax_scale", "return_lse", "check"}
    read = [x.name for x in ARGUMENTS if re.search(rf"\b{x.name}\b", source)]
    lacks("kernels/torch", read, {x.name for x in ARGUMENTS} - elsewhere)


# ---- a model's calls, and what asks about them -------------------------------------------------------------------


def test_a_model_has_what_the_table_says_and_prepare_fills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {name for x in ARGUMENTS if isinstance(x.model, tuple) for name in x.model}
    lacks("Model", Model._fields, told | {*OF_WRITE_QKV, "pages"})  # which describe calls of other functions
    keywords = inspect.signature(paged_attn.prepare).parameters
    of_batches = {"max_seqs", "max_tokens", "max_seqlen", "device", "processes", "score_mod_args"}
    lacks("prepare()", {*keywords} - of_batches, Model._fields)
    text = inspect.getdoc(paged_attn.prepare) or ""
    explained = re.findall(r"^    (\w[\w, ]*): ", text[text.index("Args:") : text.index("Returns:")], re.M)
    lacks("the docstring of prepare()", [name for names in explained for name in names.split(", ")], keywords)
    marked: dict[str, Any] = {name: Marked(name) for name in Model._fields}
    monkeypatch.setattr(preparing, "named", lambda function, _: function)
    (model, *_), _ = caught(preparing, "compile_for", monkeypatch, lambda: preparing.prepare(**marked))
    assert model._asdict() == marked


PLAIN = dict(
    heads=4, kv_heads=2, head_dim=64, page_size=16, dtype=torch.float16, cache_dtype=torch.float16,
    out_dtype=torch.float16, kv_layout="NHD", new=False, causal=True, window_size=(-1, -1), softcap=0.0, alibi=False,
    sinks=None, gate=None, qq_bias=0, query_positions=False, scales="number", return_lse=False,
)  # fmt: skip
UNLIKE: dict[str, Any] = {x.name: x.others[0] for x in OF_MODELS} | dict(
    heads=8, kv_heads=1, head_dim=32, page_size=32, dtype=torch.float8_e4m3fn, cache_dtype=torch.float8_e5m2,
    out_dtype=torch.float32, kv_layout="HND", new=True,
    causal_seqs=True, head_windows=True, prefix_lens=True, spans=3, alibi=True, sinks=torch.float32, qq_bias=4,
    query_positions=True, qq_mask=2, scales="per_head",
    gate=torch.float32, token_scales=True, integers=torch.int64, page_indices=torch.int64,
    score_mod=preparing.named(relative, (half(4), 3)), value_dim=48, latent=True, side_by_side=True,
    page_stride=48,
)  # fmt: skip


def described(call: dict[str, Any]) -> dict[str, Any]:
    """Facts of tensors that a kernel is made for."""
    as_facts = lambda x: (x.dtype, x.shape, x.stride()) if isinstance(x, torch.Tensor) else x  # noqa: E731
    return {name: [*map(as_facts, x)] if isinstance(x, tuple) else as_facts(x) for name, x in call.items()}


@every
def test_calls_of_a_model_pass_on_what_it_says(argument: Argument) -> None:
    if isinstance(argument.model, str):
        assert argument.model.strip(), f"why has a model nothing of {argument.name}?"
        return
    fp8 = dict(dtype=torch.float8_e4m3fn, cache_dtype=torch.float8_e4m3fn, out_dtype=torch.float8_e4m3fn)
    plain = PLAIN | (fp8 if argument.kind == SCALE else {}) | dict(query_positions=argument.name == "query_positions")
    before = described(call_of(Model(**plain), Lengths(True, 2, 6, 3, 40)))
    for field in argument.model:
        assert field in UNLIKE, f"tests/arguments/test_arguments_told.py has no other value of {field}"
        value = not plain[field] if isinstance(plain.get(field), bool) else UNLIKE[field]
        if field == "latent":  # keys and values of equal widths lie alike
            plain |= dict(new=True, value_dim=48)
            before = described(call_of(Model(**plain), Lengths(True, 2, 6, 3, 40)))
        after = described(call_of(Model(**plain | {field: value}), Lengths(True, 2, 6, 3, 40)))
        name = WITHIN.get(argument.name, argument.name)
        assert before.get(name) != after.get(name), f"call_of forgets {field} for {argument.name}"


def test_the_explain_verb_asks_for_what_the_table_says() -> None:
    options = {x.name for x in explain.params if isinstance(x, click.Option)} - {"as_json", "device", "help"}
    lacks("paged-attn explain", options, {name for x in ARGUMENTS for name in x.asked})
    keywords = inspect.signature(question_of).parameters
    passed_on = {name for name in options if name not in keywords}
    lacks("question_of", passed_on, passed_on & {*Model._fields})
    missing = {*keywords} - {"options", "device"} - options
    assert not missing, f"paged-attn explain does not ask for {missing}"


# Other words of the command for a model's fields.
WORDS = {"cache_dtype": "kv_dtype", "kv_layout": "layout", "window_size": "window", "return_lse": "lse"}


def test_the_prepare_verb_asks_for_every_field_of_a_model() -> None:
    options = {x.name for x in prepare_command.params if isinstance(x, click.Option)}
    other = {"max_seqs", "max_tokens", "max_seqlen", "processes", "device", "as_json", "host", "drafts"}
    wanted = {WORDS.get(name, name) for name in Model._fields}
    lacks("paged-attn prepare", options - other, {*wanted, "score_mod_args"})


VALUES: dict[str, Any] = {x.name: x.others[0] for x in OF_MODELS} | dict(
    window=(5, -1), causal_seqs=True, head_windows=True, prefix_lens=True, spans=3, alibi=True, sinks=True, qq_bias=4,
    qq_mask=2,
    query_positions=True, gate=True, token_scales=True, new=True, lse=True, layout="HND", batch_invariant=True,
    heads=16, kv_heads=4, head_dim=64, page_size=32, value_dim=48, latent=True, dtype=torch.float16,
    scales="per_head",
    kv_dtype=torch.float8_e4m3fn, queries="3", keys="77", batch=2, max_queries=9, max_keys=99,
    score_mod="tests.support.score_mods:relative", score_mod_args="float32,37", side_by_side=True,
)  # fmt: skip


def test_a_question_holds_what_each_option_says(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--device", "h200", "--queries", "2"]
    _, plain = caught(question, "question_of", monkeypatch, lambda: explain.main(words, standalone_mode=False))

    def asked(**changes: Any) -> Question:
        kv_dtype = changes.get("kv_dtype", changes.get("dtype", plain["kv_dtype"]))
        return question_of(**plain | changes | dict(kv_dtype=kv_dtype))

    for name in {name for x in ARGUMENTS for name in x.asked}:
        assert name in VALUES, f"tests/arguments/test_arguments_told.py has no other value of --{name}"
        known = {"score_mod": VALUES["score_mod"]} if name == "score_mod_args" else {}
        assert asked(**known, **{name: VALUES[name]}) != asked(**known), f"question_of forgets {name}"


# ---- tests of random calls ---------------------------------------------------------------------------------------

# Fields of a Case that decide an argument, where it is not one of the argument's own name.
FIELDS = {
    "q": "dtype", "k_cache": "layout", "v_cache": "shared_buffer", "page_table": "page_size", "seq_lens": "seq_lens",
    "cu_seqlens_q": "decode_form", "kv_layout": "layout", "max_seqlen_q": "bounds", "max_seqlen_k": "bounds",
    "k_new": "new", "v_new": "new", "alibi_slopes": "alibi", "causal_seqs": "causal_by_seq", "prefix_lens": "prefix",
    "query_positions": "positions", "page_starts": "table", "score_mod_args": "score_mod", "q_scale": "scales",
    "k_scale": "scales", "v_scale": "scales", "out": "own_out", "out_scale": "out_dtype", "return_lse": "lse",
}  # fmt: skip


@every
def test_every_argument_is_fuzzed(argument: Argument) -> None:
    field = FIELDS.get(argument.name, argument.name)
    assert field in {x.name for x in fields(Case)}, f"tests/support/cases.py has no {argument.name}"
    drawn = random_calls.ANYTHING | random_calls.BATCH
    elsewhere = {"seq_lens", "check"}  # lengths are a batch's; CHECK
    assert field in drawn or field in elsewhere, (
        f"tests/support/random_calls.py does not draw {field}, for {argument.name}"
    )
