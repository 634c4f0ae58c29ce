"""Checks of the CUDA kernels: of CuPy for torch, and of the code that computes on each device."""

from __future__ import annotations

from collections.abc import Iterator

from dataparallel.errors import install_command
from dataparallel.tools.doctor.check import Check, Probe

_GROUP = "CUDA kernels"
_DISTRIBUTIONS = ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy")
# The first that takes streams of other libraries without a warning.
_MINIMUM = 14
_WITHOUT = "torch's own operations, which read memory more often"


def kernels(probe: Probe) -> Iterator[Check]:
    """CuPy, and for each CUDA device whether the kernels or torch's operations compute."""
    cupy = _cupy(probe)
    yield cupy
    torch = probe.module("torch")
    if torch is None or not torch.version.cuda:
        return
    for index in range(int(torch.cuda.device_count())):
        yield _device(probe, index, cupy)


def _cupy(probe: Probe) -> Check:
    torch = probe.module("torch")
    cuda = torch.version.cuda if torch is not None else None
    found = {name: version for name in _DISTRIBUTIONS if (version := probe.version(name))}
    shown = ", ".join(f"{name} {version}" for name, version in found.items())
    if not cuda:
        detail = "runs the CUDA kernels; of no use here, since torch is not one for CUDA"
        return Check(_GROUP, "CuPy", "missing", f"{shown}, {detail}" if shown else detail)
    major = cuda.split(".")[0]
    install = install_command(f"cuda{major}")
    if not found:
        use = f"runs the kernels; without it, {_WITHOUT}"
        return Check(_GROUP, "CuPy", "missing", use, install)
    wrong = [name for name in found if name not in (f"cupy-cuda{major}x", "cupy")]
    again = f"pip uninstall {' '.join(found)}, then {install}"
    if len(found) > 1:
        return _problem(f"{shown}: they overwrite each other's files", again)
    if wrong:
        return _problem(f"{shown}, but torch was built for CUDA {cuda}", again)
    (version,) = found.values()
    if int(version.split(".")[0]) < _MINIMUM:
        return _problem(f"{shown}, but at least {_MINIMUM} is needed", install)
    if probe.module("cupy") is None:
        return _problem(f"{shown} is installed but cannot be imported", again)
    return Check(_GROUP, "CuPy", "ok", f"{shown}, for torch's CUDA {cuda}")


def _problem(detail: str, remedy: str) -> Check:
    return Check(_GROUP, "CuPy", "problem", detail, remedy)


def _device(probe: Probe, index: int, cupy: Check) -> Check:
    name = f"cuda:{index}"
    if cupy.status != "ok":
        return Check(_GROUP, name, "missing", _WITHOUT)
    torch, backend = probe.module("torch"), probe.module("dataparallel.kernels.backend")
    if backend is not None and backend.backend_of(torch.device("cuda", index)) is not None:
        return Check(_GROUP, name, "ok", "the kernels, launched with CuPy")
    remedy = 'python -c "import cupy; cupy.show_config()", and the warning that dataparallel logs'
    return Check(_GROUP, name, "problem", f"{_WITHOUT}, although CuPy is there", remedy)
