"""`dataparallel doctor`, on machines that exist only in the test."""

from __future__ import annotations

import json
import pathlib
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
from torch import device as torch_device

from dataparallel.tools import cli
from dataparallel.tools.doctor import accelerators, basics, command
from dataparallel.tools.doctor.check import Check, Probe
from dataparallel.tools.doctor.kernels import kernels


def fake_torch(
    *, version: str = "2.13.0", cuda: str | None = None, gpus: int = 0, threads: int = 2
) -> Any:
    """As much of torch as the checks look at."""
    properties = SimpleNamespace(name="Fake GPU", total_memory=8 * 2**30, major=9, minor=0)
    return SimpleNamespace(
        __version__=version,
        version=SimpleNamespace(cuda=cuda, hip=None, xpu=None),
        get_num_threads=lambda: threads,
        get_device_module=lambda device: SimpleNamespace(
            get_device_properties=lambda index: properties
        ),
        cuda=SimpleNamespace(
            is_available=lambda: gpus > 0,
            device_count=lambda: gpus,
            can_device_access_peer=lambda i, j: {i, j} != {0, 2},
            nccl=SimpleNamespace(version=lambda: (2, 27, 5), is_available=lambda tensors: True),
        ),
        empty=lambda size, device: device,
        device=lambda kind, index: (kind, index),
    )


def nothing_installed(name: str) -> Any:
    raise metadata.PackageNotFoundError(name)


def fake_probe(torch: Any = None, **others: Any) -> Probe:
    """A machine with nothing on it but, where given, torch."""
    gpus = 0 if torch is None else torch.cuda.device_count()
    package = SimpleNamespace(accelerators=lambda: [torch_device("cuda", i) for i in range(gpus)])
    modules = {"torch": torch, "dataparallel": package}
    nothing: dict[str, Any] = {
        "version": lambda distribution: None,
        "distribution": nothing_installed,
        "module": modules.get,
        "which": lambda name: None,
        "output": lambda *command: None,
        "environment": lambda name: None,
        "python": "3.12.1",
        "python_header": lambda: None,
        "cores": lambda: 2,
    }
    return Probe(**{**nothing, **others})


def test_a_machine_with_torch_alone_works() -> None:
    checks = command.examine(fake_probe(fake_torch()))
    assert command.exit_status(checks) == 0
    assert {check.name for check in checks if check.essential} == {"Python", "torch"}
    assert not [check for check in checks if check.status == "problem"]


@pytest.mark.parametrize(
    ("probe", "name", "detail", "remedy"),
    [
        (fake_probe(), "torch", "not installed", "pip install torch"),
        (
            fake_probe(version=lambda distribution: "2.13.0"),
            "torch",
            "2.13.0 is installed but cannot be imported",
            "pip install --force-reinstall torch",
        ),
        (
            fake_probe(fake_torch(version="2.10.1+cu128")),
            "torch",
            "2.10.1+cu128, but at least 2.11 is needed",
            'pip install --upgrade "torch>=2.11"',
        ),
        (
            fake_probe(fake_torch(), python="3.9.18"),
            "Python",
            "3.9.18, but at least 3.10 is needed",
            "make an environment with a newer one: python3.10 -m venv .venv",
        ),
    ],
)
def test_what_the_package_cannot_do_without(
    probe: Probe, name: str, detail: str, remedy: str
) -> None:
    checks = command.examine(probe)
    assert command.exit_status(checks) == 1
    (found,) = [check for check in checks if check.status == "problem"]
    assert (found.name, found.detail, found.remedy) == (name, detail, remedy)


def test_torch_tells_what_it_was_built_for() -> None:
    assert basics.torch(fake_probe(fake_torch())).detail == "2.13.0, built for the CPU"
    assert basics.torch(fake_probe(fake_torch(cuda="12.8"))).detail == "2.13.0, built for CUDA 12.8"
    newer = basics.torch(fake_probe(fake_torch(version="2.16.0")))
    assert newer.status == "ok"
    assert newer.detail == "2.16.0, built for the CPU; the newest that was tested is 2.15"


def test_more_threads_than_cores_is_a_problem_but_not_fatal() -> None:
    check = basics.threads(fake_probe(fake_torch(threads=8)))
    assert (check.status, check.essential) == ("problem", False)
    assert check.remedy == "export OMP_NUM_THREADS=2"


