"""An argument is declared once: every place of a call has each of the table, or the test names it."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import paged_attn
from paged_attn import api, ops, reference
from paged_attn.arguments import (
    ARGUMENTS,
    BY_NAME,
    CHECK,
    INSTEAD,
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
from paged_attn.calls.call_cache import form_of
from paged_attn.checks import argument_rows as checks
from paged_attn.checks.page_table import STARTS
from tests.arguments.declared import CALL, NAMES, Marked, caught, every, given_as, lacks

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
    assert_a_call_arrives("api.paged_attention", args, dict.fromkeys(INSTEAD))


@pytest.mark.parametrize("name", INSTEAD)
def test_the_call_gives_a_tensor_instead_of_an_option_a_place_of_its_own(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option is then what leaves all to the tensor: not causal, no window."""
    marked: dict[str, Any] = {name: Marked(name) for name in NAMES}
    tensor = marked[WITHIN[name]] = torch.ones(4, 2)
    args, _ = caught(api, "attend", monkeypatch, lambda: api.paged_attention(**marked))
    given, options = dict(zip(Tensors._fields[6:], args[7])), dict(zip(Options._fields, args[8]))
    assert given[name] is tensor
    assert options[WITHIN[name]] == INSTEAD[name]
    tensors, its_options = bound(dict.fromkeys(PLACES) | {WITHIN[name]: tensor})
    assert getattr(tensors, name) is tensor
    assert getattr(its_options, WITHIN[name]) == INSTEAD[name]


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
    for name in INSTEAD:
        of_caller.pop(name)
        marked[name] = None
    _, given = caught(ops, "paged_attention", monkeypatch, lambda: api.paged_attention(**of_caller))
    lacks("ops.paged_attention, as api.py calls it,", given, {*BY_NAME} - {*absent})
    for name, value in given.items():
        assert value is marked.get(name), f"api.py gives {value!r} for {name}"
    given |= {name: Marked(name) for name in INSTEAD}
    monkeypatch.undo()
    monkeypatch.setattr(ops, "check_options", lambda **given: lacks("check_options", given, set(options)))
    monkeypatch.setattr(ops, "boolean", lambda *_: None)
    monkeypatch.setattr(ops, "_scales", lambda given, q: lacks("_scales", given, of_kind(SCALE)) or given)
    options = [name for name in of_kind(OPTION) if name not in absent]
    to_operator = functools.partial(ops.paged_attention, **given)
    args, named = caught(torch.ops.paged_attn, "attention_lse", monkeypatch, to_operator)
    assert [getattr(x, "name", None) or "q" for x in args] == [*PLACES, "out"]
    lacks("the operator, as ops.py calls it,", named, {*given} - {*PLACES, "out", "return_lse"})
    assert all(value.name == name for name, value in named.items())


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
    ones = ((0, 1, 1), (False, 1, 1), (0.0, 1, 1)) if argument.name == "shard" else ones
    values = [*ones, ("other",) if argument.name == "score_mod_args" else (3, 4)]
    if argument.kind == OPTION and argument.check[:1] in (
        ("choice",),
        (),
    ):  # words and functions, which equal no number
        values = values[-2:]
    values[-1] = torch.ones(2) if argument.kind not in (OPTION, "several") else values[-1]
    if argument.name in INSTEAD:
        values = [INSTEAD[argument.name], values[-1]]  # what is no tensor is the option
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


# A value that breaks each rule, and the message that refuses the value.
WRONG: dict[str, Callable[..., tuple[Any, str]]] = {
    "boolean": lambda words="True or False": (1, f"{words}, got int: bool(NAME)"),
    "choice": lambda words: ("", f"{', '.join(map(repr, words[:-1]))} or {words[-1]!r}, got ''"),
    "integer": lambda least: (least - 1, f"None or an int >= {least} and < 2^31, got {least - 1}"),
    "number": lambda words, least=0: ("3", f"{words}, got str: float(NAME)"),
    "shard": lambda: (4, "None or (rank, world, stripe), three ints, got int"),
    "window": lambda: (
        4,
        "(left, right), two ints >= -1, or a tensor [heads, 2], got 4: (3, -1) is a sliding window of 4 keys",
    ),
}


@every
def test_an_option_outside_its_limits_is_refused_word_for_word(argument: Argument) -> None:
    for rule, *limits in [argument.check] if argument.check else []:
        value, wanted = WRONG[rule](*limits)
        wanted = wanted.replace("NAME", argument.name)
        with pytest.raises((TypeError, ValueError), match=f"^{re.escape(f'{argument.name} must be {wanted}')}$"):
            checks.check_options(**{argument.name: value})


def test_kinds_of_arguments_are_in_the_order_of_a_launch() -> None:
    assert Tensors._fields[-1] == of_kind(RESULT)[0]
    assert [*Tensors._fields[:6]] == PLACES
    lacks("Tensors and Options", [*Tensors._fields, *Options._fields, *of_kind(CHECK)], BY_NAME)
