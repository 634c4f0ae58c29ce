"""Where parts run, and a command with a limit: its last words, and nothing that stays behind."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).parents[3]

#: Where what lies in the checkout is to be found.
_PLACES = {
    "dataparallel": "dataparallel",
    "kernels": "dataparallel/kernels",
    "tools": "dataparallel/tools",
    "benchmarks": "benchmarks",
    "tests": "tests",
}

#: Seconds between two signs of life.
_TICK = 15.0

#: How much of an output is kept.
_KEPT = 200_000


@dataclass(frozen=True)
class Ended:
    """What became of a command.

    Its status is None where it ran past its limit; the output is the end of what it has printed.
    """

    status: int | None
    seconds: float
    output: str


def run(
    command: Sequence[str],
    *,
    folder: pathlib.Path,
    environment: Mapping[str, str],
    limit: float,
    tell: Callable[[float, str], None] = lambda seconds, line: None,
    tick: float = _TICK,
) -> Ended:
    """Run a command in a folder until it ends, or for ``limit`` seconds.

    It leads a session of its own, and all of that ends with it. Every ``tick`` seconds ``tell``
    hears how long it has run, and the last line that it has printed.
    """
    begin = time.monotonic()
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
        status: int | None = None
        try:
            while (left := begin + limit - time.monotonic()) > 0:
                try:
                    status = process.wait(min(tick, left))
                    break
                except subprocess.TimeoutExpired:
                    lines = _end_of(output.fileno()).splitlines()
                    tell(time.monotonic() - begin, lines[-1] if lines else "")
        finally:
            _end(process)
        return Ended(status, time.monotonic() - begin, _end_of(output.fileno()))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it has started."""
    # All of them may have ended.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _end_of(file: int) -> str:
    size = os.fstat(file).st_size
    return os.pread(file, _KEPT, max(0, size - _KEPT)).decode(errors="replace")


def lay_out(folder: pathlib.Path) -> None:
    """Copy the package and its tests into an empty folder, where they can be imported.

    In the checkout ``kernels/`` and ``tools/`` lie beside the package whose parts they are; to
    install it takes setuptools of the right version, and mostly a network.
    """
    left_out = shutil.ignore_patterns("__pycache__")
    for source, place in _PLACES.items():
        shutil.copytree(ROOT / source, folder / place, ignore=left_out)
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (folder / "pyproject.toml").write_text(settings, encoding="utf-8")
    # The command line and the doctor ask Python for the version.
    found = re.search(r'^version = "(.+)"$', settings, re.MULTILINE)
    assert found, "pyproject.toml names no version"
    described = folder / f"dataparallel-{found[1]}.dist-info"
    described.mkdir()
    text = f"Metadata-Version: 2.1\nName: dataparallel\nVersion: {found[1]}\n"
    (described / "METADATA").write_text(text, encoding="utf-8")


def marked_tests() -> list[str]:
    """The files, and the folder, with tests that need a GPU; relative to the checkout."""
    marked = re.compile(r"mark\.(multi_)?gpu\b")
    found = [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if marked.search(path.read_text(encoding="utf-8"))
    ]
    return ["tests/gpu", *(path for path in found if not path.startswith("tests/gpu/"))]
