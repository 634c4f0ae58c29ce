"""The record that every check returns, and the probe through which checks look at the machine."""

from __future__ import annotations

import importlib
import os
import pathlib
import platform
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
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


def _output(*command: str) -> str | None:
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return finished.stdout.strip()


def _python_header() -> str | None:
    path = pathlib.Path(sysconfig.get_path("include"), "Python.h")
    return str(path) if path.exists() else None


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
