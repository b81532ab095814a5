"""An argument is declared once: every place that handles arguments has each of the table, or the test names it."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

import click
import pytest
import torch

import paged_attn
from paged_attn import api, ops, reference, traced
from paged_attn.arguments import (
    ARGUMENTS,
    BY_NAME,
    CHECK,
    OF_MODELS,
    OPTION,
    PART,
    PLACES,
    REQUIRED,
    RESULT,
    SCALE,
    TENSOR,
    WITHIN,
    Argument,
    Options,
    Tensors,
    bound,
    of_kind,
)
from paged_attn.calls.form import form_of
from paged_attn.checks import arguments as checks
from paged_attn.checks.page_table import STARTS
from paged_attn.cli.explain import explain
from paged_attn.cli.prepare import prepare as prepare_command
from paged_attn.explain import question
from paged_attn.explain.question import Question, question_of
from paged_attn.launching.backend import Device
from paged_attn.preparation import prepare as preparing
from paged_attn.preparation.model import Lengths, Model, call_of
from paged_attn.records.posed import problem_of
from paged_attn.records.problem import Problem
from tests import random_calls
from tests.cases import Case
from tests.score_mods import alibi, relative

NAMES = [x.name for x in ARGUMENTS if x.kind != PART]  # of signatures; parts are given within others
H200 = Device("sm90", 132)
every = pytest.mark.parametrize("argument", ARGUMENTS, ids=lambda x: x.name)


def lacks(place: str, has: Iterable[str], wanted: Iterable[str] = NAMES) -> None:
    """Each name once, and no other; their order is another matter."""
    has, wanted = list(has), list(wanted)
    missing = [name for name in wanted if name not in has]
    unknown = [name for name in has if name not in wanted]
    assert not missing, f"{place} lacks {missing}, which paged_attn/arguments.py has"
    assert not unknown, f"{place} has {unknown}, which paged_attn/arguments.py lacks"
    assert len(has) == len(set(has)), f"{place} has a name twice: {has}"


class Marked:
    """Stands for the value of an argument, to see where it arrives."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"the value of {self.name}"

    def __iter__(self) -> Any:  # of a window: its operator makes a tuple of it
        return iter([self])


# ---- signatures --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [paged_attn.paged_attention, reference.paged_attention], ids=["api", "reference"])
def test_a_signature_is_that_of_the_table(function: Callable[..., Any]) -> None:
    given = inspect.signature(function).parameters
    lacks(f"the signature in {function.__module__}", given)
    assert list(given) == NAMES
    for argument in map(BY_NAME.__getitem__, NAMES):
        default = given[argument.name].default
        wanted = inspect.Parameter.empty if argument.default is REQUIRED else argument.default
        assert (type(default), default) == (type(wanted), wanted), argument.name
        kind = given[argument.name].kind
        assert (kind is inspect.Parameter.POSITIONAL_OR_KEYWORD) == (argument.name in PLACES), argument.name


def test_the_docstring_explains_every_argument() -> None:
    text = inspect.getdoc(paged_attn.paged_attention) or ""
    section = text[text.index("Args:") : text.index("Returns:")]
    explained = re.findall(r"^    (\w[\w, ]*): ", section, re.M)
    lacks("the docstring of paged_attention", [name for names in explained for name in names.split(", ")])


def test_an_operator_has_what_a_graph_can_hold() -> None:
    for name in ("attention", "attention_lse"):
        schema = getattr(torch.ops.paged_attn, name).default._schema.arguments
        wanted = [x.name for x in ARGUMENTS if x.schema is not None]
        lacks(f"torch.ops.paged_attn.{name}", [x.name for x in schema], wanted)
        function = inspect.signature(ops._attention).parameters
        lacks("ops._attention", set(function) - {"return_lse"}, wanted)
        assert [x for x in function if x != "return_lse"] == [x.name for x in schema], "the order of ops._attention"
        for x in schema:
            if x.kwarg_only:
                default = tuple(x.default_value) if isinstance(x.default_value, list) else x.default_value
                assert default == function[x.name].default == BY_NAME[x.name].default, x.name
    absent = {x.name for x in ARGUMENTS if x.schema is None} - {"return_lse"}
    assert absent == {"score_mod", "score_mod_args"}, "a graph holds no functions; all else it can"