def test_devices_are_listed_with_memory_and_capability() -> None:
    found = list(accelerators.devices(fake_probe(fake_torch(cuda="12.8", gpus=2))))
    assert [check.name for check in found] == ["cuda:0", "cuda:1"]
    assert found[0].detail == "Fake GPU, 8.0 GiB, capability 9.0"


def test_without_accelerators_the_remedy_is_cpu_replicas() -> None:
    (found,) = accelerators.devices(fake_probe(fake_torch()))
    assert found.status == "missing"
    assert "device_ids" in found.remedy


def fake_nvml(calls: list[str], code: int | None = None) -> SimpleNamespace:
    """NVML with two devices, or one that fails with a code."""

    class NVMLError(Exception):
        value = code

    def init() -> None:
        calls.append("init")
        if code is not None:
            raise NVMLError

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=init,
        nvmlShutdown=lambda: calls.append("shutdown"),
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: f"GPU {handle}",
        nvmlSystemGetDriverVersion=lambda: b"580.2",
    )


@pytest.mark.parametrize(
    ("torch", "status", "detail"),
    [
        (fake_torch(cuda="12.8", gpus=2), "ok", "580.2, 2 GPU(s): GPU 0, GPU 1"),
        (fake_torch(), "problem", "torch was built without CUDA"),
        (fake_torch(cuda="13.0"), "problem", "built for CUDA 13.0, finds no usable GPU"),
    ],
)
def test_a_driver_that_torch_cannot_use_is_a_problem(torch: Any, status: str, detail: str) -> None:
    calls: list[str] = []
    modules = {"torch": torch, "pynvml": fake_nvml(calls)}
    check = accelerators.driver(fake_probe(module=modules.get))
    assert check.status == status and detail in check.detail
    assert bool(check.remedy) == (status == "problem")
    assert calls == ["init", "shutdown"]


@pytest.mark.parametrize(
    ("code", "status", "detail", "remedy"),
    [
        (12, "missing", "no driver answers; needed for CUDA: libnvidia-ml.so.1", "install NVIDIA"),
        (9, "problem", "NVIDIA's driver is not loaded", "load the driver with: sudo modprobe"),
        (18, "problem", "the driver that is loaded and its library", "restart the machine"),
        (4, "problem", "not permitted", "run as root"),
        (77, "problem", "NVML fails with error 77", "see: sudo dmesg"),
        (None, "missing", "not asked; without nvidia-ml-py", "pip install nvidia-ml-py"),
    ],
)
def test_a_driver_that_does_not_start_is_explained(
    code: int | None, status: str, detail: str, remedy: str
) -> None:
    modules = {} if code is None else {"pynvml": fake_nvml([], code)}
    check = accelerators.driver(fake_probe(module=modules.get))
    assert (check.name, check.status) == ("NVIDIA driver", status)
    assert check.detail.startswith(detail) and check.remedy.startswith(remedy)


def test_packages_that_overwrite_each_other_are_a_problem() -> None:
    class Installed:
        files = (metadata.PackagePath("pynvml.py"),)

    probe = fake_probe(version=lambda name: "13.0", distribution=lambda name: Installed())
    check = accelerators.gpu_packages(probe)
    assert check.status == "problem"
    assert check.detail.endswith("have overwritten each other's module pynvml")
    assert check.remedy.endswith("pip install nvidia-ml-py")


def test_peer_access_is_a_matrix_from_row_to_column() -> None:
    (check,) = accelerators.peer_access(fake_probe(fake_torch(cuda="12.8", gpus=3)))
    assert check.detail.splitlines() == [
        "from row to column",
        "       0   1   2",
        "  0    . yes  no",
        "  1  yes   . yes",
        "  2   no yes   .",
    ]
    assert check.status == "missing"
    assert not list(accelerators.peer_access(fake_probe(fake_torch(cuda="12.8", gpus=1))))


def test_nccl_counts_from_two_devices_on() -> None:
    assert accelerators.nccl(fake_probe(fake_torch())).status == "missing"
    one = accelerators.nccl(fake_probe(fake_torch(cuda="12.8", gpus=1)))
    assert one.detail == "2.27.5, unused with 1 CUDA device(s)"
    torch = fake_torch(cuda="12.8", gpus=2)
    assert accelerators.nccl(fake_probe(torch)).detail == "2.27.5, usable on 2 devices"
    torch.cuda.nccl.is_available = lambda tensors: False
    assert accelerators.nccl(fake_probe(torch)).status == "problem"


