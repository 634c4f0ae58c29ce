"""The record that every check returns, and the probe through which checks look at the machine."""

from __future__ import annotations

import importlib
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Literal

from dataparallel.monitor.readings.cgroup import usable_cpus

Status = Literal["ok", "missing", "problem"]


@dataclass(frozen=True)
class Check:
    """The finding of one check.

    Attributes:
        group: Heading under which it is shown, for example ``"Devices"``.
        name: The thing that was looked at.
        status: ``"ok"``; ``"missing"``, something optional is not there; ``"problem"``, something
            is there but cannot work.
        detail: The finding, in a line or a few.
        remedy: The remedy, a command if there is one; empty when there is nothing to do.
        essential: True if the package cannot work at all while this is a problem.
    """

    group: str
    name: str
    status: Status
    detail: str
    remedy: str = ""
    essential: bool = False


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _module(name: str) -> Any:
    try:
        # The names stand in the checks of this folder.
        return importlib.import_module(name)
    except (ImportError, OSError):
        # OSError: a shared library that the package loads is not there.
        return None


def _output(*command: str, timeout: float = 10) -> str | None:
    try:
        finished = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return finished.stdout.strip()


def _python_header() -> str | None:
    path = pathlib.Path(sysconfig.get_path("include"), "Python.h")
    return str(path) if path.exists() else None


#: Imports modules until one turns the interpreter's lock on, and prints its name and the warning.
_IMPORTS = """
import importlib, sys, warnings
for name in sys.argv[1:]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            importlib.import_module(name)
        except (ImportError, OSError):
            continue
    if sys._is_gil_enabled():
        print(name)
        print(*(each.message for each in caught if "(GIL) has been enabled" in str(each.message)))
        break
"""


def _lock_takers(modules: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    while True:
        # The interpreter warns once, of the first, so another one is found without that.
        left = [module for module in modules if module not in found]
        command = (sys.executable, "-c", _IMPORTS, *left)
        name, _, warning = (_output(*command, timeout=60) or "").partition("\n")
        if not name:
            return found
        found[name] = warning.split("'")[1] if "'" in warning else "unknown extension"


def _lock() -> bool:
    is_on: Callable[[], bool] | None = getattr(sys, "_is_gil_enabled", None)
    return is_on is None or is_on()


def usable_cores() -> int:
    """Count the whole processors that this process may use, also in a container; at least 1."""
    return max(1, int(usable_cpus()))


@dataclass(frozen=True)
class Probe:
    """The functions by which checks look at the machine; tests put other functions in.

    Attributes:
        version: Installed version of a distribution, or None.
        distribution: An installed distribution, as ``importlib.metadata`` describes it.
        module: The module of that name, or None where it cannot be imported.
        which: Path of an executable, or None.
        output: Output of a command, or None if it fails or takes over ten seconds.
        environment: Value of an environment variable, or None.
        python: Version of the running Python.
        python_header: Path of Python.h, or None.
        cores: Number of cores that this process may use.
        free_threaded: True if the interpreter can run without its lock.
        lock: True if the interpreter's lock is on.
        lock_option: Value of the interpreter's option ``-X gil``, or None.
        lock_takers: Those of some modules that turn the lock on when they are imported, each with
            the extension of which the interpreter says so.
    """

    version: Callable[[str], str | None] = _version
    distribution: Callable[[str], Any] = metadata.distribution
    module: Callable[[str], Any] = _module
    which: Callable[[str], str | None] = shutil.which
    output: Callable[..., str | None] = _output
    environment: Callable[[str], str | None] = os.environ.get
    python: str = field(default_factory=platform.python_version)
    python_header: Callable[[], str | None] = _python_header
    cores: Callable[[], int] = usable_cores
    free_threaded: bool = "t" in getattr(sys, "abiflags", "")
    lock: Callable[[], bool] = _lock
    lock_option: object = sys._xoptions.get("gil")
    lock_takers: Callable[[Sequence[str]], dict[str, str]] = _lock_takers
