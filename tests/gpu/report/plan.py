"""The table of all parts: name, GPUs that it needs, seconds that it may take, command."""

from __future__ import annotations

import pathlib
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

ROOT = pathlib.Path(__file__).parents[3]

#: The names that ``--only`` takes.
NAMES = (
    "doctor", "links", "hybrid", "faults", "training", "tests", "sanitizer", "speed", "step",
    "kernels", "train", "streams", "profile",
)  # fmt: skip
#: Tools of compute-sanitizer. Vain requests of libraries to the driver are no errors of a kernel.
_TOOLS = ("memcheck --report-api-errors no", "racecheck", "synccheck", "initcheck")
#: Processes x devices of each: in a quick run, and in a full one besides.
_SHAPES = ((2, 1), (1, 2), (2, 2), (2, 4))
_MORE_SHAPES = ((4, 1), (1, 4), (8, 1), (1, 8), (4, 2))
#: Torch has no such switch for its own copies between the devices of a process.
WITHOUT_PEERS = "NCCL_P2P_DISABLE=1 (torch's copies in a process keep peer access)"
#: Parameters in millions, type, and seconds.
_SIZES = ((25, "float32", 120), (25, "bfloat16", 120), (300, "float32", 180),
          (300, "bfloat16", 180), (1000, "float32", 240), (1000, "bfloat16", 240))  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One thing that is run, for ``limit`` seconds at most.

    It needs so many GPUs, modules and programs. It has passed if it ended with status 0 and printed
    ``expected``, a regular expression. The page shows the lines that match ``shown``.
    """

    name: str
    title: str
    command: tuple[str, ...]
    limit: float
    gpus: int = 1
    needs: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    expected: str = ""
    shown: str = ""


def is_gpu(device: str) -> bool:
    """True if a device is one of NVIDIA's."""
    return device.split(":")[0] == "cuda"


def plan(devices: Sequence[str], full: bool = False) -> list[Part]:
    """Return all parts of a run, those first that tell most."""
    sanitizers = [_sanitizer(tool, devices[0]) for tool in _TOOLS if is_gpu(devices[0])]
    first = [_python_part("doctor", "The machine", ("dataparallel", "doctor"), 60)]
    first += [_subject(devices, "links", "links between devices", 60, 2)]
    first += list(_hybrid(devices, _SHAPES))
    for how in ("raised", "killed"):
        title = f"a rank that {'raises in backward' if how == 'raised' else 'is killed'}"
        first.append(_subject(devices, "faults", title, 60, 2, "--how", how))
    first.append(_subject(devices, "training", "one process: order, odd batches, bits", 90))
    first.append(_tests(devices, 300 if full else 150))
    if not full:
        # A quick run shows the speed of the smallest model alone, on one and on all devices.
        rest = [_speed(devices, _SIZES[0], "--counts", f"1,{len(devices)}")]
        rest += [_subject(devices, "step", "exposed communication and memory", 60)]
        rest.append(_profile(devices))
        return [*first, *sanitizers[:2], *rest, _kernels(devices), *_trains(devices)]
    rest = [_subject(devices, "step", "exposed communication and memory", 120)]
    rest += [_speed(devices, size) for size in _SIZES]
    rest += [*_hybrid(devices, _MORE_SHAPES), *_hybrid(devices, ((2, 1), (2, 2)), peers=False)]
    rest += [_profile(devices), _kernels(devices), *_trains(devices), _streams(devices)]
    return [*first, *sanitizers, *rest]


