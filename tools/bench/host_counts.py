"""The host's work in a step, counted: Python calls, operators, copies, allocations, waits."""

from __future__ import annotations

import contextlib
import pathlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import dataparallel
from dataparallel import devices, kernels, tools
from dataparallel.torch_internals import address_of_storage, dispatch_mode

#: Operators that do nothing but copy; each returns, or is given first, what it has written.
_COPIES = ("copy_", "to_copy", "clone", "cat", "stack", "flatten_dense_tensors", "foreach_copy_")


def _folder(module: Any) -> str:
    return f"{pathlib.Path(module.__file__).parent}/"


class PythonCalls:
    """A count of calls of Python functions, in every thread that begins after it is made."""

    def __init__(self, slots: Sequence[torch.device]) -> None:
        self._own = (_folder(dataparallel), _folder(kernels))
        self._not_own = _folder(tools)
        self._notes = False
        self._files: list[str] = []
        threading.setprofile(self)
        sys.setprofile(self)
        for device in slots:
            # Autograd has a thread for each accelerator. Those threads are not Python's, but keep
            # what is set in one of their calls.
            probe = torch.zeros((), device=device, requires_grad=True)
            probe.register_hook(lambda grad: sys.setprofile(self))  # type: ignore[no-untyped-call]
            probe.sum().backward()  # type: ignore[no-untyped-call]

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Python's profiler interface."""
        if self._notes and event == "call":
            self._files.append(frame.f_code.co_filename)

    def count(self, step: Callable[[], object]) -> dict[str, int]:
        """Return the calls of one step: those of this package, and all of them."""
        self._files = []
        self._notes = True
        step()
        self._notes = False
        own = [
            f for f in self._files if f.startswith(self._own) and not f.startswith(self._not_own)
        ]
        return {"package_calls": len(own), "python_calls": len(self._files)}


class _Operators:
    """A mode that notes operators; autograd and the package take it along into their threads."""

    def __init__(self) -> None:
        #: For each operator: bytes copied, memory blocks of its own in its results, values read.
        self.noted: list[tuple[int, int, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # Those of torch's profiler are marks and no work.
        if func.namespace != "profiler":
            name = func.overloadpacket.__name__.lstrip("_")
            given, made = _memory((*args, *kwargs.values())), _memory((result,))
            written = made or _memory(args[:1])
            copied = sum(written.values()) if name in _COPIES else 0
            read = int(name == "local_scalar_dense")
            self.noted.append((copied, len(made.keys() - given.keys()), read))
        return result


def _memory(values: Iterable[Any]) -> dict[int, int]:
    """By block of memory, the bytes that tensors have in it; they may be in lists."""
    found: dict[int, int] = {}
    for value in values:
        for leaf in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(leaf, Tensor):
                block = address_of_storage(leaf.untyped_storage())
                found[block] = found.get(block, 0) + leaf.nbytes
    return found


def count_operators(step: Callable[[], object], device: torch.device) -> dict[str, int | None]:
    """Operators of one step, bytes that they copy, results with new memory, and host waits.

    The waits are None where the accelerator does not tell of them.
    """
    mode = _Operators()
    with _waits(device) as waits, dispatch_mode(mode):
        step()
    copied, made, read = (sum(each) for each in zip(*mode.noted, strict=True))
    return {
        "operators": len(mode.noted),
        "copied_bytes": copied,
        "allocations": made,
        # On the CPU a value is there when it is read, but elsewhere the host would wait for it.
        "host_waits": waits() if devices.is_accelerator(device) else read,
    }


@contextlib.contextmanager
def _waits(device: torch.device) -> Iterator[Callable[[], int | None]]:
    """Yields what tells how often the host has waited for an accelerator."""
    if dataparallel.virtual.is_enabled():
        before = dataparallel.virtual.counters()["host_waits"]
        yield lambda: dataparallel.virtual.counters()["host_waits"] - before
        return
    # CUDA's mode warns at each wait.
    set_mode = getattr(torch.get_device_module(device), "set_sync_debug_mode", None)
    if set_mode is None:
        yield lambda: None
        return
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        set_mode("warn")
        yield lambda: sum("called a synchronizing" in str(each.message) for each in seen)
        set_mode("default")
