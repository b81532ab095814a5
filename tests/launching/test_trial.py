"""A Triton that nobody read: what it makes is tried once, and what is found decides, in one warning, for later ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from paged_attn import selftest
from paged_attn.kernels.hopper import dialect
from paged_attn.launching import platform, triton_trial, triton_version
from tests.support import warm

ROOT = Path(__file__).parents[2]
SMALL = [selftest.Case("decode", [1, 1], [5, 30]), selftest.Case("fp8", [1, 3], [9, 20], kv_dtype=torch.float8_e4m3fn)]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Triton 3.10 with a GPU of sm90, nothing on disk, and the commands of processes that try calls."""
    commands: list[Any] = []
    monkeypatch.setattr(triton, "__version__", "3.10.0")
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(triton_trial, "ASKED", None)
    monkeypatch.setattr(triton_trial, "_verdicts", {})
    monkeypatch.setattr(triton_trial, "_device", lambda arch: 0)
    answer(monkeypatch, commands, said={"why": "", "keep": True})
    return commands


def answer(patch: pytest.MonkeyPatch, commands: list[Any], said: Any = None, code: int = 0) -> None:
    """What that process is going to say."""

    def run(command: Any, **_: Any) -> Any:
        commands.append(command)
        if isinstance(said, Exception):
            raise said
        stdout = "" if said is None else "something else\n" + json.dumps(said) + "\n"
        return SimpleNamespace(stdout=stdout, stderr="first\nlast", returncode=code)

    patch.setattr(triton_trial.subprocess, "run", run)


def forget(patch: pytest.MonkeyPatch) -> None:
    """Forget verdicts, as at the start of another process."""
    patch.setattr(triton_trial, "_verdicts", {})