def _python(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", *arguments)


def _python_part(name: str, title: str, arguments: Sequence[str], limit: float) -> Part:
    return Part(name, title, _python(*arguments), limit)


def _subject(
    devices: Sequence[str], name: str, title: str, limit: float, gpus: int = 1, *more: str
) -> Part:
    """Return a part that is a file of this folder; it gets all devices."""
    command = _python("tests.gpu.report.subject", name, "--devices", ",".join(devices), *more)
    needs = ("pytest",) if name == "training" else ()
    return Part(name, title, command, limit, gpus, needs, _virtual_devices(devices))


def _hybrid(
    devices: Sequence[str], shapes: Sequence[tuple[int, int]], peers: bool = True
) -> Iterator[Part]:
    for processes, each in shapes:
        shape = f"{processes}x{each}"
        part = _subject(
            devices, "hybrid", f"hybrid {shape}", 60, processes * each, "--shape", shape
        )
        if not peers:
            environment = {**part.environment, "NCCL_P2P_DISABLE": "1"}
            title = f"{part.title}, {WITHOUT_PEERS}"
            part = Part("hybrid", title, part.command, 60, part.gpus, (), environment)
        yield part


def _speed(devices: Sequence[str], size: tuple[int, str, int], *more: str) -> Part:
    millions, dtype, limit = size
    options = ("--millions", str(millions), "--dtype", dtype, *more)
    return _subject(devices, "speed", f"speed, {millions} M, {dtype}", limit, 1, *options)


def _virtual_devices(names: Sequence[str]) -> dict[str, str]:
    indices = [int(one.split(":")[1]) for one in names if one.startswith("virtual:")]
    return {"DATAPARALLEL_VIRTUAL_DEVICES": str(max(indices) + 1)} if indices else {}


def _tests(devices: Sequence[str], limit: float) -> Part:
    """Return the tests for GPUs; those of them that have another form run elsewhere, in that."""
    on_gpu = is_gpu(devices[0])
    marks = "gpu or multi_gpu" if on_gpu else "not gpu and not multi_gpu"
    options = ["-v", "--tb=short", "--durations=10", "-p", "no:cacheprovider", "-m", marks]
    # Plugins, of which there may be none or many, change nothing here; so settings of theirs are
    # unknown. pytest itself says where a test hangs.
    options += ["-o", "addopts=--strict-markers -ra", "-o", "faulthandler_timeout=100"]
    options += ["-W", "ignore:Unknown config option:pytest.PytestConfigWarning"]
    environment = {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "DATAPARALLEL_TESTS_WITHOUT_VIRTUAL_DEVICES": str(int(on_gpu)),
    }
    files = marked_tests() if on_gpu else ["tests/gpu"]
    command = _python("pytest", *options, *files)
    return Part(
        "tests", f"Tests: {marks}", command, limit, 1, ("pytest",), environment, r"\d passed",
        r"^=+ .*\d passed",
    )  # fmt: skip


def _streams(devices: Sequence[str]) -> Part:
    """Return training under a detector of unordered uses of memory: torch's, or ours."""
    title = "training, uses of memory that nothing orders"
    part = _subject(devices, "training", title, 180, 1, "--eager")
    # Torch's initializes CUDA as soon as torch is used, after which no process may be forked.
    detector = "TORCH_CUDA_SANITIZER" if is_gpu(devices[0]) else "DATAPARALLEL_VIRTUAL_RACES"
    environment = {**part.environment, detector: "1"}
    return Part("streams", title, part.command, part.limit, 1, part.needs, environment)


def marked_tests() -> list[str]:
    """Return the folder, and the other files, with tests that need a GPU, from the checkout on."""
    marked = re.compile(r"mark\.(multi_)?gpu\b")
    found = [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if marked.search(path.read_text(encoding="utf-8"))
    ]
    return ["tests/gpu", *(path for path in found if not path.startswith("tests/gpu/"))]


def device_sets(devices: Sequence[str]) -> list[tuple[str, ...]]:
    """Return one device, two replicas on it, it and the CPU, and all devices."""
    first = devices[0]
    return list(dict.fromkeys([(first,), (first, first), (first, "cpu"), tuple(devices)]))


def _trains(devices: Sequence[str]) -> list[Part]:
    trained = [_train(names) for names in device_sets(devices)]
    return [trained[0], _train((devices[0],), "captured"), *trained[1:]]


def _train(names: tuple[str, ...], wrapper: str = "ddp") -> Part:
    # torch's wrapper has a process for each device, of its own and all of one type.
    with_ddp = len(set(names)) == len(names) and all(map(is_gpu, names))
    options = ["--devices", ",".join(names), "--peers", "bare,ddp" if with_ddp else "bare"]
    options += ["--wrapper", wrapper]
    if is_gpu(names[0]):
        # If devices round differently, the deep model goes another way after two steps.
        cases = "deep,transformer" if all(map(is_gpu, names)) else "transformer"
        options += ["--cases", cases, "--rounds", "3"]
    else:
        options += ["--cases", "deep", "--rounds", "2", "--steps", "3"]
    command = _python("dataparallel", "bench", "train", *options)
    title = f"bench train on {', '.join(names)}{', captured' * (wrapper == 'captured')}"
    needs, environment = ("rich", "psutil"), _virtual_devices(names)
    return Part("train", title, command, 75, 1, needs, environment, shown="ours / ")


def _profile(devices: Sequence[str]) -> Part:
    """Return the measurement that a simulation starts from; its log is what ``--profile`` takes."""
    size = "100M" if is_gpu(devices[0]) else "100K"
    options = ["--measure", devices[0], "--parameters", size]
    command = _python("dataparallel", "bench", "simulate", *options)
    title = f"the bare module on {devices[0]}, for bench simulate --profile"
    needs, environment = ("rich",), _virtual_devices(devices)
    return Part("profile", title, command, 60, 1, needs, environment, expected='"host_forward"')


def _kernels(devices: Sequence[str]) -> Part:
    options = ["--device", devices[0]]
    if is_gpu(devices[0]):
        options += ["--kib", "1024,16384,65536", "--rounds", "5"]
    else:
        options += ["--kernels", "flatten,unflatten", "--kib", "64"]
        options += ["--dtypes", "float32", "--flush-mib", "1", "--rounds", "3", "--steps", "3"]
    command, title = _python("benchmarks.kernels", *options), f"benchmarks.kernels on {devices[0]}"
    environment = _virtual_devices(devices)
    return Part("kernels", title, command, 90, 1, ("rich",), environment, shown="ours / ")


def _sanitizer(tool: str, device: str) -> Part:
    options = shlex.split(f"{tool} --print-limit 3 --error-exitcode 86")
    command = ("compute-sanitizer", "--tool", *options, *_python("tests.gpu.kernel_cases", device))
    title = f"compute-sanitizer, {tool.split()[0]}"
    # Each tensor has memory of its own, behind whose end nothing else lies.
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    needs = ("compute-sanitizer", "cupy")
    return Part("sanitizer", title, command, 60, 1, needs, environment, "SUMMARY: 0 ")
