"""Checks of accelerators: devices, drivers, peer access, NCCL, needs of virtual devices."""

from __future__ import annotations

import collections
import shlex
from collections.abc import Iterator
from typing import Any

from dataparallel.monitor.readings.nvml_query import (
    LIBRARY_NOT_FOUND,
    MEANINGS,
    package_problem,
)
from dataparallel.tools.doctor.check import Check, Probe

#: The remedy for a device that is a part of a GPU; CUDA's names of those have the word.
_MIG = (
    "CUDA shows a process one MIG instance; for several start a process for each with torchrun and "
    "CUDA_VISIBLE_DEVICES=MIG-..., or turn MIG off: sudo nvidia-smi -mig 0"
)


def devices(probe: Probe) -> Iterator[Check]:
    """Yield one record per accelerator: name, memory, capability."""
    torch, package = probe.module("torch"), probe.module("dataparallel")
    if torch is None or package is None:
        return
    found = package.accelerators()
    if not found:
        yield Check(
            "Devices",
            "accelerators",
            "missing",
            "none that this torch can use; CPU replicas and virtual devices work",
            'DataParallel(net, device_ids=["cpu", "cpu"])',
        )
        return
    for device in found:
        described = _describe(torch.get_device_module(device), device.index)
        yield Check("Devices", str(device), "ok", described, _MIG if " MIG " in described else "")


def _describe(module: Any, index: int) -> str:
    if not hasattr(module, "get_device_properties"):
        return "no properties known"
    properties = module.get_device_properties(index)
    parts = [str(getattr(properties, "name", "unnamed"))]
    memory = getattr(properties, "total_memory", None)
    if memory:
        parts.append(f"{memory / 2**30:.1f} GiB")
    major, minor = (getattr(properties, name, None) for name in ("major", "minor"))
    if major is not None and minor is not None:
        parts.append(f"capability {major}.{minor}")
    return ", ".join(parts)


def driver(probe: Probe) -> Check:
    """Check the NVIDIA driver, as NVML knows it, and that torch can use it."""
    name, needed = "NVIDIA driver", "no driver answers; needed for CUDA"
    nvml = probe.module("pynvml")
    if nvml is None:
        detail = "not asked; without nvidia-ml-py nothing is known of it"
        return Check("Devices", name, "missing", detail, "pip install nvidia-ml-py")
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        names = [_text(nvml.nvmlDeviceGetName(handle)) for handle in handles]
        version = _text(nvml.nvmlSystemGetDriverVersion())
        nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        code = int(getattr(error, "value", LIBRARY_NOT_FOUND))
        what, remedy = MEANINGS.get(code, (f"NVML fails with error {code}", "see: sudo dmesg"))
        if code != LIBRARY_NOT_FOUND:
            return Check("Devices", name, "problem", what, remedy)
        return Check("Devices", name, "missing", f"{needed}: {what}", remedy)
    each = (f"{count} x {model}" for model, count in collections.Counter(names).items())
    detail = f"{version}, {', '.join(each)}"
    torch = probe.module("torch")
    if torch is None or torch.cuda.is_available():
        return Check("Devices", name, "ok", detail)
    if not torch.version.cuda:
        why, remedy = "torch was built without CUDA", "pip install --force-reinstall torch"
    else:
        why = f"torch, built for CUDA {torch.version.cuda}, finds no usable GPU"
        remedy = "install a newer driver, or a torch for an older CUDA (pytorch.org/get-started)"
    return Check("Devices", name, "problem", f"{detail}; but {why}", remedy)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def peer_access(probe: Probe) -> Iterator[Check]:
    """Check which pairs of CUDA devices copy directly, as a matrix; nothing for fewer than two."""
    torch = probe.module("torch")
    count = int(torch.cuda.device_count()) if torch is not None else 0
    if count < 2:
        return
    able = [
        [i == j or bool(torch.cuda.can_device_access_peer(i, j)) for j in range(count)]
        for i in range(count)
    ]
    head = "     " + " ".join(f"{j:>3}" for j in range(count))
    rows = [
        f"{i:>3}  "
        + " ".join("  ." if i == j else "yes" if able[i][j] else " no" for j in range(count))
        for i in range(count)
    ]
    detail = "\n".join(["from row to column", head, *rows])
    if all(all(row) for row in able):
        yield Check("Devices", "peer access", "ok", detail)
    else:
        yield Check(
            "Devices",
            "peer access",
            "missing",
            detail,
            "copies of the pairs with `no` go through host memory; `nvidia-smi topo -m` tells how "
            "they are connected",
        )


#: The size of each copy that is checked.
_COPY_BYTES = 16 * 2**20


