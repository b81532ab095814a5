"""What was prepared is remembered on disk, and one process at a time prepares it."""

from __future__ import annotations

from pathlib import Path

import pytest
import triton

from paged_attn.launching.platform import Device
from paged_attn.preparation import manifest
from paged_attn.preparation.model import Model
from tests.preparation.asked import ASKED, TINY


def test_what_was_prepared_is_found_while_all_of_it_is_there(cache: Path) -> None:
    assert manifest.found(ASKED) is None
    manifest.keep(ASKED, ["a", "b"])
    assert manifest.found(ASKED) is None
    for name in "ab":
        (cache / name).mkdir()
    assert manifest.found(ASKED) == 2
    (cache / "b").rmdir()
    assert manifest.found(ASKED) is None


def test_whatever_decides_kernels_decides_what_is_found(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = TINY._replace(max_seqs=2)
    (mine,) = ASKED.names
    names = {
        mine,
        *ASKED._replace(usual=True).names,
        *ASKED._replace(device=Device("sm90", 78)).names,
        *ASKED._replace(served=(other,)).names,
    }
    assert len(names) == 4
    models = [Model(**TINY.model._asdict() | dict(shard=(rank, 2, 16))) for rank in (0, 1)]
    ranks = [ASKED._replace(served=(TINY._replace(model=model),)) for model in models]
    assert ranks[0].names == ranks[1].names != [mine], "ranks that share keys have the same kernels"
    assert ASKED._replace(served=(TINY, other)).names == ASKED._replace(served=(other, TINY)).names
    monkeypatch.setattr(manifest.triton_version, "builds_launchers", lambda: False)
    assert ASKED._replace(local=True).names == [mine], "there is nothing else to build"
    monkeypatch.setattr(manifest.triton_version, "builds_launchers", lambda: True)
    assert ASKED._replace(local=True).names != [mine]
    monkeypatch.setenv("PAGED_ATTN_HOPPER", "0")
    names |= {*ASKED.names}
    monkeypatch.setattr(manifest, "_sources", lambda: "of another version")
    assert len(names | {*ASKED.names}) == 6


def test_layers_that_were_prepared_one_by_one_are_all_there(cache: Path) -> None:
    """As commands for an image do it; an engine asks for all at once."""
    other = TINY._replace(max_seqs=2)
    for name, one in (("a", TINY), ("b", other)):
        (cache / name).mkdir()
        manifest.keep(ASKED._replace(served=(one,)), [name])
    assert manifest.found(ASKED._replace(served=(TINY, other))) == 2


def test_one_process_at_a_time_has_the_turn(cache: Path) -> None:
    with manifest.turn(ASKED, wait=False) as mine:
        assert mine is not None
        with manifest.turn(ASKED, wait=False) as other:
            assert other is None
        with manifest.turn(ASKED._replace(usual=True), wait=False) as another:
            assert another is not None
    with manifest.turn(ASKED, wait=True) as again:
        assert again is not None


def test_where_nothing_can_be_locked_everybody_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setitem(vars(triton.knobs.cache), "dir", str(tmp_path / "file"))
    with manifest.turn(ASKED, wait=False) as mine:
        assert mine == manifest.Held(None)
    manifest.keep(ASKED, ["a"])
    assert manifest.found(ASKED) is None
