"""What `dataparallel doctor` says about CuPy and the CUDA kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dataparallel.tools.doctor import command
from dataparallel.tools.doctor.check import Check, Probe
from dataparallel.tools.doctor.kernels import kernels
from tests.test_tools_doctor import fake_probe, fake_torch


def probe_with(
    cuda: str | None, packages: dict[str, str], *, imported: bool = True, served: int = 2
) -> Probe:
    """Two CUDA devices, the first ``served`` of which CuPy can launch kernels on."""
    backend = SimpleNamespace(
        backend_of=lambda device: "cupy" if device[1] < served else None,
    )
    modules: dict[str, Any] = {
        "torch": fake_torch(cuda=cuda, gpus=2),
        "dataparallel.kernels.backend": backend,
        "cupy": SimpleNamespace() if imported else None,
    }
    return fake_probe(version=packages.get, module=modules.get)


def found(probe: Probe) -> tuple[Check, list[Check]]:
    cupy, *devices = kernels(probe)
    assert cupy.name == "CuPy"
    return cupy, devices


@pytest.mark.parametrize(
    ("cuda", "packages"),
    [
        ("13.0", {"cupy-cuda13x": "14.2.0"}),
        ("12.8", {"cupy-cuda12x": "14.0.1"}),
        ("12.8", {"cupy": "15.0.0a1"}),
    ],
)
def test_a_cupy_that_fits_runs_the_kernels(cuda: str, packages: dict[str, str]) -> None:
    cupy, devices = found(probe_with(cuda, packages))
    ((name, version),) = packages.items()
    assert (cupy.status, cupy.detail) == ("ok", f"{name} {version}, for torch's CUDA {cuda}")
    assert [(each.name, each.status) for each in devices] == [("cuda:0", "ok"), ("cuda:1", "ok")]
    assert {each.detail for each in devices} == {"the kernels, launched with CuPy"}


@pytest.mark.parametrize("cuda", ["12.8", "13.0"])
def test_without_cupy_the_remedy_is_the_extra_that_fits(cuda: str) -> None:
    cupy, devices = found(probe_with(cuda, {}))
    assert cupy.status == "missing"
    assert cupy.remedy == f'pip install "dataparallel[cuda{cuda[:2]}]"'
    assert {each.detail for each in devices} == {
        "torch's own operations, which read memory more often"
    }
    assert {each.status for each in devices} == {"missing"}


@pytest.mark.parametrize(
    ("packages", "imported", "detail", "remedy"),
    [
        (
            {"cupy-cuda12x": "14.2.0"},
            True,
            "cupy-cuda12x 14.2.0, but torch was built for CUDA 13.0",
            'pip uninstall cupy-cuda12x, then pip install "dataparallel[cuda13]"',
        ),
        (
            {"cupy-cuda12x": "14.2.0", "cupy-cuda13x": "14.2.0"},
            True,
            "cupy-cuda13x 14.2.0, cupy-cuda12x 14.2.0: they overwrite each other's files",
            'pip uninstall cupy-cuda13x cupy-cuda12x, then pip install "dataparallel[cuda13]"',
        ),
        (
            {"cupy-cuda13x": "13.6.0"},
            True,
            "cupy-cuda13x 13.6.0, but at least 14 is needed",
            'pip install "dataparallel[cuda13]"',
        ),
        (
            {"cupy-cuda13x": "14.2.0"},
            False,
            "cupy-cuda13x 14.2.0 is installed but cannot be imported",
            'pip uninstall cupy-cuda13x, then pip install "dataparallel[cuda13]"',
        ),
    ],
)
def test_a_cupy_that_does_not_fit_is_a_problem(
    packages: dict[str, str], imported: bool, detail: str, remedy: str
) -> None:
    cupy, devices = found(probe_with("13.0", packages, imported=imported))
    assert (cupy.status, cupy.detail, cupy.remedy) == ("problem", detail, remedy)
    assert not cupy.essential
    assert {each.status for each in devices} == {"missing"}


def test_a_device_that_cupy_cannot_use_is_a_problem() -> None:
    _, devices = found(probe_with("13.0", {"cupy-cuda13x": "14.2.0"}, served=1))
    assert [each.status for each in devices] == ["ok", "problem"]
    assert "although CuPy is there" in devices[1].detail
    assert "show_config" in devices[1].remedy


def test_a_torch_without_cuda_has_no_use_for_it() -> None:
    for probe in (fake_probe(), fake_probe(fake_torch()), fake_probe(fake_torch(gpus=2))):
        (cupy,) = kernels(probe)
        assert (cupy.status, cupy.remedy) == ("missing", "")
        assert cupy.detail.startswith("runs the CUDA kernels; of no use here")
    unused = fake_probe(fake_torch(), version={"cupy-cuda13x": "14.2.0"}.get)
    assert next(iter(kernels(unused))).detail.startswith("cupy-cuda13x 14.2.0, ")


def test_the_command_shows_it() -> None:
    checks = command.examine(probe_with("13.0", {"cupy-cuda13x": "14.2.0", "torch": "2.13.0"}))
    assert [each.name for each in checks if each.group == "CUDA kernels"] == [
        "CuPy",
        "cuda:0",
        "cuda:1",
    ]
