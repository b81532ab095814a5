"""The benchmark's command line."""

from __future__ import annotations

import pytest

from benchmarks import __main__ as bench
from benchmarks import options, suites
from benchmarks.peers import OURS


def test_peers_are_chosen_by_the_beginning_of_their_names() -> None:
    asked = options.parse(["decode", "--peers", "sdpa,cudnn"])
    assert asked.peers == [OURS, "sdpa cudnn", "sdpa flash", "cudnn paged"]
    assert asked.suites == ["decode"]
    assert options.parse(["--cliffs"]).suites == ["cliffs"]
    assert options.parse([]).suites == list(options.ALL)


def test_the_command_line_names_every_suite_and_every_peer() -> None:
    assert tuple(suites.SUITES) == options.SUITES
    assert tuple(bench.PEERS) == options.PEERS


@pytest.mark.parametrize(
    "words, message",
    [
        ("--peers nobody", "no peer 'nobody'"),
        ("--rounds 0", "must be a number above 0, got '0'"),
        ("--processes many", "must be a number above 0, got 'many'"),
        ("--trace /no/where", "there is no file '/no/where'"),
    ],
)
def test_mistakes_end_before_anything_is_measured(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        options.parse(words.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
