"""tools/openings.py: which docstrings open without their noun."""

import pytest

from tools.openings import leans, openings


@pytest.mark.parametrize(
    "text",
    ["Of each warp.", "That lie apart.", "The same of keys.", "Until all are here.", "whether it is.", "so many"],
)
def test_a_docstring_that_opens_without_its_noun_leans(text: str) -> None:
    assert leans(text)


@pytest.mark.parametrize("text", ["Offsets of keys.", "fp8 keys.", "x-packed keys.", "`q` in parts.", "load_tile: ..."])
def test_nouns_and_names_of_code_may_open_a_docstring(text: str) -> None:
    assert not leans(text)


def test_openings_are_told_by_line_and_an_argument_may_open_its_function() -> None:
    source = '''"""Module."""


def first(q):
    """q [tokens], whole."""


class Second:
    """of nothing"""

    def third(self):
        """q of another function."""
'''
    assert list(openings(source)) == [(9, "of nothing"), (12, "q of another function.")]