@every
def test_what_is_no_tensor_is_refused_by_its_name(argument: Argument) -> None:
    if argument.kind in (TENSOR, PART, SCALE, RESULT):
        given, options = bound(CALL)
        name = STARTS if argument.name == "page_starts" else WITHIN.get(argument.name, argument.name)
        with pytest.raises((TypeError, ValueError), match=f"^{name} must"):  # scales of 16 bits must be None
            checks.check_attention(given._replace(**{argument.name: "none"}), options)


# ---- what arrives where ------------------------------------------------------------------------------------------


class Arrived(Exception):
    """Carries what a function was given."""


def caught(module: Any, name: str, monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]) -> tuple[Any, Any]:
    """(positional, keyword) arguments of a function that is called within another."""

    def arrive(*args: Any, **given: Any) -> Any:
        raise Arrived(args, given)

    monkeypatch.setattr(module, name, arrive)
    with pytest.raises(Arrived) as arrived:
        call()
    args, given = arrived.value.args
    return args, given


def assert_a_call_arrives(place: str, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """What attend() is given is every argument in the order of Tensors and Options."""
    *first, out, others, options, check = args
    for record, values in ((Tensors, (*first, *others, out)), (Options, options)):
        names = record._fields
        assert len(values) == len(names), f"{place} gives {list(values)} for {list(names)}"
        for name, value in zip(names, values):
            wanted = constants.get(name, name)
            got = getattr(value[0] if isinstance(value, tuple) else value, "name", value)
            assert got == wanted, f"{place} gives {value!r} for {name}"
    assert check.name == "check"


def test_the_call_gives_every_argument_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    marked: dict[str, Any] = {name: Marked(name) for name in NAMES}
    marked["page_table"] = Marked("page_starts"), Marked("page_table")
    args, _ = caught(api, "attend", monkeypatch, lambda: api.paged_attention(**marked))
    assert_a_call_arrives("api.paged_attention", args, {"causal_seqs": None})


def test_the_call_gives_a_tensor_as_causal_a_place_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    marked: dict[str, Any] = {name: Marked(name) for name in NAMES}
    marked["causal"] = torch.ones(4, dtype=torch.bool)
    args, _ = caught(api, "attend", monkeypatch, lambda: api.paged_attention(**marked))
    given, options = dict(zip(Tensors._fields[6:], args[7])), dict(zip(Options._fields, args[8]))
    assert given["causal_seqs"] is marked["causal"]
    assert options["causal"] is False
    assert bound(dict.fromkeys(PLACES) | {"causal": marked["causal"]})[0].causal_seqs is marked["causal"]


def test_the_operator_gives_every_argument_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    marked = {name: Marked(name) for name in inspect.signature(ops._attention).parameters if name != "return_lse"}
    args, _ = caught(ops, "attend", monkeypatch, lambda: ops._attention(**marked))
    constants = {"score_mod": None, "score_mod_args": None, "return_lse": False}
    assert_a_call_arrives("ops._attention", args, constants)


def test_tracing_is_given_and_gives_every_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(1, 1, 1)
    marked: dict[str, Any] = {x.name: Marked(x.name) for x in ARGUMENTS} | {"q": q, "score_mod": None}
    of_caller = marked | {"page_table": (marked["page_starts"], marked["page_table"])}
    del of_caller["page_starts"]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    absent = [x.name for x in ARGUMENTS if x.schema is None and x.name != "return_lse"]
    of_caller.pop("causal_seqs")
    _, given = caught(traced, "paged_attention", monkeypatch, lambda: api.paged_attention(**of_caller))
    assert given["causal_seqs"] is None
    marked["causal_seqs"] = None
    lacks("traced.paged_attention, as api.py calls it,", given, {*BY_NAME} - {*absent})
    for name, value in given.items():
        assert value is marked.get(name), f"api.py gives {value!r} for {name}"
    given["causal_seqs"] = Marked("causal_seqs")
    monkeypatch.undo()
    monkeypatch.setattr(traced, "check_options", lambda **given: lacks("check_options", given, set(options)))
    monkeypatch.setattr(traced, "boolean", lambda *_: None)
    monkeypatch.setattr(traced, "_scales", lambda given, q: lacks("_scales", given, of_kind(SCALE)) or given)
    options = [name for name in of_kind(OPTION) if name not in absent]
    to_operator = functools.partial(traced.paged_attention, **given)
    args, named = caught(torch.ops.paged_attn, "attention_lse", monkeypatch, to_operator)
    assert [getattr(x, "name", None) or "q" for x in args] == [*PLACES, "out"]
    lacks("the operator, as traced.py calls it,", named, {*given} - {*PLACES, "out", "return_lse"})
    assert all(value.name == name for name, value in named.items())


def given_as(argument: Argument, value: Any) -> dict[str, Any]:
    """How callers give a value of an argument: indptr with indices."""
    if argument.name == "page_starts":
        return {"page_table": (value, torch.zeros(12, dtype=torch.int32))}
    return {WITHIN.get(argument.name, argument.name): value}


@every
def test_the_form_of_a_call_has_every_argument(argument: Argument) -> None:
    """Another value is another call; of a tensor its presence is, for a signature has its facts."""
    plain = {name: None if x.default is REQUIRED else x.default for name, x in BY_NAME.items()}

    def form(value: Any) -> Any:
        given, options = bound(plain | given_as(argument, value))
        *tensors, out = given
        return form_of(*tensors[:6], out, tuple(tensors[6:]), tuple(options))

    if argument.kind == CHECK or argument.name in PLACES[:-1]:
        return  # is asked of every call; is a tensor of every call
    ones = (0, False, 0.0) if argument.kind == OPTION else (None,)
    ones = ((0, 0), (False, 0), (0.0, 0)) if argument.name == "window_size" else ones
    values = [*ones, ("other",) if argument.name == "score_mod_args" else (3, 4)]
    if argument.kind == OPTION and argument.check[:1] in (
        ("choice",),
        (),
    ):  # words and functions, which equal no number
        values = values[-2:]
    values[-1] = torch.ones(2) if argument.kind not in (OPTION, "several") else values[-1]
    if argument.name == "causal_seqs":
        values = [False, values[-1]]  # what is no tensor is the option
    elif argument.kind == PART:  # as of the others that come with every such call, what is no tensor has no signature
        values = [None, values[-1]]
    forms = [form(value) for value in values]
    assert all(one != other for i, one in enumerate(forms) for other in forms[:i]), argument.name


def test_an_option_too_few_or_too_many_is_no_call() -> None:
    """The form of a call is found by place: one that is forgotten would be taken for another."""
    given, options = bound(dict.fromkeys(PLACES))
    *tensors, out = given
    try:
        form_of(*tensors[:6], out, tuple(tensors[6:]), tuple(options))
    except ValueError as error:
        pytest.fail(f"form_of has {error} of {Options._fields} or {Tensors._fields[6:-1]}")
    for wrong in (tuple(options)[:-1], (*options, None)):
        with pytest.raises(ValueError, match="values to unpack"):
            form_of(*tensors[:6], out, tuple(tensors[6:]), wrong)
    for wrong in (tuple(tensors[6:-1]), (*tensors[6:], None)):
        with pytest.raises(ValueError, match="values to unpack"):
            form_of(*tensors[:6], out, wrong, tuple(options))


@every
def test_an_option_outside_its_limits_is_refused_by_its_name(argument: Argument) -> None:
    """Whatever the rest of the call is."""
    if argument.kind != OPTION or argument.name == "score_mod":  # which is refused together with its arguments
        assert not argument.check
        return
    with pytest.raises(TypeError, match=rf"^{argument.name}\b"):
        checks.check_options(**{argument.name: object()})
    checks.check_options(**{argument.name: argument.default})


# Of each rule a value that breaks it, and what is said of that.
WRONG: dict[str, Callable[..., tuple[Any, str]]] = {
    "boolean": lambda words="True or False": (1, f"{words}, got int"),
    "choice": lambda words: ("", f"{' or '.join(map(repr, words))}, got ''"),
    "integer": lambda least: (least - 1, f"None or an int >= {least} and < 2^31, got {least - 1}"),
    "number": lambda words, least=0: ("3", f"{words}, got str"),
    "window": lambda: (4, "(left, right), two ints >= -1, got int"),
}


@every
def test_an_option_outside_its_limits_is_refused_word_for_word(argument: Argument) -> None:
    for rule, *limits in [argument.check] if argument.check else []:
        value, wanted = WRONG[rule](*limits)
        with pytest.raises((TypeError, ValueError), match=f"^{re.escape(f'{argument.name} must be {wanted}')}$"):
            checks.check_options(**{argument.name: value})


# ---- plans -------------------------------------------------------------------------------------------------------


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.float16)


