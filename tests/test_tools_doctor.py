"""`dataparallel doctor`, on machines that exist only in the test."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sysconfig
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dataparallel.errors import install_command
from dataparallel.tools import cli
from dataparallel.tools.doctor import command
from dataparallel.tools.doctor.check import Check, Probe


def fake_torch(version: str, cuda: str | None, gpus: int, threads: int, nccl: bool) -> Any:
    """As much of torch as the checks look at."""
    properties = SimpleNamespace(name="Fake GPU", total_memory=8 * 2**30, major=9, minor=0)
    module = SimpleNamespace(get_device_properties=lambda index: properties)
    return SimpleNamespace(
        __version__=version,
        version=SimpleNamespace(cuda=cuda, hip=None, xpu=None),
        get_num_threads=lambda: threads,
        get_device_module=lambda device: module,
        cuda=SimpleNamespace(
            is_available=lambda: gpus > 0,
            device_count=lambda: gpus,
            can_device_access_peer=lambda i, j: {i, j} != {0, 2},
            nccl=SimpleNamespace(version=lambda: (2, 27, 5), is_available=lambda tensors: nccl),
        ),
        empty=lambda size, device: device,
        device=torch.device,
    )


def fake_nvml(code: int) -> SimpleNamespace:
    """NVML with two devices, or, with a code, one that fails."""

    class NVMLError(Exception):
        value = code

    def init() -> None:
        if code:
            raise NVMLError

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=init,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: b"H100",
        nvmlSystemGetDriverVersion=lambda: b"580.2",
    )


def machine(
    has_torch: bool = True,
    version: str = "2.13.0",
    cuda: str | None = None,
    gpus: int = 0,
    threads: int = 2,
    nccl: bool = True,
    nvml: int | None = None,
    packages: dict[str, str] | None = None,
    cupy: int = 0,
    cache: pathlib.Path | None = None,
    **others: Any,
) -> Probe:
    """Return a machine with nothing on it but what is given; CuPy serves so many devices."""

    def distribution(name: str) -> Any:
        if name not in (packages or {}):
            raise metadata.PackageNotFoundError(name)
        return SimpleNamespace(files=(metadata.PackagePath("pynvml.py"),))

    devices = [torch.device("cuda", index) for index in range(gpus)]
    modules: dict[str, Any] = {
        "torch": fake_torch(version, cuda, gpus, threads, nccl) if has_torch else None,
        "dataparallel": SimpleNamespace(accelerators=lambda: devices),
        "dataparallel.kernels.backend": SimpleNamespace(
            backend_of=lambda device: "cupy" if device.index < cupy else None
        ),
        "dataparallel.kernels.native": cache and SimpleNamespace(cache_directory=lambda: cache),
        "cupy": SimpleNamespace() if cupy else None,
        "pynvml": None if nvml is None else fake_nvml(nvml),
    }
    nothing: dict[str, Any] = {
        "version": (packages or {}).get,
        "distribution": distribution,
        "module": modules.get,
        "which": lambda name: None,
        "output": lambda *command: None,
        "environment": lambda name: None,
        "python": "3.12.1",
        "python_header": lambda: None,
        "cores": lambda: 2,
        "free_threaded": False,
        "lock": lambda: True,
        "lock_option": None,
        "lock_takers": lambda modules: {},
    }
    return Probe(**(nothing | others))


def case(name: str, status: str, detail: str, remedy: str = "", **given: Any) -> Any:
    """Return a case: something on a machine, and the first words of its detail and remedy."""
    return pytest.param(name, status, detail, remedy, given, id=f"{name}: {detail}")


CUDA: dict[str, Any] = {"cuda": "13.0", "gpus": 2}
GPUS: dict[str, Any] = {"cuda": "12.8", "gpus": 2}
UNLOCKED: dict[str, Any] = {"free_threaded": True, "lock": lambda: False}
LOCKED: dict[str, Any] = {"lock": lambda: True}
TRITON: dict[str, Any] = {"lock_takers": lambda modules: {"triton": "triton._C.libtriton"}}
TWO_CUPYS = {"cupy-cuda12x": "14.2.0", "cupy-cuda13x": "14.2.0"}
BOTH_NVMLS = {"nvidia-ml-py": "13.0", "pynvml": "13.0"}
INSTALL_CUPY = install_command("cuda13")
REINSTALL_CUPY = "pip uninstall cupy-cuda13x, then " + INSTALL_CUPY


@pytest.mark.parametrize(
    ("name", "status", "detail", "remedy", "given"),
    [
        case("torch", "problem", "not installed", "pip install torch", has_torch=False, gpus=2),
        case("Python", "ok", "3.12.1"),
        case("torch", "problem", "2.13.0 is installed but cannot be imported",
             "pip install --force-reinstall torch", has_torch=False, packages={"torch": "2.13.0"}),
        case("torch", "problem", "2.10.1+cu128, but at least 2.11 is needed",
             'pip install --upgrade "torch>=2.11"', version="2.10.1+cu128"),
        case("torch", "ok", "2.13.0, built for the CPU"),
        case("torch", "ok", "2.13.0, built for CUDA 12.8", cuda="12.8"),
        case("torch", "ok", "2.16.0, built for the CPU; the newest that was tested is 2.15",
             version="2.16.0"),
        case("Python", "problem", "3.9.18, but at least 3.10 is needed",
             "make an environment with a newer one: python3.10 -m venv .venv", python="3.9.18"),
        case("cores", "problem", "2 usable, 8 intra-op threads", "export OMP_NUM_THREADS=2",
             threads=8),
        # The interpreter's lock.
        case("GIL", "ok", "on, as in any Python that is not", environment={"PYTHON_GIL": "1"}.get),
        case("GIL", "ok", "off", **UNLOCKED),
        case("GIL", "ok", "off until one of these is imported: triton (triton._C.libtriton)",
             "keep it off at your own risk: PYTHON_GIL=0 python", **UNLOCKED | TRITON),
        case("GIL", "ok", "off, whatever is imported, by PYTHON_GIL=0",
             environment={"PYTHON_GIL": "0"}.get, **UNLOCKED | TRITON),
        case("GIL", "ok", "off, whatever is imported, by -X gil=0", lock_option="0",
             environment={"PYTHON_GIL": "1"}.get, **UNLOCKED),
        case("GIL", "problem", "on, by PYTHON_GIL=1", "unset PYTHON_GIL",
             environment={"PYTHON_GIL": "1"}.get, **UNLOCKED | LOCKED),
        case("GIL", "problem", "on, by -X gil=1", "leave -X gil out", lock_option="1",
             **UNLOCKED | LOCKED),
        case("GIL", "problem", "on, by the import of triton (triton._C.libtriton)",
             "keep it off", **UNLOCKED | LOCKED | TRITON),
        case("GIL", "problem", "on, by the import of a module that doctor does", "find it: python",
             **UNLOCKED | LOCKED),
        case("accelerators", "missing", "none that this torch can use", "DataParallel(net, device"),
        case("cuda:1", "ok", "Fake GPU, 8.0 GiB, capability 9.0", **GPUS),
        # Drivers.
        case("NVIDIA driver", "missing", "not asked; without nvidia-ml-py",
             "pip install nvidia-ml-py"),
        case("NVIDIA driver", "ok", "580.2, 2 x H100", nvml=0, **GPUS),
        case("NVIDIA driver", "problem",
             "580.2, 2 x H100; but torch was built without CUDA", "pip in", nvml=0),
        case("NVIDIA driver", "problem",
             "580.2, 2 x H100; but torch, built for CUDA 13.0, finds no usable GPU",
             "install a newer driver, or a torch for an older CUDA", nvml=0, cuda="13.0"),
        case("NVIDIA driver", "missing", "no driver answers; needed for CUDA: libnvidia-ml.so.1",
             "install NVIDIA", nvml=12),
        case("NVIDIA driver", "problem", "NVIDIA's driver is not loaded",
             "load the driver with: sudo modprobe", nvml=9),
        case("NVIDIA driver", "problem", "NVML fails with error 77", "see: sudo dmesg", nvml=77),
        case("nvidia-ml-py", "problem", "nvidia-ml-py and pynvml have overwritten each", "pip",
             packages=BOTH_NVMLS),
        case("nvidia-ml-py", "missing", "for driver and memory", "pip install nvidia-ml-py"),
        # Between devices.
        case("peer access", "ok", "from row to column\n       0   1\n  0    . yes\n", **GPUS),
        case("peer access", "missing", "from row to column\n       0   1   2\n  0    . yes  no\n"
             "  1  yes   . yes\n  2   no yes   .", "copies of the pairs", cuda="12.8", gpus=3),
        case("NCCL", "missing", "not in this torch"),
        case("NCCL", "ok", "2.27.5, unused with 1 CUDA device(s)", cuda="12.8", gpus=1),
        case("NCCL", "ok", "2.27.5, usable on 2 devices", **GPUS),
        case("NCCL", "problem", "2.27.5 is there but not usable", "run with NCCL_DEBUG", nccl=False,
             **GPUS),
        # Virtual devices.
        case("C++ compiler", "missing", "compiles the virtual devices", "apt install g++"),
        case("C++ compiler", "problem", "CXX is 'clang+', and there is no such command",
             "set CXX to a C++ compiler, or unset it", environment={"CXX": "clang+"}.get,
             which=lambda name: "/usr/bin/g++" if name == "g++" else None),
        case("C++ compiler", "ok", "clang 19.1, compiles", environment={"CXX": "clang -O2"}.get,
             which={"clang": "/usr/bin/clang"}.get, output=lambda *command: "clang 19.1\nTarget"),
        case("Python headers", "missing", "compiles the virtual devices", "apt install python3"),
        case("Python headers", "ok", "/usr/Python.h", python_header=lambda: "/usr/Python.h"),
        # Extras.
        case("psutil", "missing", "for memory of", install_command("tools")),
        case("matplotlib", "ok", "1.0, for plots", packages={"matplotlib": "1.0"}),
        # Kernels.
        case("CuPy", "missing", "runs the CUDA kernels; of no use here"),
        case("CuPy", "missing", "cupy-cuda13x 14.2.0, runs the CUDA kernels; of no use here",
             packages={"cupy-cuda13x": "14.2.0"}),
        case("CuPy", "missing", "runs the kernels; without it, torch's own", INSTALL_CUPY, **CUDA),
        case("CuPy", "ok", "cupy-cuda12x 14.0.1, for torch's CUDA 12.8", cupy=2,
             packages={"cupy-cuda12x": "14.0.1"}, **GPUS),
        case("CuPy", "ok", "cupy 15.0.0a1, for torch's CUDA 12.8", cupy=2,
             packages={"cupy": "15.0.0a1"}, **GPUS),
        case("CuPy", "problem", "cupy-cuda12x 14.2.0, but torch was built for CUDA 13.0",
             f"pip uninstall cupy-cuda12x, then {INSTALL_CUPY}", cupy=2,
             packages={"cupy-cuda12x": "14.2.0"}, **CUDA),
        case("CuPy", "problem", "cupy-cuda13x 14.2.0, cupy-cuda12x 14.2.0: they overwrite each",
             f"pip uninstall cupy-cuda13x cupy-cuda12x, then {INSTALL_CUPY}", packages=TWO_CUPYS,
             **CUDA),
        case("CuPy", "problem", "cupy-cuda13x 13.6.0, but at least 14 is needed", INSTALL_CUPY,
             cupy=2, packages={"cupy-cuda13x": "13.6.0"}, **CUDA),
        case("CuPy", "problem", "cupy-cuda13x 14.2.0 is installed but cannot be imported",
             REINSTALL_CUPY, packages={"cupy-cuda13x": "14.2.0"}, **CUDA),
    ],
)  # fmt: skip
def test_what_is_found_and_what_to_do(
    name: str, status: str, detail: str, remedy: str, given: dict[str, Any]
) -> None:
    checks = command.examine(machine(**given))
    found = next(check for check in checks if check.name == name)
    assert found.status == status
    assert found.detail.startswith(detail) and found.remedy.startswith(remedy)
    assert bool(found.remedy) == bool(remedy)
    assert found.essential == (name in ("torch", "Python"))
    broken = status == "problem" and found.essential
    assert command.exit_status(checks) == broken


def test_each_device_says_what_launches_its_kernels() -> None:
    def kernels(**given: Any) -> list[tuple[str, str, str]]:
        checks = command.examine(machine(**given))
        return [
            (each.name, each.status, each.detail)
            for each in checks
            if each.group == "CUDA kernels" and each.name != "CuPy"
        ]

    torchs = "torch's own operations, which read memory more often"
    assert kernels() == []
    assert kernels(**CUDA) == [(f"cuda:{i}", "missing", torchs) for i in range(2)]
    assert kernels(cupy=1, packages={"cupy-cuda13x": "14.2.0"}, **CUDA) == [
        ("cuda:0", "ok", "the kernels, launched with CuPy"),
        ("cuda:1", "problem", f"{torchs}, although CuPy is there"),
    ]


def test_a_cache_tells_what_was_compiled(tmp_path: pathlib.Path) -> None:
    def cache() -> str:
        checks = command.examine(machine(cache=tmp_path))
        return next(check.detail for check in checks if check.name == "cache")

    assert cache() == f"will be compiled in {tmp_path}"
    (tmp_path / "virtual-1").mkdir()
    (tmp_path / "virtual-1" / "backend.so").touch()
    assert cache() == f"1 compiled in {tmp_path}"


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
    command.show(
        [
            Check("Basics", "torch", "ok", "2.13.0"),
            Check("Basics", "peers", "missing", "a matrix\n0 1", "pip install 'x[y]'"),
            *(Check("Devices", "driver", "problem", "no", "do", essential=e) for e in problems),
        ]
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == [
        "Basics",
        "  ok       torch              2.13.0",
        "  missing  peers              a matrix",
        "                              0 1",
        "                              do: pip install 'x[y]'",
    ]
    assert lines[-1] == last and lines[-1].isascii()


@pytest.mark.skipif(
    not Probe().free_threaded or os.environ.get("PYTHON_GIL") is not None,
    reason="needs a free-threaded interpreter that is left to itself",
)
def test_the_extension_that_turns_the_lock_on_is_named(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("taker", "sharer"):
        declared = "{Py_mod_gil, Py_MOD_GIL_NOT_USED}," if name == "sharer" else ""
        source = tmp_path / f"{name}.c"
        source.write_text(
            "#include <Python.h>\n"
            f"static PyModuleDef_Slot slots[] = {{{declared} {{0, NULL}}}};\n"
            f'static PyModuleDef module = {{PyModuleDef_HEAD_INIT, "{name}", .m_slots = slots}};\n'
            f"PyMODINIT_FUNC PyInit_{name}(void) {{ return PyModuleDef_Init(&module); }}\n"
        )
        include = f"-I{sysconfig.get_path('include')}"
        library = source.with_suffix(".so")
        subprocess.run(["cc", "-shared", "-fPIC", include, source, "-o", library], check=True)
    (tmp_path / "user.py").write_text("import taker")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = Probe().lock_takers(("absent", "sharer", "user", "json", "taker"))
    assert found == {"user": "taker", "taker": "taker"}


def test_this_machine_passes_and_json_holds_every_field(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["doctor"]) == 0
    assert "ok       torch" in capsys.readouterr().out
    assert cli.main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert {"Python", "torch", "cores", "GIL", "C++ compiler"} <= {
        each["name"] for each in findings
    }
    fields = {"group", "name", "status", "detail", "remedy", "essential"}
    assert all(set(each) == fields for each in findings)
