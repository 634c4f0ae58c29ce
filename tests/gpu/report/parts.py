"""The parts of a run: what each one runs, for how long, and what must be there for it."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from tests.gpu.report import findings, outcomes
from tests.gpu.report.findings import Findings
from tests.gpu.report.machine import Machine
from tests.gpu.report.running import Ended, marked_tests

#: What may be asked for by ``--only``.
NAMES = ("build", "tests", "waits", "readings", "train", "kernels", "sanitizer")

#: Of `bench train` on a GPU; and where the host's cores compute, no more than shows that it works.
_MEASURED = ("--cases", "deep,transformer", "--rounds", "3")
_TRIED = ("--cases", "deep", "--rounds", "2", "--steps", "3")
#: Tools of compute-sanitizer. What libraries ask of the driver in vain is no error of a kernel.
_TOOLS: dict[str, tuple[str, ...]] = {
    "memcheck": ("--report-api-errors", "no"),
    "racecheck": (),
    "synccheck": (),
    "initcheck": (),
}
_NO_GPU = "needs an NVIDIA GPU that torch can use"


@dataclass(frozen=True)
class Part:
    """One thing that is run, for ``limit`` seconds at most.

    ``read`` tells what it has found; ``missing``, why it cannot run here.
    """

    name: str
    title: str
    command: tuple[str, ...]
    limit: float
    read: Callable[[Ended], Findings]
    environment: dict[str, str] = field(default_factory=dict)
    missing: str = ""


def is_gpu(device: str) -> bool:
    """Whether a device is one of NVIDIA's."""
    return device.split(":")[0] == "cuda"


def device_sets(devices: Sequence[str]) -> list[tuple[str, ...]]:
    """What is trained on: one device, two replicas on it, it and the CPU, and all devices."""
    first = devices[0]
    sets = [(first,), (first, first), (first, "cpu")]
    if len(devices) > 1:
        sets.append(tuple(devices))
    return list(dict.fromkeys(sets))


def plan(devices: Sequence[str], machine: Machine, results: pathlib.Path) -> list[Part]:
    """All parts, those first that tell most; they write into the folder ``results``."""
    virtual = _virtual_devices(devices)
    nothing = machine.trouble and f"torch cannot be used: {machine.trouble}"
    on_gpu = is_gpu(devices[0])
    first, second, *others = _sanitizer(devices[0], machine)
    parts = [
        _build(devices, virtual),
        *_tests(machine, on_gpu, results / "outcomes.jsonl"),
        _waits(devices, virtual, results / "waits.json"),
        _readings(machine, on_gpu, results / "readings.json"),
        first,
        second,
        _kernels(devices[0], virtual, machine, results / "kernels.json"),
        *_train(devices, virtual, machine, results),
        *others,
    ]
    return [replace(part, missing=nothing or part.missing) for part in parts]


def _virtual_devices(devices: Sequence[str]) -> dict[str, str]:
    indices = [int(one.split(":")[1]) for one in devices if one.startswith("virtual:")]
    return {"DATAPARALLEL_VIRTUAL_DEVICES": str(max(indices) + 1)} if indices else {}


