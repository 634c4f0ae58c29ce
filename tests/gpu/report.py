"""``make gpu``: runs what only a GPU can show, and writes one page about it.

Python's own library is enough here. Each part runs in a process of its own, with a limit, and the
page has the end of what it printed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

ROOT = pathlib.Path(__file__).parents[2]
_OF_GPUS = ROOT / "docs" / "measurements" / "gpu.md"
_OF_OTHERS = ROOT / "out" / "gpu.md"

#: Seconds of a whole run, with some left for the first look and the last words.
_SECONDS = 460.0
#: A part for which less is left is not begun.
_LEAST = 5.0
#: The number of lines of an output that the page shows.
_LINES = 60

#: The names that ``--only`` may ask for.
NAMES = ("doctor", "tests", "kernels", "train", "sanitizer")
#: Tools of compute-sanitizer. Vain requests of libraries to the driver are no errors of a kernel.
_TOOLS = ("memcheck --report-api-errors no", "racecheck", "synccheck", "initcheck")

_EXAMPLES = """\
examples:
  make gpu
  make gpu DEVICES=virtual:0,virtual:1
  make gpu ARGS="--only tests --only train --output out/some.md"
  python3 -m tests.gpu.report --devices cuda:0 --seconds 200
"""


# --- parts -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One thing that is run, for ``limit`` seconds at most.

    It needs modules and programs. It has passed if it ended with status 0 and printed ``expected``,
    a regular expression.
    """

    name: str
    title: str
    command: tuple[str, ...]
    limit: float
    needs: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    expected: str = ""


def is_gpu(device: str) -> bool:
    """True if a device is one of NVIDIA's."""
    return device.split(":")[0] == "cuda"