def copies(probe: Probe) -> Iterator[Check]:
    """Copy a pattern between all devices, and compare; nothing for fewer than two."""
    package, module = probe.module("dataparallel"), probe.module("dataparallel.comm.copy_check")
    pairs = module.pairs_of(package.accelerators()) if package and module else []
    if not pairs:
        return
    wrong: dict[Any, dict[str, Any]] = {}
    for way, at_once in (("alone", False), ("all at once", True)):
        for fault in module.find_faults(pairs, _COPY_BYTES, at_once=at_once):
            wrong.setdefault(fault.pair, {})[way] = fault
    named = f"{_COPY_BYTES // 2**20} MiB from each device to each other, alone and all at once"
    if not wrong:
        yield Check("Devices", "copies", "ok", f"{named}: all {len(pairs)} pairs are sound")
        return
    order = list(dict.fromkeys(source for source, _ in pairs))
    rows = [" " * 5 + " ".join(f"{other.index:>5}" for other in order)]
    for source in order:
        cells = (
            "." if source == other else "WRONG" if (source, other) in wrong else "ok"
            for other in order
        )
        rows.append(f"{source.index:>3}  " + " ".join(f"{cell:>5}" for cell in cells))
    told = [f"{way}: {fault}" for ways in wrong.values() for way, fault in ways.items()]
    detail = "\n".join([f"{named}, from row to column", *rows, *told[:_MOST_FAULTS]])
    yield Check("Devices", "copies", "problem", detail, module.REMEDY)


#: The most faults that are told in full; the matrix has all.
_MOST_FAULTS = 4


def nccl(probe: Probe) -> Check:
    """Tell if NCCL can reduce between CUDA devices; within a process nothing needs it."""
    torch = probe.module("torch")
    gpus = int(torch.cuda.device_count()) if torch is not None else 0
    name, purpose = "NCCL", "sums between processes that have CUDA devices"
    if torch is None or not torch.version.cuda:
        return Check("Devices", name, "missing", f"not in this torch; for {purpose}")
    version = ".".join(map(str, torch.cuda.nccl.version()))
    if gpus < 2:
        return Check("Devices", name, "ok", f"{version}, unused with {gpus} CUDA device(s)")
    sample = [torch.empty(1, device=f"cuda:{i}") for i in range(gpus)]
    if torch.cuda.nccl.is_available(sample):
        return Check("Devices", name, "ok", f"{version}, usable on {gpus} devices")
    return Check(
        "Devices",
        name,
        "problem",
        f"{version} is there but not usable",
        "run with NCCL_DEBUG=INFO and read the first warning",
    )


def _compiler(probe: Probe, purpose: str) -> Check:
    """Check the C++ compiler: that of CXX alone, if that is set."""
    group, name = "Virtual devices", "C++ compiler"
    chosen = probe.environment("CXX")
    wanted = shlex.split(chosen)[:1] if chosen else ["c++", "g++", "clang++"]
    path = next(filter(None, map(probe.which, wanted)), None)
    if path is None and chosen:
        detail = f"CXX is {chosen!r}, and there is no such command; it {purpose}"
        return Check(group, name, "problem", detail, "set CXX to a C++ compiler, or unset it")
    if path is None:
        remedy = "apt install g++, or dnf install gcc-c++, or xcode-select --install"
        return Check(group, name, "missing", purpose, remedy)
    first = ((probe.output(path, "--version") or path).splitlines() or [path])[0]
    return Check(group, name, "ok", f"{first}, {purpose}")


def virtual_devices(probe: Probe) -> Iterator[Check]:
    """Check the compiler of the virtual devices, and if it has compiled them."""
    purpose = "compiles the virtual devices, once"
    yield _compiler(probe, purpose)
    headers = probe.python_header()
    if headers is None:
        remedy = "apt install python3-dev, or dnf install python3-devel"
        yield Check("Virtual devices", "Python headers", "missing", purpose, remedy)
    else:
        yield Check("Virtual devices", "Python headers", "ok", headers)
    native = probe.module("dataparallel.kernels.native")
    if native is not None:
        cache = native.cache_directory()
        compiled = len(list(cache.glob("virtual-*/*.so")))
        found = f"{compiled} compiled in {cache}" if compiled else f"will be compiled in {cache}"
        yield Check("Virtual devices", "cache", "ok", found)


def gpu_packages(probe: Probe) -> Check:
    """Return the check of the optional package that only helps with NVIDIA GPUs."""
    name, purpose = "nvidia-ml-py", "driver and memory of NVIDIA GPUs"
    problem = package_problem(probe.distribution)
    if problem is not None:
        return Check("Extras", name, "problem", *problem)
    version = probe.version(name)
    if version:
        return Check("Extras", name, "ok", f"{version}, for {purpose}")
    detail = f"for {purpose}; of no use without a GPU"
    return Check("Extras", name, "missing", detail, f"pip install {name}")
