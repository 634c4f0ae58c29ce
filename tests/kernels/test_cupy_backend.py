"""How kernels reach CUDA devices, with a CuPy and devices that exist in the test only."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from dataparallel.kernels import backend, compiler, cupy_backend
from dataparallel.kernels.cupy_backend import CupyBackend

DEVICES = [torch.device("cuda", i) for i in range(4)]
SOURCE = "// the kernels first and second"


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
    """As much of CuPy and of torch.cuda as the kernels need, on devices that are not there.

    Both libraries change one current device for each thread, as on real hardware. ``fails`` is what
    the next launch raises.
    """

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.compiled: list[tuple[str, tuple[str, ...]]] = []
        self.loaded: list[tuple[int, str]] = []
        self.peers: list[tuple[int, int]] = []
        self.fails: Exception | None = None
        self.architectures: tuple[int, ...] = (80, 90)
        self._here = threading.local()

    def state(self) -> tuple[int, int]:
        """Of this thread: the current device, and CuPy's current stream."""
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

    def torch_cuda(self) -> dict[str, Any]:
        """What stands in for the attributes of torch.cuda."""
        return {
            "current_device": lambda: self.state()[0],
            "device": lambda device: self._set(device=device.index, torch=device.index),
            "current_stream": lambda device: SimpleNamespace(cuda_stream=self.stream_of(device)),
            "get_device_capability": lambda device: (9, 0),
            "get_device_properties": lambda device: SimpleNamespace(multi_processor_count=132),
            "can_device_access_peer": lambda reader, owner: owner.index != 3,
        }

    def empty(self, size: int, device: torch.device) -> Any:
        """Stands in for torch.empty."""
        return SimpleNamespace(to=lambda other: self.peers.append((device.index, other.index)))

    def cupy(self) -> Any:
        """What stands in for the module."""
        return SimpleNamespace(
            RawModule=self._load,
            cuda=SimpleNamespace(
                is_available=lambda: True,
                Device=lambda index: self._set(device=index, cupy=index),
                Stream=SimpleNamespace(
                    from_external=lambda stream: self._set(stream=stream.__cuda_stream__()[1])
                ),
                nvrtc=Library(
                    NVRTCError=NVRTCError,
                    getVersion=lambda: (13, 0),
                    getSupportedArchs=lambda: self.architectures,
                    # A program is its text.
                    createProgram=lambda text, name, headers, names: text,
                    compileProgram=self._compile,
                    getCUBIN=lambda program: b"\0.text.first\0.text.second\0",
                    getPTX=lambda program: b".visible .entry first(.visible .entry second(",
                    getProgramLog=lambda program: "line 7: no such type",
                    destroyProgram=lambda program: None,
                ),
            ),
        )

    def _compile(self, program: str, options: tuple[str, ...]) -> None:
        self.compiled.append((program, options))
        if "does not compile" in program:
            raise NVRTCError("NVRTC_ERROR_COMPILATION (6)")

    def _load(self, path: str) -> Any:
        assert Path(path).stat().st_size
        home = self.state()[0]
        self.loaded.append((home, path))
        return SimpleNamespace(get_function=lambda name: partial(self._launch, home, name))

    def _launch(
        self, home: int, name: str, grid: tuple[int, ...], block: tuple[int, ...], args: Any
    ) -> None:
        device, stream = self.state()
        assert device == home, "launched on a device on which it was not loaded"
        assert self._here.torch == self._here.cupy == device
        if self.fails is not None:
            raise self.fails
        (value,) = args
        # All other things that are passed would be addresses, or scalars of CuPy's choice.
        assert isinstance(value, np.ndarray) and value.size == 1
        self.launches.append(Launch(device, stream, name, grid, block, value.tobytes()))


class Parameters(ctypes.Structure):
    """Of a kernel."""

    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_longlong))


def parameters() -> Parameters:
    return Parameters(address=1 << 40, size=7)


