"""Launches of kernels on CUDA devices, with a CuPy and devices that exist in the test only."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from dataparallel.errors import install_command
from dataparallel.kernels import backend, compiler, cupy_backend
from dataparallel.kernels.cupy_backend import CupyBackend

DEVICES = [torch.device("cuda", i) for i in range(4)]
SOURCE = "// the kernels first and second"


class Machine:
    """As much of CuPy and of torch.cuda as the kernels need, on devices that are not there.

    Both libraries change one current device for each thread, as on real hardware. ``fails`` is what
    the next launch raises.
    """

    def __init__(self) -> None:
        #: Device, stream, kernel, grid, block and parameters.
        self.launches: list[tuple[Any, ...]] = []
        self.compiled: list[tuple[str, tuple[str, ...]]] = []
        self.loaded: list[tuple[int, str]] = []
        self.fails: Exception | None = None
        self.architectures: tuple[int, ...] = (80, 90)
        self._here = threading.local()
        self.nvrtc = mock.Mock(
            NVRTCError=ArithmeticError,
            getVersion=lambda: (13, 0),
            getSupportedArchs=lambda: self.architectures,
            # A program is its text.
            createProgram=lambda text, name, headers, names: text,
            compileProgram=self._compile,
            getCUBIN=lambda program: b"\0.text.first\0.text.second\0",
            getPTX=lambda program: b".visible .entry first(.visible .entry second(",
            getProgramLog=lambda program: "line 7: no such type",
        )
        self.cupy = SimpleNamespace(
            RawModule=self._load,
            cuda=SimpleNamespace(
                is_available=lambda: True,
                Device=lambda index: self._set(device=index, cupy=index),
                Stream=SimpleNamespace(
                    from_external=lambda stream: self._set(stream=stream.__cuda_stream__()[1])
                ),
                nvrtc=self.nvrtc,
            ),
        )
        #: The stand-ins for the attributes of torch.cuda.
        self.torch_cuda = {
            "current_device": lambda: self.state()[0],
            "device": lambda device: self._set(device=device.index, torch=device.index),
            "current_stream": lambda device: SimpleNamespace(cuda_stream=self.stream_of(device)),
            "get_device_capability": lambda device: (9, 0),
            "get_device_properties": lambda device: SimpleNamespace(multi_processor_count=132),
        }

    def state(self) -> tuple[int, int]:
        """Return this thread's current device, and CuPy's current stream."""
        return getattr(self._here, "device", 0), getattr(self._here, "stream", -1)

    @contextlib.contextmanager
    def _set(self, **values: int) -> Iterator[None]:
        before = dict(vars(self._here))
        vars(self._here).update(values)
        try:
            yield
        finally:
            vars(self._here).clear()
            vars(self._here).update(before)

    @staticmethod
    def stream_of(device: torch.device) -> int:
        """Torch's current stream: one for each thread and device."""
        return 1000 * (threading.get_ident() % 1000 + 1) + device.index

    def _compile(self, program: str, options: tuple[str, ...]) -> None:
        self.compiled.append((program, options))
        if "does not compile" in program:
            raise ArithmeticError("NVRTC_ERROR_COMPILATION (6)")

    def _load(self, path: str) -> Any:
        assert Path(path).stat().st_size
        home = self.state()[0]
        self.loaded.append((home, path))
        return SimpleNamespace(get_function=lambda name: partial(self._launch, home, name))

    def _launch(self, home: int, name: str, grid: Any, block: Any, args: Any) -> None:
        device, stream = self.state()
        assert device == home, "launched on a device on which it was not loaded"
        assert self._here.torch == self._here.cupy == device
        if self.fails is not None:
            raise self.fails
        (value,) = args
        # All other things that are passed would be addresses, or scalars of CuPy's choice.
        assert isinstance(value, np.ndarray) and value.size == 1
        self.launches.append((device, stream, name, grid, block, value.tobytes()))


class Parameters(ctypes.Structure):
    """The parameters of a kernel."""

    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_longlong))


PARAMETERS = Parameters(address=1 << 40, size=7)


