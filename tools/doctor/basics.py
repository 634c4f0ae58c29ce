"""Checks of the needs of the package, and of its optional packages."""

from __future__ import annotations

from collections.abc import Iterator

from dataparallel.errors import install_command
from dataparallel.tools.doctor.check import Check, Probe

_MINIMUM_PYTHON = (3, 10)
MINIMUM_TORCH = (2, 11)
NEWEST_TESTED_TORCH = (2, 15)

#: Distribution, what it is needed for, the extra that has it.
_EXTRAS = (
    ("rich", "tables of `dataparallel bench`, the view of `dataparallel monitor`", "tools"),
    ("psutil", "memory of `dataparallel bench`, readings of `dataparallel monitor`", "tools"),
    ("textual", "`dataparallel monitor top`", "monitor"),
    ("prometheus-client", "the metrics of `dataparallel monitor serve`", "monitor"),
    ("matplotlib", "plots of `dataparallel monitor` and of the examples", "monitor"),
    ("safetensors", "the files of checkpoints", "checkpoint"),
    ("filelock", "the lock of who writes a checkpoint", "checkpoint"),
    ("scikit-learn", "the digits of the examples", "examples"),
)


def _numbers(version: str) -> tuple[int, ...]:
    release = version.split("+")[0].split(".")
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in release[:2])


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def python(probe: Probe) -> Check:
    """Tell if this Python is new enough."""
    if _numbers(probe.python) >= _MINIMUM_PYTHON:
        return Check("Basics", "Python", "ok", probe.python, essential=True)
    needed = _dotted(_MINIMUM_PYTHON)
    return Check(
        "Basics",
        "Python",
        "problem",
        f"{probe.python}, but at least {needed} is needed",
        f"make an environment with a newer one: python{needed} -m venv .venv",
        essential=True,
    )


def torch(probe: Probe) -> Check:
    """Tell if torch can be imported, which version it is and what it was built for."""
    found = probe.module("torch")
    if found is None:
        version = probe.version("torch")
        detail = f"{version} is installed but cannot be imported" if version else "not installed"
        remedy = "pip install --force-reinstall torch" if version else "pip install torch"
        return Check("Basics", "torch", "problem", detail, remedy, essential=True)
    version = str(found.__version__)
    if _numbers(version) < MINIMUM_TORCH:
        needed = _dotted(MINIMUM_TORCH)
        detail = f"{version}, but at least {needed} is needed"
        remedy = f'pip install --upgrade "torch>={needed}"'
        return Check("Basics", "torch", "problem", detail, remedy, essential=True)
    detail = f"{version}, {_build(found)}"
    if _numbers(version) > NEWEST_TESTED_TORCH:
        detail = f"{detail}; the newest that was tested is {_dotted(NEWEST_TESTED_TORCH)}"
    return Check("Basics", "torch", "ok", detail, essential=True)


def _build(torch_module: object) -> str:
    version = getattr(torch_module, "version", None)
    for name, shown in (("cuda", "CUDA"), ("hip", "ROCm"), ("xpu", "XPU")):
        number = getattr(version, name, None)
        if number:
            return f"built for {shown} {number}"
    return "built for the CPU"


def threads(probe: Probe) -> Check:
    """Cores and intra-op threads, which CPU replicas divide among themselves."""
    found = probe.module("torch")
    cores = probe.cores()
    if found is None:
        return Check("Basics", "cores", "ok", f"{cores} usable")
    used = int(found.get_num_threads())
    detail = f"{cores} usable, {used} intra-op threads, divided between CPU replicas"
    if used > cores:
        return Check(
            "Basics",
            "cores",
            "problem",
            f"{detail}: more threads than cores slow each other down",
            f"export OMP_NUM_THREADS={cores}",
        )
    return Check("Basics", "cores", "ok", detail)


def extras(probe: Probe) -> Iterator[Check]:
    """Yield the optional packages, each with its use."""
    for distribution, purpose, extra in _EXTRAS:
        version = probe.version(distribution)
        if version is None:
            remedy = install_command(extra)
            yield Check("Extras", distribution, "missing", f"for {purpose}", remedy)
        else:
            yield Check("Extras", distribution, "ok", f"{version}, for {purpose}")
