"""CuPy compiles the kernels with NVIDIA's runtime compiler and launches them on CUDA devices."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

import torch

from dataparallel.errors import install_command
from dataparallel.kernels.backend import THREADS, Backend
from dataparallel.kernels.compiler import compile_source

_log = logging.getLogger("dataparallel")

# Before, a kernel could not have its parameters in constant memory alone.
_LEAST_CAPABILITY = (7, 0)

# Every training step of several replicas needs it.
_TRIED = "flatten"

# Four times as many as one holds at a time, if registers allow. If they do not, the blocks that run
# last, when others have ended, have a small share of the work.
_BLOCKS_PER_MULTIPROCESSOR = 32


class CupyBackend(Backend):
    """Kernels on CUDA devices. Torch allocates all memory; CuPy gets addresses.

    Note [Two libraries on one device]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    Torch and CuPy share the runtime's current device of a thread, but each has a current stream of
    its own. So for a launch both get the same device, and CuPy gets torch's current stream. The
    kernel is then ordered like any operation of torch. Both are restored afterwards, since one
    library would leave the other one on its device. CuPy allocates nothing: two caching allocators
    would keep memory from each other.
    """

    def __init__(self) -> None:
        # By device, source and kernel; those of a source are put in together.
        self._kernels: dict[tuple[torch.device, str, str], Any] = {}
        self._able: dict[torch.device, bool] = {}
        self._lock = threading.Lock()

    def serves(self, device: torch.device) -> bool:
        return (
            device.type == "cuda"
            and _cupy() is not None
            and _capability(device) >= _LEAST_CAPABILITY
            and self._compiles(device)
        )

    def most_blocks(self, device: torch.device) -> int:
        return _num_multiprocessors(device) * _BLOCKS_PER_MULTIPROCESSOR

    def load(self, device: torch.device, source: str) -> None:
        if device.index is None:
            device = torch.device(device.type, torch.cuda.current_device())
        with self._lock, _on(device):
            if not any(key[:2] == (device, source) for key in self._kernels):
                self._kernels.update(_load(device, source))

    def _compiles(self, device: torch.device) -> bool:
        """True if kernels can be had for a device; the first time, one source is tried.

        A compiler may lack a part of itself, or not know the device.
        """
        known = self._able.get(device)
        if known is None:
            try:
                self.load(device, _TRIED)
                known = True
            except RuntimeError as error:
                known = False
                _warn(f"kernels cannot be compiled for {device} ({error})")
            self._able[device] = known
        return known

    def launch(
        self,
        device: torch.device,
        source: str,
        kernel: str,
        blocks: int,
        parameters: ctypes.Structure,
    ) -> None:
        if blocks == 0:
            return
        function = self._kernels.get((device, source, kernel))
        if function is None:
            self.load(device, source)
            function = self._kernels[device, source, kernel]
        numpy = importlib.import_module("numpy")
        # An array of one element is passed by value.
        value = numpy.frombuffer(bytes(parameters), dtype=f"V{ctypes.sizeof(parameters)}")
        with _on(device):
            function((blocks,), (THREADS,), (value,))


def _load(device: torch.device, source: str) -> dict[tuple[torch.device, str, str], Any]:
    """Return all kernels of a source, on the current device.

    All of them, because CUDA loads a kernel when it is first asked for. At the first launch, that
    would fail while a graph is captured, and might wait for work on the device.
    """
    cupy = _cupy()
    compiled = compile_source(cupy.cuda.nvrtc, source, _capability(device))
    # Nobody else can write there, see Note [Trusted code].
    module = cupy.RawModule(path=compiled.path)
    return {(device, source, name): module.get_function(name) for name in compiled.kernels}


_looking = threading.Lock()


def _cupy() -> Any:
    """CuPy, or None if it cannot run kernels; the first time, that is logged."""
    with _looking:
        return _look_for_cupy()


@functools.cache
def _look_for_cupy() -> Any:
    if torch.version.cuda is None:
        # For ROCm devices are called "cuda" too.
        return None
    try:
        cupy: Any = importlib.import_module("cupy")
        if cupy.cuda.is_available():
            cupy.cuda.nvrtc.getVersion()
            return cupy
        reason = "CuPy finds no device, perhaps since it was built for another CUDA"
    except ImportError as error:
        reason = f"CuPy cannot be imported ({error})"
    except RuntimeError as error:
        reason = f"CuPy finds no compiler ({str(error).splitlines()[0]})"
    _warn(reason)
    return None


def _warn(reason: str) -> None:
    major = str(torch.version.cuda).split(".")[0]
    _log.warning(
        "%s: bucket copies, fingerprints and sums of replicas use torch's own operations, which "
        "read memory more often; %s",
        reason,
        install_command(f"cuda{major}"),
    )


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@contextlib.contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """See Note [Two libraries on one device]."""
    cupy = _cupy()
    with (
        torch.cuda.device(device),
        cupy.cuda.Device(device.index),
        cupy.cuda.Stream.from_external(_Current(device)),
    ):
        yield


class _Current:
    """Torch's current stream under CUDA's stream protocol, which not all versions of torch speak.

    Args:
        device: The device of the stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)

    def __cuda_stream__(self) -> tuple[int, int]:
        # Torch's 0 is CUDA's legacy stream, 1; a setting of CuPy can make 0 one of each thread.
        return 0, self._stream.cuda_stream or 1