CALL: dict[str, Any] = dict(
    q=half(4, 4, 64), k_cache=half(6, 8, 2, 64), v_cache=half(6, 8, 2, 64),
    page_table=torch.zeros(4, 3, dtype=torch.int32), seq_lens=torch.zeros(4, dtype=torch.int32),
    k_new=half(4, 2, 64), v_new=half(4, 2, 64), score_mod=relative, score_mod_args=(half(4), 3),
)  # fmt: skip
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
    "k_scale": (2.0,),
    "v_scale": (2.0,),
    "gate": (half(4, 4, 64),),
    "out": (half(4, 4, 64),),
    "out_scale": (2.0,),
    "check": (True,),
}


def told(**changes: Any) -> Problem:
    return problem_of(*bound(CALL | changes), H200, interpreted=False)


@every
def test_the_planner_is_told_of_an_argument_what_the_table_says(argument: Argument) -> None:
    assert argument.name in OTHER, f"paged_attn/arguments.py, or this file, has no other value of {argument.name}"
    before, changed = told(), set()
    for value in OTHER[argument.name]:
        after = told(**given_as(argument, value))
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
    lacks("the table's columns of plans", {name for x in ARGUMENTS for name in x.plan}, {*Problem._fields} - {"device"})


# ---- a model's calls, and what asks about them -------------------------------------------------------------------