def test_virtual_devices_need_a_compiler_and_headers(tmp_path: pathlib.Path) -> None:
    missing = list(accelerators.virtual_devices(fake_probe(fake_torch())))
    assert [(check.name, check.status) for check in missing] == [
        ("C++ compiler", "missing"),
        ("Python headers", "missing"),
    ]
    assert all(check.remedy for check in missing)

    native = SimpleNamespace(cache_directory=lambda: tmp_path)
    probe = fake_probe(
        module={"dataparallel.kernels.native": native}.get,
        environment={"CXX": "clang++-19 -stdlib=libc++"}.get,
        which=lambda name: "/usr/bin/clang++-19" if name == "clang++-19" else None,
        output=lambda *command: "clang 19.1\nTarget: somewhere",
        python_header=lambda: "/usr/include/Python.h",
    )
    assert [check.detail for check in accelerators.virtual_devices(probe)] == [
        "clang 19.1, compiles the virtual devices, once",
        "/usr/include/Python.h",
        f"will be compiled in {tmp_path}",
    ]
    (tmp_path / "virtual-1").mkdir()
    (tmp_path / "virtual-1" / "backend.so").touch()
    *_, cache = accelerators.virtual_devices(probe)
    assert cache.detail == f"1 compiled in {tmp_path}"


@pytest.mark.parametrize("chosen", ["no-such-compiler -O2", " ", "clang+"])
def test_a_wrong_compiler_is_a_problem_although_there_is_another(chosen: str) -> None:
    """The compilation takes what CXX says, and nothing else."""
    probe = fake_probe(
        environment={"CXX": chosen}.get,
        which=lambda name: f"/usr/bin/{name}" if name in ("c++", "g++") else None,
        output=lambda *command: "g++ 13",
    )
    first = next(iter(accelerators.virtual_devices(probe)))
    assert (first.name, first.status) == ("C++ compiler", "problem")
    assert f"CXX is {chosen!r}, and there is no such command" in first.detail
    assert first.remedy == "set CXX to a C++ compiler, or unset it"


def test_every_missing_extra_says_what_for_and_how() -> None:
    missing = [*basics.extras(fake_probe()), accelerators.gpu_packages(fake_probe())]
    assert {check.status for check in missing} == {"missing"}
    assert all(check.detail.startswith("for ") for check in missing)
    assert all(check.remedy.startswith("pip install ") for check in missing)
    purposes = {check.name: check.detail for check in missing}
    for name in ("psutil", "prometheus-client", "matplotlib"):
        assert "`dataparallel monitor" in purposes[name]
    there = fake_probe(version=lambda distribution: "1.0")
    assert {check.status for check in basics.extras(there)} == {"ok"}


# --- CuPy and the CUDA kernels -----------------------------------------------------------------


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


# --- what is shown -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problems", "last"),
    [
        ([], "dataparallel works on this machine"),
        ([False], "dataparallel works; look at: driver"),
        ([True], "dataparallel cannot work here: driver"),
    ],
)
def test_every_finding_is_shown_and_the_last_line_tells_whether_it_works(
    problems: list[bool], last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [Check("Devices", "driver", "problem", "no", "do", essential=e) for e in problems]
    checks = [
        Check("Basics", "torch", "ok", "2.13.0"),
        Check("Basics", "peers", "missing", "a matrix\n0 1", "pip install 'x[y]'"),
        *found,
    ]
    command.show(checks)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == [
        "Basics",
        "  ok       torch              2.13.0",
        "  missing  peers              a matrix",
        "                              0 1",
        "                              do: pip install 'x[y]'",
    ]
    assert lines[-1] == last and lines[-1].isascii()
    assert command.exit_status(checks) == (problems == [True])


def test_this_machine_passes_and_json_holds_every_field(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["doctor"]) == 0
    assert "ok       torch" in capsys.readouterr().out
    assert cli.main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert {"Python", "torch", "cores", "C++ compiler"} <= {each["name"] for each in findings}
    fields = {"group", "name", "status", "detail", "remedy", "essential"}
    assert all(set(each) == fields for each in findings)