def device_sets(devices: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the devices to train on: one device, two replicas on it, it and the CPU, and all."""
    first = devices[0]
    return list(dict.fromkeys([(first,), (first, first), (first, "cpu"), tuple(devices)]))


def plan(devices: Sequence[str]) -> list[Part]:
    """Return all parts, the most telling ones first."""
    sanitizers = [_sanitizer(tool, devices[0]) for tool in _TOOLS if is_gpu(devices[0])]
    doctor = Part("doctor", "The machine", _python("dataparallel", "doctor"), 90)
    trained = [_train(names) for names in device_sets(devices)]
    trained.insert(1, _train((devices[0],), "captured"))
    return [doctor, _tests(devices), *sanitizers[:2], _kernels(devices), *trained, *sanitizers[2:]]


def _python(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", *arguments)


def _virtual_devices(names: Sequence[str]) -> dict[str, str]:
    indices = [int(one.split(":")[1]) for one in names if one.startswith("virtual:")]
    return {"DATAPARALLEL_VIRTUAL_DEVICES": str(max(indices) + 1)} if indices else {}


def _tests(devices: Sequence[str]) -> Part:
    """Run the tests for GPUs; those that have another form run elsewhere, in that."""
    on_gpu = is_gpu(devices[0])
    chosen = "gpu or multi_gpu" if on_gpu else "not gpu and not multi_gpu"
    options = ["-v", "--tb=short", "--durations=10", "-p", "no:cacheprovider", "-m", chosen]
    # Plugins, of which there may be none or many, change nothing here; so settings of theirs are
    # unknown. pytest itself says where a test hangs.
    options += ["-o", "addopts=--strict-markers -ra", "-o", "faulthandler_timeout=100"]
    options += ["-W", "ignore:Unknown config option:pytest.PytestConfigWarning"]
    environment = {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "DATAPARALLEL_TESTS_WITHOUT_VIRTUAL_DEVICES": str(int(on_gpu)),
    }
    command = _python("pytest", *options, *(marked_tests() if on_gpu else ["tests/gpu"]))
    return Part("tests", f"Tests: {chosen}", command, 200, ("pytest",), environment, r"\d passed")


def marked_tests() -> list[str]:
    """Return the folder, and other files, with tests that need a GPU; relative to the checkout."""
    marked = re.compile(r"mark\.(multi_)?gpu\b")
    found = [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if marked.search(path.read_text(encoding="utf-8"))
    ]
    return ["tests/gpu", *(path for path in found if not path.startswith("tests/gpu/"))]


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
    return Part("train", title, command, 75, ("rich", "psutil"), _virtual_devices(names))


def _kernels(devices: Sequence[str]) -> Part:
    options = ["--device", devices[0]]
    if is_gpu(devices[0]):
        options += ["--sizes", "1MiB,16MiB,64MiB", "--rounds", "5"]
    else:
        options += ["--kernels", "reduce_add,flatten,unflatten", "--sizes", "64KiB"]
        options += ["--dtypes", "float32", "--flush", "1MiB", "--rounds", "3", "--steps", "3"]
    command = _python("benchmarks.kernels", *options)
    title = f"benchmarks.kernels on {devices[0]}"
    return Part("kernels", title, command, 90, ("rich",), _virtual_devices(devices))


def _sanitizer(tool: str, device: str) -> Part:
    options = shlex.split(f"{tool} --print-limit 3 --error-exitcode 86")
    command = ("compute-sanitizer", "--tool", *options, *_python("tests.gpu.kernel_cases", device))
    title = f"compute-sanitizer, {tool.split()[0]}"
    # Each tensor has memory of its own, behind whose end nothing else lies.
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    needs = ("compute-sanitizer", "cupy")
    return Part("sanitizer", title, command, 60, needs, environment, "SUMMARY: 0 ")


# --- one part ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The outcome of a part: its verdict is "passed", "failed" or "not run"."""

    verdict: str
    why: str
    seconds: float = 0.0
    output: str = ""


def run_part(part: Part, tree: pathlib.Path, left: float) -> Outcome:
    """Run a part where the package was laid out, with ``left`` seconds for all that follows."""
    environment = {**_environment(tree), **part.environment}
    absent = [name for name in part.needs if not _is_there(name, environment["PATH"])]
    if absent:
        return Outcome("not run", f"needs {', '.join(absent)}")
    if left < _LEAST:
        return Outcome("not run", "the time of the whole run was over")
    begin = time.monotonic()
    limit = min(part.limit, left)
    status, output = run(part.command, tree, environment, limit)
    seconds = time.monotonic() - begin
    if status is None:
        why = f"ended at its limit of {limit:.0f} s"
    elif status < 0:
        why = f"ended by signal {-status}"
    elif status > 0:
        why = f"exit status {status}"
    elif not re.search(part.expected, output):
        why = f"did not print {part.expected!r}"
    else:
        return Outcome("passed", "", seconds, output)
    return Outcome("failed", why, seconds, output)


def _environment(tree: pathlib.Path) -> dict[str, str]:
    given = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    # Ahead of what is installed, also for processes that run elsewhere.
    paths = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    programs = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"])
    return given | {"PYTHONPATH": paths, "PATH": programs, "PYTHONUNBUFFERED": "1", "COLUMNS": "98"}


def _is_there(name: str, path: str) -> bool:
    return importlib.util.find_spec(name) is not None or shutil.which(name, path=path) is not None


def run(
    command: Sequence[str], folder: pathlib.Path, environment: Mapping[str, str], limit: float
) -> tuple[int | None, str]:
    """Run a command until it ends, or for ``limit`` seconds: its status, or None, and its output.

    It leads a session of its own, and all of that ends with it.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(limit)
        finally:
            # All of them may have ended.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return status, output.read().decode(errors="replace")


def lay_out(folder: pathlib.Path) -> None:
    """Copy the package and its tests into an empty folder, where they can be imported.

    In the checkout ``kernels/`` and ``tools/`` lie beside the package whose parts they are; to
    install it takes setuptools of the right version, and mostly a network.
    """
    for source in ("dataparallel", "kernels", "tools", "benchmarks", "tests"):
        place = f"dataparallel/{source}" if source in ("kernels", "tools") else source
        shutil.copytree(ROOT / source, folder / place, ignore=shutil.ignore_patterns("__pycache__"))
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (folder / "pyproject.toml").write_text(settings, encoding="utf-8")
    # The command line and the doctor ask Python for the version.
    (version,) = re.findall(r'^version = "(.+)"$', settings, re.MULTILINE)
    described = folder / f"dataparallel-{version}.dist-info"
    described.mkdir()
    text = f"Metadata-Version: 2.1\nName: dataparallel\nVersion: {version}\n"
    (described / "METADATA").write_text(text, encoding="utf-8")


# --- the whole run -----------------------------------------------------------------------------


def run_all(
    parts: Sequence[Part],
    tree: pathlib.Path,
    seconds: float,
    write: Callable[[dict[str, Outcome]], None],
) -> int:
    """Run the parts, whatever becomes of each; ``write`` gets what there is after each of them.

    Returns:
        0 if no part failed, 1 if one did, 130 after Ctrl-C.
    """
    begin = time.monotonic()
    stopped = Outcome("not run", "the run was stopped before")
    done = {part.title: stopped for part in parts}
    try:
        for number, part in enumerate(parts, 1):
            print(f"[{number}/{len(parts)}] {part.title}", flush=True)
            done[part.title] = one = run_part(part, tree, begin + seconds - time.monotonic())
            print(f"      {one.verdict} after {one.seconds:.0f} s {one.why}", flush=True)
            write(done)
    except KeyboardInterrupt:
        write(done)
        return 130
    return int(any(one.verdict == "failed" for one in done.values()))


def page(devices: Sequence[str], done: Mapping[str, Outcome]) -> str:
    """Return the page about a run, in Markdown."""
    command = shlex.join(["python3", "-m", "tests.gpu.report", *sys.argv[1:]])
    lines = [
        f"# One run on {', '.join(devices)}\n",
        f"Written by `{command}`, {datetime.datetime.now():%Y-%m-%d %H:%M}. Every figure was "
        "measured in that run; what is not here was not.\n",
        "| part | | seconds | |\n|---|---|---|---|",
    ]
    for title, one in done.items():
        lines.append(f"| {title} | {one.verdict} | {one.seconds:.0f} | {one.why} |")
    for title, one in done.items():
        if one.output:
            # A line that the terminal has overwritten shows its last state.
            shown = [line.split("\r")[-1] for line in one.output.rstrip().splitlines()]
            lines.append(f"\n## {title}: {one.verdict}\n")
            lines += [f"    {line}".rstrip() for line in shown[-_LINES:]]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run all parts and write the page; 2 for wrong usage, else see :func:`run_all`."""
    arguments = _parse(argv)
    with tempfile.TemporaryDirectory(prefix="dataparallel-gpu-") as name:
        tree = pathlib.Path(name)
        lay_out(tree)
        counts = (sys.executable, "-c", "import torch; print(torch.cuda.device_count())")
        status, told = run(counts, tree, _environment(tree), 90)
        gpus = [f"cuda:{i}" for i in range(int(told.split()[-1]))] if status == 0 else []
        devices = arguments.devices or gpus
        if not devices or any(is_gpu(one) and one not in gpus for one in devices):
            last = f"torch sees {len(gpus)}" if status == 0 else told.strip()[-200:]
            remedy = "make gpu DEVICES=virtual:0,virtual:1 tries the same without one"
            print(f"gpu: error: needs an NVIDIA GPU ({last}); {remedy}", file=sys.stderr)
            return 2
        output = arguments.output or (_OF_GPUS if all(map(is_gpu, devices)) else _OF_OTHERS)

        def write(done: dict[str, Outcome]) -> None:
            # The place of the parts says nothing to a reader.
            text = page(devices, done).replace(f"{tree}{os.sep}", "")
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(text, encoding="utf-8")

        parts = [part for part in plan(devices) if part.name in (arguments.only or NAMES)]
        status = run_all(parts, tree, arguments.seconds, write)
        print(f"see {output}")
        return status


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python3 -m tests.gpu.report",
        description="Run on a GPU what only a GPU can show, and write one page about it. Nothing "
        "is installed, and no network is needed.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--devices", type=_devices, metavar="LIST",
        help="for example cuda:0, or virtual:0,virtual:1; default: all GPUs")  # fmt: skip
    add("--only", action="append", choices=NAMES, metavar="PART",
        help=f"one of {', '.join(NAMES)}; may be given several times; default: all")  # fmt: skip
    add("--seconds", type=float, default=_SECONDS, metavar="S",
        help=f"for the whole run; default: {_SECONDS:.0f}")  # fmt: skip
    add("--output", type=pathlib.Path, metavar="FILE",
        help=f"the page; default: {_OF_GPUS.relative_to(ROOT)}, and without GPUs "
        f"{_OF_OTHERS.relative_to(ROOT)}")  # fmt: skip
    return parser.parse_args(argv)


def _devices(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if not re.fullmatch(r"cpu|(cuda|virtual):\d+", name):
            raise argparse.ArgumentTypeError(
                f"{name!r} is none of cuda:0, virtual:0 and cpu, for example"
            )
    return names


if __name__ == "__main__":
    # As after Ctrl-C: the page tells what was found, and no process stays behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    raise SystemExit(main())