def _python(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", *arguments)


def _build(devices: Sequence[str], virtual: dict[str, str]) -> Part:
    command = _python("tests.gpu.report.programs", "build", ",".join(devices))
    return Part("build", "What is compiled on first use", command, 150, findings.build, virtual)


def _tests(machine: Machine, on_gpu: bool, path: pathlib.Path) -> Iterator[Part]:
    options = ["-v", "-p", "no:cacheprovider", "-p", "tests.gpu.report.outcomes"]
    if "pytest_timeout" in machine.packages:
        options += ["-p", "pytest_timeout", "-o", "timeout=100"]
    else:
        # The setting of a plugin that is not there is no error.
        options += ["-o", "addopts=--strict-markers -ra"]
        options += ["-W", "ignore:Unknown config option:pytest.PytestConfigWarning"]
    marked = Part(
        "tests",
        "Tests marked gpu or multi_gpu",
        _python("pytest", *options, "-m", "gpu or multi_gpu", *marked_tests()),
        150,
        partial(findings.tests, path=path),
        # Other plugins, of which there may be many, change nothing here.
        {
            outcomes.VARIABLE: str(path),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "DATAPARALLEL_TESTS_WITHOUT_VIRTUAL_DEVICES": str(int(on_gpu)),
        },
        machine.lacks("pytest") or ("" if on_gpu else _NO_GPU),
    )
    yield marked
    if not on_gpu:
        yield replace(
            marked,
            title="The same tests on the CPU and on virtual devices, those that have such a form",
            command=_python("pytest", *options, "-m", "not gpu and not multi_gpu", "tests/gpu"),
            missing=machine.lacks("pytest"),
        )


def _waits(devices: Sequence[str], virtual: dict[str, str], path: pathlib.Path) -> Part:
    sets = [word for each in device_sets(devices) for word in ("--devices", ",".join(each))]
    missing = "" if devices[0] != "cpu" else "the CPU is no device for which the host waits"
    return Part(
        "waits",
        "Waits of the host",
        _python("tests.gpu.report.host_waits", *sets, "--output", str(path)),
        60,
        partial(findings.host_waits, path=path),
        virtual,
        missing,
    )


def _readings(machine: Machine, on_gpu: bool, path: pathlib.Path) -> Part:
    missing = "" if on_gpu else _NO_GPU
    if not missing and "nvidia-smi" not in machine.programs:
        missing = "nvidia-smi is not on the PATH"
    return Part(
        "readings",
        "The monitor beside nvidia-smi",
        _python("tests.gpu.report.programs", "readings", str(path)),
        40,
        partial(findings.readings, path=path),
        missing=missing or machine.lacks("pynvml"),
    )


def _train(
    devices: Sequence[str], virtual: dict[str, str], machine: Machine, results: pathlib.Path
) -> Iterator[Part]:
    for number, names in enumerate(device_sets(devices)):
        path = results / f"train-{number}.json"
        # torch's wrapper has a process for each device, of its own and all of one type.
        distinct = len(set(names)) == len(names)
        with_ddp = distinct and all(map(is_gpu, names))
        options = ["--devices", ",".join(names), "--json", str(path)]
        options += ["--peers", "bare,ddp" if with_ddp else "bare"]
        options += _MEASURED if is_gpu(names[0]) else _TRIED
        yield Part(
            "train",
            f"bench train on {', '.join(names)}",
            _python("dataparallel", "bench", "train", *options),
            75,
            partial(findings.train, path=path),
            virtual,
            machine.lacks("rich", "psutil"),
        )


def _kernels(device: str, virtual: dict[str, str], machine: Machine, path: pathlib.Path) -> Part:
    options = ["--device", device, "--json", str(path)]
    if is_gpu(device):
        options += ["--sizes", "1MiB,16MiB,64MiB", "--rounds", "5"]
    else:
        options += ["--kernels", "reduce_add,flatten,unflatten", "--sizes", "64KiB"]
        options += ["--dtypes", "float32", "--flush", "1MiB", "--rounds", "3", "--steps", "3"]
    return Part(
        "kernels",
        f"benchmarks.kernels on {device}",
        _python("benchmarks.kernels", *options),
        90,
        partial(findings.kernels, path=path),
        virtual,
        machine.lacks("rich"),
    )


def _sanitizer(device: str, machine: Machine) -> Iterator[Part]:
    program = machine.programs.get("compute-sanitizer")
    missing = "" if is_gpu(device) else _NO_GPU
    if not missing and program is None:
        missing = "compute-sanitizer is neither on the PATH nor under /usr/local/cuda"
    found = str(findings.SANITIZER_STATUS)
    launches = _python("tests.gpu.report.programs", "kernels", device)
    for tool, options in _TOOLS.items():
        yield Part(
            "sanitizer",
            f"compute-sanitizer, {tool}",
            (str(program), "--tool", tool, *options, "--error-exitcode", found, *launches),
            60,
            findings.sanitizer,
            # Each tensor has memory of its own, behind whose end nothing else lies.
            {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            missing or machine.lacks("cupy"),
        )