def test_a_model_has_what_the_table_says_and_prepare_fills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lacks("Model", Model._fields, {name for x in ARGUMENTS if isinstance(x.model, tuple) for name in x.model})
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
    causal_seqs=True, prefix_lens=True, spans=3, alibi=True, sinks=torch.float32, qq_bias=4,
    query_positions=True, qq_mask=2, scales="per_head",
    gate=torch.float32, token_scales=True, integers=torch.int64, page_indices=torch.int64,
    score_mod=preparing.named(relative, (half(4), 3)), value_dim=48, latent=True,
)  # fmt: skip


def described(call: dict[str, Any]) -> dict[str, Any]:
    """Of tensors what a kernel is made for."""
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
        assert field in UNLIKE, f"tests/test_arguments.py has no other value of {field}"
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
    other = {"max_seqs", "max_tokens", "max_seqlen", "processes", "device", "as_json"}
    wanted = {WORDS.get(name, name) for name in Model._fields}
    lacks("paged-attn prepare", options - other, {*wanted, "score_mod_args"})


VALUES: dict[str, Any] = {x.name: x.others[0] for x in OF_MODELS} | dict(
    window=(5, -1), causal_seqs=True, prefix_lens=True, spans=3, alibi=True, sinks=True, qq_bias=4, qq_mask=2,
    query_positions=True, gate=True, token_scales=True, new=True, lse=True, layout="HND", batch_invariant=True,
    heads=16, kv_heads=4, head_dim=64, page_size=32, value_dim=48, latent=True, dtype=torch.float16,
    kv_dtype=torch.float8_e4m3fn, queries="3", keys="77", batch=2, max_queries=9, max_keys=99,
    score_mod="tests.score_mods:relative", score_mod_args="float32,37",
)  # fmt: skip


def test_a_question_holds_what_each_option_says(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--device", "h200", "--queries", "2"]
    _, plain = caught(question, "question_of", monkeypatch, lambda: explain.main(words, standalone_mode=False))

    def asked(**changes: Any) -> Question:
        kv_dtype = changes.get("kv_dtype", changes.get("dtype", plain["kv_dtype"]))
        return question_of(**plain | changes | dict(kv_dtype=kv_dtype))

    for name in {name for x in ARGUMENTS for name in x.asked}:
        assert name in VALUES, f"tests/test_arguments.py has no other value of --{name}"
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
    assert field in {x.name for x in fields(Case)}, f"tests/cases.py has no {argument.name}"
    drawn = random_calls.ANYTHING | random_calls.BATCH
    elsewhere = {"seq_lens", "check"}  # lengths are a batch's; CHECK
    assert field in drawn or field in elsewhere, f"tests/random_calls.py does not draw {field}, for {argument.name}"


def test_kinds_of_arguments_are_in_the_order_of_a_launch() -> None:
    assert Tensors._fields[-1] == of_kind(RESULT)[0]
    assert [*Tensors._fields[:6]] == PLACES
    lacks("Tensors and Options", [*Tensors._fields, *Options._fields, *of_kind(CHECK)], BY_NAME)
