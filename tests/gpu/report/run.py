"""One part after another, each in a process of its own with a limit and a log file."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.gpu.report.plan import ROOT, Part

#: A part for which fewer seconds are left is not begun.
LEAST = 5.0
#: The exit status of a part that cannot run here; its last line says why.
NOT_RUN = 77


@dataclass(frozen=True)
class Outcome:
    """The end of a part: its verdict is "passed", "failed" or "not run"."""

    verdict: str
    why: str
    seconds: float = 0.0
    output: str = ""
    #: Each has a title, a head and rows.
    tables: list[dict[str, Any]] = field(default_factory=list)


def run_part(
    part: Part, tree: pathlib.Path, left: float, log: pathlib.Path, gpus: int = 1
) -> Outcome:
    """Run a part where the package was laid out, with ``left`` seconds for all that follows."""
    figures = log.with_suffix(".json")
    environment = {**environment_of(tree), **part.environment, "GPU_REPORT_FIGURES": str(figures)}
    absent = [name for name in part.needs if not _is_there(name, environment["PATH"])]
    if gpus < part.gpus:
        return Outcome("not run", f"needs {part.gpus} GPUs")
    if absent:
        return Outcome("not run", f"needs {', '.join(absent)}")
    if left < LEAST:
        return Outcome("not run", "no time left")
    begin = time.monotonic()
    limit = min(part.limit, left)
    status = run(part.command, tree, environment, limit, log)
    seconds, output = time.monotonic() - begin, log.read_text(errors="replace")
    tables = []
    if figures.exists():
        tables = [json.loads(line) for line in figures.read_text().splitlines()]
        figures.unlink()
    verdict = "failed"
    if status is None:
        why = f"ended at its limit of {limit:.0f} s"
    elif status < 0:
        why = f"ended by signal {-status}"
    elif status == NOT_RUN:
        verdict, why = "not run", output.rstrip().splitlines()[-1].removeprefix("not run: ")
    elif status > 0:
        why = f"exit status {status}"
    elif not re.search(part.expected, output):
        why = f"did not print {part.expected!r}"
    else:
        verdict, why = "passed", ""
    return Outcome(verdict, why, seconds, output, tables)


def environment_of(tree: pathlib.Path) -> dict[str, str]:
    """Return the environment in which the package is imported from where it was laid out."""
    given = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    # Ahead of what is installed, also for processes that run elsewhere.
    paths = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    programs = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"])
    return given | {
        "PYTHONPATH": paths,
        "PATH": programs,
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "200",
    }


def _is_there(name: str, path: str) -> bool:
    return importlib.util.find_spec(name) is not None or shutil.which(name, path=path) is not None


def run(
    command: Sequence[str],
    folder: pathlib.Path,
    environment: Mapping[str, str],
    limit: float,
    log: pathlib.Path,
) -> int | None:
    """Run a command until it ends, or for ``limit`` seconds; return its status, or None.

    It leads a session of its own, and all of that ends with it.
    """
    with log.open("wb") as output:
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
    return status


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


def run_all(
    parts: Sequence[Part],
    tree: pathlib.Path,
    seconds: float,
    logs: pathlib.Path,
    write: Callable[[dict[str, Outcome]], None],
    gpus: int = 1,
) -> int:
    """Run the parts, whatever becomes of each; ``write`` gets what there is after each of them.

    Returns:
        0 if no part failed, 1 if one did, 130 after Ctrl-C.
    """
    begin = time.monotonic()
    logs.mkdir(parents=True, exist_ok=True)
    stopped = Outcome("not run", "the run was stopped before")
    done = {part.title: stopped for part in parts}
    try:
        for number, part in enumerate(parts, 1):
            left = begin + seconds - time.monotonic()
            clock = f"{seconds - left:.0f} s elapsed, {max(left, 0):.0f} s left"
            print(f"[{number}/{len(parts)}] {part.title} ({clock})", flush=True)
            log = logs / f"{number:02}-{part.name}.log"
            done[part.title] = one = run_part(part, tree, left, log, gpus)
            why = f": {one.why}" if one.why else ""
            print(f"      {one.verdict}{why} ({one.seconds:.0f} s)", flush=True)
            write(done)
    except KeyboardInterrupt:
        write(done)
        return 130
    return int(any(one.verdict == "failed" for one in done.values()))
