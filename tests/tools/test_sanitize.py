"""compute-sanitizer's driver: every tool gets its time, every case its process; nothing is watched here."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tools import sanitize


def test_what_one_pass_leaves_the_others_share() -> None:
    assert sanitize.share(560, ["none", "racecheck", "initcheck", "memcheck"]) == 280
    assert sanitize.share(500, ["racecheck", "initcheck", "memcheck"]) == 300
    assert sanitize.share(200, ["initcheck", "memcheck"]) == 100
    assert sanitize.share(70, ["memcheck"]) == 70
    assert sanitize.share(-3, ["memcheck"]) == 0


@pytest.mark.parametrize("part", [(0, 1), (2, 3)])
def test_each_case_of_a_part_has_one_process(part: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize, "PROGRAM", [sys.executable, "-c", "import sys; print(*sys.argv[1:])"])
    found: list[int] = []
    for status, said in sanitize.run([], 4, 3600, "", part):
        first, step = map(int, said.split()[1].split("/"))
        assert status == 0
        found += range(60)[first::step]
    assert sorted(found) == list(range(60)[part[0] :: part[1]])


def test_a_report_has_what_was_begun_and_what_was_wrong() -> None:
    said = "begin a\nend a\nbegin b\nwrong b: off\n========= Invalid read\n=========     at x\nERROR SUMMARY: 2 errors"
    found: dict[str, Any] = sanitize.read([(None, said)])
    assert (found["begun"], found["ended"], found["unfinished"], found["errors"]) == (2, 1, ["b"], 2)
    assert found["wrong"] == ["b: off"]
    assert found["reports"] == {"Invalid read | at x": 1}