@pytest.mark.parametrize("version, known", [
    ("3.6.0", True), ("3.7.1", True), ("3.8.0", True), ("3.9.2", True), ("3.9.0+cu130", True),
    ("3.5.1", False), ("3.10.0", False), ("3.60.0", False), ("4.0", False), ("3.9.0+git12ab", False),
    ("3.9.0.dev20260101", False),
])  # fmt: skip
def test_releases_of_versions_that_were_read_are_known(version: str, known: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    assert triton_version.known() is known
    assert triton_version.older() is (version == "3.5.1")


def test_a_triton_that_is_found_right_has_all_kernels_without_a_word(asked: list[Any], monkeypatch: Any) -> None:
    for _ in range(3):
        assert dialect.gluon_available()
        assert triton_trial.why_untrusted("sm90") is None
    assert len(asked) == 1
    forget(monkeypatch)
    assert dialect.gluon_available()
    assert len(asked) == 1, "it is on disk"
    monkeypatch.setattr(triton, "__version__", "3.11.0")
    forget(monkeypatch)
    assert dialect.gluon_available()
    assert len(asked) == 2, "that was about another version"


def test_a_check_that_fails_leaves_the_portable_kernels_with_one_warning(asked: list[Any], monkeypatch: Any) -> None:
    answer(monkeypatch, asked, said={"why": "a call is wrong (decode)", "keep": True})
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        assert not dialect.gluon_available()
        assert not dialect.gluon_available()
        assert triton_trial.why_untrusted("sm90") == "a call is wrong (decode)"
    assert [str(x.message) for x in heard] == [
        "paged-attn was not written for Triton 3.10.0, and a call is wrong (decode): all calls go to the portable "
        "kernels, launched by Triton"
    ]
    forget(monkeypatch)
    with pytest.warns(UserWarning, match="a call is wrong"):
        assert not dialect.gluon_available()
    assert len(asked) == 1


@pytest.mark.parametrize("said, code, kept, why", [
    (None, -11, True, "status -11: last"),
    (None, 1, False, "status 1: last"),
    ({"why": "a call fails: CUDA error: out of memory", "keep": False}, 0, False, "out of memory"),
    (subprocess.TimeoutExpired("python", 1), 0, True, "took more than"),
    (OSError("no python"), 0, False, "no process could be started"),
])  # fmt: skip
def test_what_may_be_no_fault_of_triton_is_not_kept(
    said: Any, code: int, kept: bool, why: str, asked: list[Any], monkeypatch: Any
) -> None:
    answer(monkeypatch, asked, said, code)
    for _ in range(2):
        forget(monkeypatch)
        with pytest.warns(UserWarning, match=why):
            assert not dialect.gluon_available()
    assert len(asked) == 2 - kept


def test_without_a_gpu_only_what_others_found_counts(asked: list[Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(triton_trial, "_device", lambda arch: None)
    assert dialect.why_no_gluon() == "nobody has tried them on such a GPU"
    triton_trial._keep("sm90", "")
    assert dialect.why_no_gluon() is None
    assert not asked


@pytest.mark.parametrize("version, choice, gluon, kept", [
    ("3.10.0", "0", False, False), ("3.10.0", "1", True, False), ("3.5.0", None, False, False),
    ("3.9.0", None, True, True), ("3.9.0", "0", False, True),
])  # fmt: skip
def test_nothing_is_tried_where_the_user_or_the_version_says_it_all(
    version: str, choice: str | None, gluon: bool, kept: bool, asked: list[Any], monkeypatch: Any
) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(triton_trial, "ASKED", choice)
    assert dialect.gluon_available() is gluon
    assert (triton_trial.why_untrusted("sm90") is None) is kept
    assert not asked


def test_other_vendors_are_not_tried(asked: list[Any]) -> None:
    assert triton_trial.why_untrusted("gfx942")
    assert not asked


def test_names_that_are_missing_are_reason_enough(asked: list[Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(dialect, "_why_unnamed", lambda: "they need another Triton")
    assert dialect.why_no_gluon() == "they need another Triton"
    assert not asked


def test_that_process_has_the_packages_of_this_one_and_decides_for_itself(monkeypatch: Any) -> None:
    monkeypatch.setenv("PAGED_ATTN_HOPPER", "1")
    monkeypatch.setattr(sys, "path", ["", "/first"])
    environment = platform.child_environment("PAGED_ATTN_HOPPER")
    assert environment["PYTHONPATH"] == os.pathsep.join([".", "/first"])
    assert environment["TRITON_INTERPRET"] == "0"
    assert "PAGED_ATTN_HOPPER" not in environment


def test_calls_that_are_right_raise_no_complaint(device: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(selftest, "TRIED", SMALL)
    assert list(selftest.complaints("sm80", torch.device(device))) == []


@pytest.mark.parametrize("error", [1.0, float("nan")])
def test_a_wrong_result_is_complained_about(error: float, device: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(selftest, "TRIED", SMALL[:1])
    monkeypatch.setattr(selftest, "error_of", lambda case, generator, device: error)
    found = list(selftest.complaints("sm80", torch.device(device)))
    assert [x.split(" (")[0] for x in found] == ["a call is wrong", "a kept launch is wrong"]


def test_machine_code_that_spills_or_lacks_what_makes_it_quick_is_complained_about() -> None:
    good = "wgmma.mma_async.sync cp.async.bulk.tensor.3d"
    assert not list(selftest.kernel_complaints("blocks_kernel", 0, good))
    assert not list(selftest.kernel_complaints("attention_kernel", 0, ""))
    assert list(selftest.kernel_complaints("attention_kernel", 33, "")) == [
        "the compiler spills 33 registers of attention_kernel"
    ]
    assert list(selftest.kernel_complaints("blocks_kernel", 0, good[:15])) == [
        "the compiler makes no cp.async.bulk.tensor of blocks_kernel"
    ]


@pytest.mark.parametrize("error, keep", [("wgmma is unknown", True), ("CUDA error: out of memory", False)])
def test_the_process_says_what_failed_in_a_line(error: str, keep: bool, monkeypatch: Any, capsys: Any) -> None:
    def fail(arch: str, device: Any) -> Any:
        raise RuntimeError(error)

    monkeypatch.setattr(triton_trial, "_verdicts", {})
    monkeypatch.setattr(selftest, "complaints", fail)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    selftest.try_kernels("sm90", 0)
    assert json.loads(capsys.readouterr().out) == {"why": f"a call fails: RuntimeError: {error}", "keep": keep}
    assert triton_trial._verdicts == {"sm90": ""}, "its own calls do not ask"


def test_the_calls_that_are_tried_take_every_kind_of_hopper_kernel() -> None:
    program = """
import torch
from paged_attn import selftest
from paged_attn.launching import platform, launch
from paged_attn.preparation import processes

names = []
processes.compile_only(platform.Device("sm90", 132), lambda _: None)
launch.run = lambda kernel, grid, *args, **options: names.append(kernel.__name__)
for case in selftest.TRIED:
    selftest.error_of(case, torch.Generator().manual_seed(0), torch.device("cpu"))
print(*sorted(set(names)))
"""
    environment = os.environ | {"TRITON_INTERPRET": "0", "PAGED_ATTN_HOPPER": "1"}
    done = warm.run(["-c", program], environment, ROOT)
    assert done.returncode == 0, done.stderr
    assert {"blocks_kernel", "mixed_kernel", "shares_kernel", "write_kv_kernel"} <= set(done.stdout.split())


def test_importing_says_nothing_about_the_version(monkeypatch: Any) -> None:
    program = """
import triton, warnings
triton.__version__ = "3.10.0"
warnings.simplefilter("error")
import paged_attn
"""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = warm.run(["-c", program], environment, ROOT)
    assert done.returncode == 0, done.stderr
