"""What a machine has: run as a program, it prints that as JSON."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass, field
from typing import Any

#: Module: the package that brings it.
PACKAGES = {
    "torch": "torch",
    "cupy": "CuPy",
    "numpy": "numpy",
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
    "rich": "rich",
    "psutil": "psutil",
    "pynvml": "nvidia-ml-py",
    "triton": "triton",
}

_SANITIZER = "/usr/local/cuda/bin/compute-sanitizer"
_QUERY = "name,driver_version,memory.total,power.limit,pci.bus_id"


@dataclass(frozen=True)
class Machine:
    """What there is: versions of packages, places of programs, a line of nvidia-smi per device.

    ``gpus`` is what torch calls NVIDIA's devices, and ``trouble`` why torch tells nothing.
    """

    python: str = ""
    system: str = ""
    cpus: int = 0
    packages: dict[str, str] = field(default_factory=dict)
    programs: dict[str, str] = field(default_factory=dict)
    torch_cuda: str = ""
    gpus: list[str] = field(default_factory=list)
    driver: list[str] = field(default_factory=list)
    trouble: str = ""

    def lacks(self, *modules: str) -> str:
        """Which of some modules are not installed, as a sentence; empty if all are."""
        absent = [PACKAGES[name] for name in modules if name not in self.packages]
        return f"not installed: {', '.join(absent)}" if absent else ""


def look() -> Machine:
    """Read this machine, and what torch tells of it."""
    cuda, gpus, trouble = "", [], ""
    try:
        import torch

        cuda = torch.version.cuda or ""
        if cuda:
            gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    except (ImportError, OSError, RuntimeError) as error:
        trouble = f"{type(error).__name__}: {error}"
    return Machine(
        platform.python_version(),
        platform.platform(),
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        {name: _version(name) for name in PACKAGES if importlib.util.find_spec(name)},
        _programs(),
        cuda,
        gpus,
        _driver(),
        trouble,
    )


def read(text: str) -> Machine:
    """What the program has printed."""
    content: dict[str, Any] = json.loads(text.splitlines()[-1])
    return Machine(**content)


def _version(module: str) -> str:
    for name in importlib.metadata.packages_distributions().get(module, ()):
        return importlib.metadata.version(name)
    return "of unknown version"


def _programs() -> dict[str, str]:
    found = {
        "nvidia-smi": shutil.which("nvidia-smi"),
        "compute-sanitizer": shutil.which("compute-sanitizer") or shutil.which(_SANITIZER),
        "g++": shutil.which("g++"),
        "nvcc": shutil.which("nvcc"),
    }
    return {name: path for name, path in found.items() if path}


def _driver() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [str(error)]
    return [line.strip() for line in (done.stdout or done.stderr).splitlines() if line.strip()]


if __name__ == "__main__":
    print(json.dumps(look().__dict__))