def forget() -> None:
    for cached in (
        cupy_backend._look_for_cupy,
        cupy_backend._capability,
        cupy_backend._num_multiprocessors,
        cupy_backend._enable_peer,
        compiler.compile_source,
    ):
        cached.cache_clear()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    """Four devices, a torch for CUDA 13 and a CuPy, and no compiled kernels."""
    made = Machine()
    for name, value in made.torch_cuda().items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setitem(sys.modules, "cupy", made.cupy())
    monkeypatch.setenv("DATAPARALLEL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "source_text", lambda name: SOURCE)
    forget()
    yield made
    forget()


def test_a_launch_passes_the_struct_by_value_and_restores_devices_and_streams(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, before = parameters(), machine.state()
    kernels = CupyBackend()
    kernels.launch(DEVICES[0], "some", "first", 0, parameters())
    assert not machine.launches and not machine.compiled, "no blocks launch nothing"
    kernels.launch(DEVICES[2], "some", "first", 5, given)
    stream = machine.stream_of(DEVICES[2])
    assert machine.launches == [Launch(2, stream, "first", (5,), (256,), bytes(given))]
    assert kernels.most_blocks(DEVICES[0]) == 132 * 32
    assert machine.state() == before
    machine.fails = RuntimeError("cudaErrorInvalidConfiguration")
    with pytest.raises(RuntimeError, match="cudaErrorInvalidConfiguration"):
        kernels.launch(DEVICES[1], "some", "first", 1, parameters())
    assert machine.state() == before
    machine.fails = None
    monkeypatch.setattr(machine, "stream_of", lambda device: 0)
    kernels.launch(DEVICES[0], "some", "first", 1, parameters())
    assert machine.launches[1].stream == 1, "0 could be a stream of this thread alone"


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
    compiler.compile_source.cache_clear()
    CupyBackend().load(DEVICES[0], "some")
    assert len(machine.compiled) == 1
    assert [device for device, _ in machine.loaded] == [0, 1, 0]
    path = Path(machine.loaded[0][1])
    path.write_bytes(b"half of a fi")
    compiler.compile_source.cache_clear()
    CupyBackend().load(DEVICES[0], "some")
    assert len(machine.compiled) == 2
    assert path.read_bytes().startswith(b"\0.text")


def test_threads_have_devices_and_streams_of_their_own(machine: Machine) -> None:
    kernels = CupyBackend()
    ready = threading.Barrier(len(DEVICES))

    def work(device: torch.device) -> None:
        ready.wait(20)
        for _ in range(20):
            stream = machine.stream_of(device)
            kernels.launch(device, "some", "first", device.index + 1, parameters())
            mine = [launch for launch in machine.launches if launch.stream == stream]
            assert {(each.device, each.grid) for each in mine} == {
                (device.index, (device.index + 1,))
            }

    with ThreadPoolExecutor(len(DEVICES)) as pool:
        list(pool.map(work, DEVICES, timeout=60))
    assert len(machine.launches) == 80
    # At the same time, but compiled once and loaded once for each device.
    assert len(machine.compiled) == 1
    assert sorted(device for device, _ in machine.loaded) == [0, 1, 2, 3]


def test_peers_are_allowed_to_read_in_both_directions(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "empty", machine.empty)
    kernels = CupyBackend()
    assert kernels.can_read(DEVICES[0], DEVICES[0])
    assert not machine.peers
    for _ in range(2):
        assert kernels.can_read(DEVICES[0], DEVICES[1])
    # Torch lets the device that is copied from access the other one.
    assert machine.peers == [(0, 1), (1, 0)]
    assert not kernels.can_read(DEVICES[0], DEVICES[3])
    assert not kernels.can_read(DEVICES[0], torch.device("cpu"))
    assert not kernels.can_read(torch.device("cpu"), DEVICES[0])


# --- compiling ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("known", "architecture"), [((80, 90), "sm_90"), ((75, 89), "compute_89")])
def test_a_device_that_the_compiler_does_not_know_gets_the_next_older_code(
    machine: Machine, known: tuple[int, ...], architecture: str
) -> None:
    machine.architectures = known
    CupyBackend().launch(DEVICES[0], "some", "second", 1, parameters())
    assert machine.compiled[0][1][-1] == f"--gpu-architecture={architecture}"
    assert machine.launches[0].kernel == "second"


def test_a_device_too_old_for_the_compiler(machine: Machine) -> None:
    machine.architectures = (100, 120)
    with pytest.raises(RuntimeError, match=r"capability 9\.0, .* CUDA 13\.0 is too new; install"):
        CupyBackend().load(DEVICES[0], "some")


def _full_disk(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("patch", "logged", "error"),
    [
        (
            (compiler, "source_text", lambda name: "does not compile"),
            r"kernels cannot be compiled for cuda:0 \(reduce_add.cu does not",
            r"some\.cu does not compile: .*\nline 7: no such type",
        ),
        (
            (os, "replace", _full_disk),
            "No space left on device; set DATAPARALLEL_CACHE_DIR",
            r"cannot keep compiled code in .*kernels-",
        ),
    ],
    ids=["it does not compile", "it cannot be kept"],
)
def test_where_no_code_can_be_had_the_references_compute(
    machine: Machine,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    patch: tuple[Any, str, Any],
    logged: str,
    error: str,
) -> None:
    kernels = CupyBackend()
    with pytest.MonkeyPatch.context() as broken, caplog.at_level(logging.WARNING, "dataparallel"):
        broken.setattr(*patch)
        assert not kernels.serves(DEVICES[0])
        assert not kernels.serves(DEVICES[0])
        assert len(machine.compiled) == 1
        with pytest.raises(RuntimeError, match=error):
            kernels.load(DEVICES[0], "some")
    (record,) = caplog.records
    assert re.search(logged, record.getMessage())
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    kernels.launch(DEVICES[0], "some", "first", 1, parameters())
    assert len(machine.launches) == 1


# --- without CuPy -------------------------------------------------------------------------------


def without_devices(machine: Machine) -> Any:
    cupy = machine.cupy()
    cupy.cuda.is_available = lambda: False
    return cupy


def without_compiler(machine: Machine) -> Any:
    def fail() -> None:
        raise RuntimeError("libnvrtc.so.13 not found\nlooked at many places")

    cupy = machine.cupy()
    cupy.cuda.nvrtc.getVersion = fail
    return cupy


@pytest.mark.parametrize(
    ("make", "reason", "cuda"),
    [
        (lambda machine: None, "CuPy cannot be imported", "12.8"),
        (without_devices, "CuPy finds no device", "13.0"),
        (without_compiler, "CuPy finds no compiler (libnvrtc.so.13 not found)", "13.0"),
    ],
)
def test_what_is_missing_is_logged_once(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    make: Any,
    reason: str,
    cuda: str,
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", make(machine))
    monkeypatch.setattr(torch.version, "cuda", cuda)
    kernels = CupyBackend()
    with caplog.at_level(logging.WARNING, "dataparallel"), ThreadPoolExecutor(4) as pool:
        assert list(pool.map(kernels.serves, [DEVICES[0]] * 4, timeout=30)) == [False] * 4
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith(reason) and "\n" not in text
    assert "sums of replicas" in text and "which read memory more often" in text
    assert f'install "dataparallel[cuda{cuda[:2]}]"' in text


def test_other_devices_and_rocm_are_not_served_and_say_nothing(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = CupyBackend()
    assert kernels.serves(DEVICES[0])
    assert not kernels.serves(torch.device("cpu"))
    assert not kernels.serves(torch.device("virtual", 0))
    forget()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    assert not kernels.serves(DEVICES[0])
    forget()
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert not kernels.serves(DEVICES[0])
    assert not caplog.records
    with backend.registered([kernels]):
        assert backend.backend_of(DEVICES[0]) is None