def forget() -> None:
    for cached in (
        cupy_backend._look_for_cupy,
        cupy_backend._capability,
        cupy_backend._num_multiprocessors,
        compiler.compile_source,
    ):
        cached.cache_clear()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    """Four devices, a torch for CUDA 13 and a CuPy, and no compiled kernels."""
    made = Machine()
    for name, value in made.torch_cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setitem(sys.modules, "cupy", made.cupy)
    monkeypatch.setenv("DATAPARALLEL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "source_text", lambda name: SOURCE)
    forget()
    yield made
    forget()


# --- launches ----------------------------------------------------------------------------------


def test_a_launch_passes_the_struct_by_value_and_restores_devices_and_streams(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = machine.state()
    kernels = CupyBackend()
    kernels.launch(DEVICES[0], "some", "first", 0, PARAMETERS)
    assert not machine.launches and not machine.compiled, "no blocks launch nothing"
    kernels.launch(DEVICES[2], "some", "first", 5, PARAMETERS)
    stream = machine.stream_of(DEVICES[2])
    assert machine.launches == [(2, stream, "first", (5,), (256,), bytes(PARAMETERS))]
    assert kernels.most_blocks(DEVICES[0]) == 132 * 32
    machine.fails = RuntimeError("cudaErrorInvalidConfiguration")
    with pytest.raises(RuntimeError, match="cudaErrorInvalidConfiguration"):
        kernels.launch(DEVICES[1], "some", "first", 1, PARAMETERS)
    assert machine.state() == before
    machine.fails = None
    monkeypatch.setattr(machine, "stream_of", lambda device: 0)
    kernels.launch(DEVICES[0], "some", "first", 1, PARAMETERS)
    assert machine.launches[1][1] == 1, "0 could be a stream of this thread alone"


def test_a_source_is_compiled_once_and_loaded_on_each_device(machine: Machine) -> None:
    kernels = CupyBackend()
    kernels.load(DEVICES[0], "some")
    with torch.cuda.device(DEVICES[1]):
        kernels.load(torch.device("cuda"), "some")
    # All that a launch would have to wait for.
    assert set(kernels._kernels) == {
        (device, "some", name) for device in DEVICES[:2] for name in ("first", "second")
    }
    # CuPy's own options would flush small numbers to zero.
    options = (*compiler.COMPILER_OPTIONS, "--gpu-architecture=sm_90")
    assert machine.compiled == [(SOURCE, options)]
    # The next process finds what was compiled, unless the file is damaged.
    path = Path(machine.loaded[0][1])
    for damaged in (False, True):
        if damaged:
            path.write_bytes(b"half of a fi")
        compiler.compile_source.cache_clear()
        CupyBackend().load(DEVICES[0], "some")
        assert len(machine.compiled) == 1 + damaged
        assert path.read_bytes().startswith(b"\0.text")


def test_threads_have_devices_and_streams_of_their_own(machine: Machine) -> None:
    kernels = CupyBackend()
    ready = threading.Barrier(len(DEVICES))

    def work(device: torch.device) -> None:
        ready.wait(20)
        for _ in range(20):
            kernels.launch(device, "some", "first", device.index + 1, PARAMETERS)
        stream = machine.stream_of(device)
        mine = {(at, grid) for at, its, _, grid, *_ in machine.launches if its == stream}
        assert mine == {(device.index, (device.index + 1,))}

    with ThreadPoolExecutor(len(DEVICES)) as pool:
        list(pool.map(work, DEVICES, timeout=60))
    assert len(machine.launches) == 80
    # At the same time, but compiled once and loaded once for each device.
    assert len(machine.compiled) == 1
    assert sorted(device for device, _ in machine.loaded) == [0, 1, 2, 3]


# --- compiling ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("known", "architecture"), [((80, 90), "sm_90"), ((75, 89), "compute_89")])
def test_a_device_that_the_compiler_does_not_know_gets_the_next_older_code(
    machine: Machine, known: tuple[int, ...], architecture: str
) -> None:
    machine.architectures = known
    CupyBackend().launch(DEVICES[0], "some", "second", 1, PARAMETERS)
    assert machine.compiled[0][1][-1] == f"--gpu-architecture={architecture}"
    assert machine.launches[0][2] == "second"


Spoil = Callable[[Machine, pytest.MonkeyPatch], None]


def no_cupy(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "cupy", None)


def no_devices(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(machine.cupy.cuda, "is_available", lambda: False)


def no_compiler(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    missing = RuntimeError("libnvrtc.so.13 not found\nlooked at many places")
    patch.setattr(machine.nvrtc, "getVersion", mock.Mock(side_effect=missing))


def no_code(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(compiler, "source_text", lambda name: "does not compile")


def full_disk(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(os, "replace", mock.Mock(side_effect=OSError(28, "No space left on device")))


def too_new(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(machine, "architectures", (100, 120))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (no_cupy, r"^CuPy cannot be imported"),
        (no_devices, r"^CuPy finds no device"),
        (no_compiler, r"^CuPy finds no compiler \(libnvrtc\.so\.13 not found\)"),
        (no_code, r"cuda:0 \(\w+\.cu does not compile: NVRTC.*\nline 7: no such type"),
        (full_disk, r"cuda:0 \(cannot keep .*kernels-.* No space .*; set DATAPARALLEL_CACHE_DIR"),
        (too_new, r"cuda:0 \(.* capability 9\.0, .* CUDA 13\.0 is too new; install"),
    ],
)
def test_what_is_missing_is_logged_once(
    machine: Machine,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    spoil: Spoil,
    reason: str,
) -> None:
    kernels = CupyBackend()
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING, "dataparallel"):
        spoil(machine, patch)
        assert not kernels.serves(DEVICES[0])
        assert not kernels.serves(DEVICES[0])
    (record,) = caplog.records
    assert re.search(reason, record.getMessage())
    assert record.getMessage().endswith(install_command("cuda13"))
    assert len(machine.compiled) <= 1
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_other_devices_and_rocm_are_not_served_and_say_nothing(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = CupyBackend()
    assert kernels.serves(DEVICES[0])
    assert not kernels.serves(torch.device("cpu"))
    forget()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    assert not kernels.serves(DEVICES[0])
    forget()
    monkeypatch.setattr(torch.version, "cuda", None)
    no_cupy(machine, monkeypatch)
    assert not kernels.serves(DEVICES[0])
    assert not caplog.records
    with backend.registered([kernels]):
        assert backend.backend_of(DEVICES[0]) is None
