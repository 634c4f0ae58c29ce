"""As much of CuPy and of torch.cuda as the kernels need, on devices that are not there.

Both libraries change one current device for each thread, as on real hardware.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch


class Launch(NamedTuple):
    """A kernel that was queued."""

    device: int
    stream: int
    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    value: bytes


class NVRTCError(RuntimeError):
    """What the compiler of CuPy raises."""


class Library:
    """A module; other than a namespace it can be a key."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Machine:
    """Several devices, their streams, and what was done with them.

    Attributes:
        launches: The kernels that were queued, in order.
        compiled: The texts that were compiled, with their options.
        loaded: For each module, its device and file.
        peers: Copies between devices, from and to.
        fails: What the next launch raises.
    """

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.compiled: list[tuple[str, tuple[str, ...]]] = []
        self.loaded: list[tuple[int, str]] = []
        self.peers: list[tuple[int, int]] = []
        self.fails: Exception | None = None
        self.architectures: tuple[int, ...] = (80, 90)
        self._programs: list[str] = []
        self._here = threading.local()

    def state(self) -> tuple[int, int]:
        """Of this thread: the current device, and CuPy's current stream."""
        return getattr(self._here, "device", 0), getattr(self._here, "stream", -1)

    @contextlib.contextmanager
    def _device(self, library: str, index: int) -> Iterator[None]:
        before, told = self.state()[0], getattr(self._here, library, None)
        self._here.device = index
        setattr(self._here, library, index)
        try:
            yield
        finally:
            self._here.device = before
            setattr(self._here, library, told)

    def is_set(self, library: str) -> bool:
        """Whether a library has been told the current device of this thread."""
        return getattr(self._here, library, None) == self.state()[0]

    @contextlib.contextmanager
    def _stream(self, foreign: Any) -> Iterator[None]:
        version, stream = foreign.__cuda_stream__()
        assert version == 0
        before = self.state()[1]
        self._here.stream = stream
        try:
            yield
        finally:
            self._here.stream = before

    # --- torch.cuda ----------------------------------------------------------------------------

    def torch_cuda(self) -> dict[str, Any]:
        """What stands in for the attributes of torch.cuda."""
        return {
            "current_device": lambda: self.state()[0],
            "device": lambda device: self._device("torch", device.index),
            "current_stream": lambda device: SimpleNamespace(cuda_stream=self.stream_of(device)),
            "get_device_capability": lambda device: (9, 0),
            "get_device_properties": lambda device: SimpleNamespace(multi_processor_count=132),
            "can_device_access_peer": lambda reader, owner: owner.index != 3,
        }

    @staticmethod
    def stream_of(device: torch.device) -> int:
        """Torch's current stream: one for each thread and device."""
        return 1000 * (threading.get_ident() % 1000 + 1) + device.index

    def empty(self, size: int, device: torch.device) -> Any:
        """Stands in for torch.empty."""
        return SimpleNamespace(to=lambda other: self.peers.append((device.index, other.index)))

    # --- cupy ----------------------------------------------------------------------------------

    def cupy(self) -> Any:
        """What stands in for the module."""
        return SimpleNamespace(
            RawModule=lambda path: Module(self, path),
            cuda=SimpleNamespace(
                is_available=lambda: True,
                Device=lambda index: self._device("cupy", index),
                Stream=SimpleNamespace(from_external=self._stream),
                nvrtc=Library(
                    NVRTCError=NVRTCError,
                    getVersion=lambda: (13, 0),
                    getSupportedArchs=lambda: self.architectures,
                    createProgram=self._create,
                    compileProgram=self._compile,
                    getCUBIN=lambda program: self._code(program, "\0.text.{}\0"),
                    getPTX=lambda program: self._code(program, ".visible .entry {}("),
                    getProgramLog=lambda program: "line 7: no such type",
                    destroyProgram=lambda program: None,
                ),
            ),
        )

    def _create(self, text: str, name: str, headers: tuple[()], names: tuple[()]) -> int:
        self._programs.append(text)
        return len(self._programs) - 1

    def _compile(self, program: int, options: tuple[str, ...]) -> None:
        self.compiled.append((self._programs[program], options))
        if "does not compile" in self._programs[program]:
            raise NVRTCError("NVRTC_ERROR_COMPILATION (6)")

    def _code(self, program: int, form: str) -> bytes:
        text = self._programs[program]
        return "".join(form.format(name) for name in ("first", "second") if name in text).encode()


class Module:
    """A loaded file with kernels."""

    def __init__(self, machine: Machine, path: str) -> None:
        assert Path(path).stat().st_size
        machine.loaded.append((machine.state()[0], path))
        self._machine = machine

    def get_function(self, name: str) -> Any:
        """A kernel, which is on the device on which it is asked for."""
        home = self._machine.state()[0]

        def launch(grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
            device, stream = self._machine.state()
            assert device == home, "launched on a device on which it was not loaded"
            assert self._machine.is_set("torch") and self._machine.is_set("cupy")
            if self._machine.fails is not None:
                raise self._machine.fails
            (value,) = args
            # All other things that are passed would be addresses, or scalars of CuPy's choice.
            assert isinstance(value, np.ndarray) and value.size == 1
            launched = Launch(device, stream, name, grid, block, value.tobytes())
            self._machine.launches.append(launched)

        return launch
