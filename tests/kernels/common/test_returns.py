"""What functions under @triton.jit return: Triton 3.6 makes tensors of all that a returned record holds."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import paged_attn

KERNELS = Path(paged_attn.__file__).parent / "kernels"


def compiled_functions(text: str) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(x) for x in node.decorator_list):
            yield node


def returned(node: ast.expr) -> Iterator[ast.expr]:
    """The parts of a returned record that are given as they are, not what calls and conditions make of others."""
    if isinstance(node, ast.IfExp):
        yield from returned(node.body)
        yield from returned(node.orelse)
    elif isinstance(node, ast.Tuple):
        for x in node.elts:
            yield from returned(x)
    elif isinstance(node, ast.Call) and ast.unparse(node.func)[:1].isupper():  # a record is made
        for x in [*node.args, *[x.value for x in node.keywords]]:
            yield from returned(x)
    else:
        yield node


def may_return_none(function: ast.FunctionDef) -> Iterator[str]:
    """Lines that return None, or a name that is None at some line."""
    nones = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts))
                nones |= {
                    name.id
                    for name, value in pairs
                    if isinstance(name, ast.Name) and any(ast.unparse(x) == "None" for x in returned(value))
                }
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and node.value is not None:
            for x in returned(node.value):
                if ast.unparse(x) == "None" or (isinstance(x, ast.Name) and x.id in nones):
                    yield f"{function.name}: {ast.unparse(node)}"


def test_no_compiled_function_returns_a_none() -> None:
    found = []
    for path in KERNELS.rglob("*.py"):
        for function in compiled_functions(path.read_text()):
            found += [f"{path.relative_to(KERNELS)}: {line}" for line in may_return_none(function)]
    assert found == []


def test_a_none_is_found_in_a_record_in_a_name_and_behind_a_condition() -> None:
    text = """
@triton.jit
def one(x):
    a, b = x, None
    return Span(x, a), b

@gluon.jit
def other(x, FULL):
    if FULL:
        return None
    else:
        return Rows(x, kind=None if FULL else x)

@triton.jit
def right(x, y):
    y = x if y is None else y
    return Span(x, f(None), y is None)
"""
    assert [len(list(may_return_none(function))) for function in compiled_functions(text)] == [1, 2, 0]
