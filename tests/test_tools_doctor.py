"""`dataparallel doctor`, on machines that exist only in the test."""

from __future__ import annotations

import io
import json
import pathlib
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from torch import device as torch_device

from dataparallel.tools import cli
from dataparallel.tools.doctor import accelerators, basics, command, report
from dataparallel.tools.doctor.check import Check, Probe


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


def smi(path: str = "/usr/bin/nvidia-smi") -> dict[str, Any]:
    """A machine on which nvidia-smi finds one GPU."""
    return {
        "which": lambda name: path if name == "nvidia-smi" else None,
        "output": lambda *command: "570.1, Fake GPU" if command[0] == "nvidia-smi" else None,
    }


@pytest.mark.parametrize(
    ("torch", "status", "detail"),
    [
        (fake_torch(cuda="12.8", gpus=1), "ok", "570.1, 1 GPU(s): Fake GPU"),
        (fake_torch(), "problem", "torch was built without CUDA"),
        (fake_torch(cuda="13.0"), "problem", "built for CUDA 13.0, finds no usable GPU"),
    ],
)
def test_a_driver_that_torch_cannot_use_is_a_problem(torch: Any, status: str, detail: str) -> None:
    check = accelerators.driver(fake_probe(torch, **smi()))
    assert check.status == status
    assert detail in check.detail
    assert bool(check.remedy) == (status == "problem")


def test_nvml_is_asked_first_and_shut_down() -> None:
    calls = []
    nvml = SimpleNamespace(
        NVMLError=OSError,
        nvmlInit=lambda: calls.append("init"),
        nvmlShutdown=lambda: calls.append("shutdown"),
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: f"GPU {handle}",
        nvmlSystemGetDriverVersion=lambda: b"580.2",
    )
    modules = {"torch": fake_torch(cuda="12.8", gpus=2), "pynvml": nvml}
    check = accelerators.driver(fake_probe(module=modules.get, **smi()))
    assert check.detail == "580.2, 2 GPU(s): GPU 0, GPU 1"
    assert calls == ["init", "shutdown"]


def test_a_failing_nvml_leaves_it_to_nvidia_smi() -> None:
    def fail() -> None:
        raise OSError("driver not loaded")

    modules = {
        "torch": fake_torch(cuda="12.8", gpus=1),
        "pynvml": SimpleNamespace(NVMLError=OSError, nvmlInit=fail),
    }
    assert accelerators.driver(fake_probe(module=modules.get, **smi())).detail.startswith("570.1")


@pytest.mark.parametrize(
    ("code", "status", "detail", "remedy"),
    [
        (12, "missing", "no driver answers; needed for CUDA: libnvidia-ml.so.1", "install NVIDIA"),
        (9, "problem", "NVIDIA's driver is not loaded", "load the driver with: sudo modprobe"),
        (18, "problem", "the driver that is loaded and its library", "restart the machine"),
        (4, "problem", "not permitted", "run as root"),
        (77, "problem", "NVML fails with error 77", "see: sudo dmesg"),
    ],
)
def test_a_driver_that_does_not_start_is_explained(
    code: int, status: str, detail: str, remedy: str
) -> None:
    class NVMLError(Exception):
        value = code

    def fail() -> None:
        raise NVMLError

    modules = {"pynvml": SimpleNamespace(NVMLError=NVMLError, nvmlInit=fail)}
    check = accelerators.driver(fake_probe(module=modules.get))
    assert (check.name, check.status) == ("NVIDIA driver", status)
    assert check.detail.startswith(detail)
    assert check.remedy.startswith(remedy)


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


def test_only_what_is_essential_decides_on_the_exit_status() -> None:
    problem = Check("Devices", "driver", "problem", "too old")
    assert command.exit_status([problem]) == 0
    assert command.exit_status([problem, Check("B", "torch", "problem", "", essential=True)]) == 1


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


# --- what is shown -----------------------------------------------------------------------------

CHECKS = [
    Check("Basics", "torch", "ok", "2.13.0"),
    Check("Devices", "driver", "problem", "too old", "install a newer one"),
    Check("Extras", "rich", "missing", "for tables", 'pip install "dataparallel[tools]"'),
]


def printed(checks: list[Check], width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    report.print_table(checks, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_shows_every_finding_and_remedy() -> None:
    lines = [line.rstrip() for line in printed(CHECKS).splitlines()]
    assert "  ✓ torch   2.13.0" in lines
    assert "  ✗ driver  problem: too old" in lines
    assert '            → pip install "dataparallel[tools]"' in lines
    assert lines[-1] == "dataparallel works; look at: driver"


def test_the_last_line_tells_whether_the_package_works() -> None:
    assert printed(CHECKS[:1]).splitlines()[-1] == "dataparallel works on this machine"
    broken = [*CHECKS, Check("Basics", "Python", "problem", "3.9", essential=True)]
    assert printed(broken).splitlines()[-1] == "dataparallel cannot work here: Python"


def test_it_can_do_without_rich(capsys: pytest.CaptureFixture[str]) -> None:
    command.print_plain(CHECKS)
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "[missing] Extras: rich: for tables",
        '    do: pip install "dataparallel[tools]"',
    ]


def test_this_machine_passes_and_json_holds_every_field(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert {"Python", "torch", "cores", "C++ compiler"} <= {each["name"] for each in findings}
    fields = {"group", "name", "status", "detail", "remedy", "essential"}
    assert all(set(each) == fields for each in findings)
