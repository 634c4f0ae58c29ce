"""How kernels reach CUDA devices, with a CuPy and devices that exist in the test only."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from dataparallel.kernels import backend, compiler, cupy_backend
from dataparallel.kernels.cupy_backend import CupyBackend

DEVICES = [torch.device("cuda", i) for i in range(4)]
SOURCE = "// first and second"


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


def test_a_launch_passes_the_struct_by_value(machine: Machine) -> None:
    given = parameters()
    kernels = CupyBackend()
    kernels.launch(DEVICES[0], "some", "first", 0, parameters())
    assert not machine.launches and not machine.compiled, "no blocks launch nothing"
    kernels.launch(DEVICES[2], "some", "first", 5, given)
    stream = machine.stream_of(DEVICES[2])
    assert machine.launches == [Launch(2, stream, "first", (5,), (256,), bytes(given))]
    assert len(bytes(given)) == 16
    assert kernels.most_blocks(DEVICES[0]) == 132 * 32


def test_a_source_is_compiled_once_and_loaded_on_each_device(machine: Machine) -> None:
    kernels = CupyBackend()
    kernels.load(DEVICES[0], "some")
    with torch.cuda.device(DEVICES[1]):
        kernels.load(torch.device("cuda"), "some")
    # All that a launch would have to wait for.
    assert set(kernels._kernels) == {
        (device, "some", name) for device in DEVICES[:2] for name in ("first", "second")
    }
    for device in DEVICES[:2]:
        kernels.launch(device, "some", "first", 1, parameters())
        kernels.launch(device, "some", "second", 1, parameters())
    assert [launch.kernel for launch in machine.launches] == ["first", "second"] * 2
    # CuPy's own options would flush small numbers to zero.
    options = (*compiler.COMPILER_OPTIONS, "--gpu-architecture=sm_90")
    assert machine.compiled == [(SOURCE, options)]
    # The next process finds what was compiled, unless the text has changed or the file is damaged.
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


def test_devices_and_streams_are_restored(machine: Machine) -> None:
    kernels = CupyBackend()
    before = machine.state()
    kernels.launch(DEVICES[1], "some", "first", 1, parameters())
    assert machine.state() == before
    machine.fails = RuntimeError("cudaErrorInvalidConfiguration")
    with pytest.raises(RuntimeError, match="cudaErrorInvalidConfiguration"):
        kernels.launch(DEVICES[1], "some", "first", 1, parameters())
    assert machine.state() == before
    machine.fails = None
    kernels.launch(DEVICES[1], "some", "first", 1, parameters())
    assert len(machine.launches) == 2


def test_threads_have_devices_and_streams_of_their_own(machine: Machine) -> None:
    kernels = CupyBackend()
    ready = threading.Barrier(len(DEVICES))
    faults: list[BaseException] = []

    def work(device: torch.device) -> None:
        try:
            ready.wait(20)
            for _ in range(20):
                stream = machine.stream_of(device)
                kernels.launch(device, "some", "first", device.index + 1, parameters())
                mine = [launch for launch in machine.launches if launch.stream == stream]
                assert {(launch.device, launch.grid) for launch in mine} == {
                    (device.index, (device.index + 1,))
                }
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(device,)) for device in DEVICES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not faults
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


def test_where_code_cannot_be_kept_the_references_compute(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full, caplog.at_level(logging.WARNING, "dataparallel"):
        full.setattr(os, "replace", fail)
        assert not CupyBackend().serves(DEVICES[0])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert "No space left on device; set DATAPARALLEL_CACHE_DIR" in caplog.text
    (tmp_path / "file").touch()
    monkeypatch.setenv("DATAPARALLEL_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(RuntimeError, match=r"cannot keep compiled code in .*file"):
        CupyBackend().load(DEVICES[0], "some")


@pytest.mark.parametrize(("known", "architecture"), [((80, 90), "sm_90"), ((75, 89), "compute_89")])
def test_a_device_that_the_compiler_does_not_know_gets_the_next_older_code(
    machine: Machine, known: tuple[int, ...], architecture: str
) -> None:
    machine.architectures = known
    kernels = CupyBackend()
    kernels.launch(DEVICES[0], "some", "second", 1, parameters())
    assert machine.compiled[0][1][-1] == f"--gpu-architecture={architecture}"
    assert machine.launches[0].kernel == "second"


def test_a_device_too_old_for_the_compiler(machine: Machine) -> None:
    machine.architectures = (100, 120)
    with pytest.raises(RuntimeError, match=r"capability 9\.0, .* CUDA 13\.0 is too new; install"):
        CupyBackend().load(DEVICES[0], "some")


def test_where_nothing_compiles_the_references_compute(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiler, "source_text", lambda name: "does not compile")
    kernels = CupyBackend()
    with caplog.at_level(logging.WARNING, "dataparallel"):
        assert not kernels.serves(DEVICES[0])
        assert not kernels.serves(DEVICES[0])
    (record,) = caplog.records
    assert "kernels cannot be compiled for cuda:0 (reduce_add.cu does not" in record.getMessage()
    assert len(machine.compiled) == 1
    with pytest.raises(RuntimeError, match=r"some\.cu does not compile: .*\nline 7: no such type"):
        kernels.load(DEVICES[0], "some")
    monkeypatch.setattr(compiler, "source_text", lambda name: SOURCE)
    kernels.launch(DEVICES[0], "some", "first", 1, parameters())
    assert len(machine.launches) == 1


def test_torchs_default_stream_is_the_one_of_all_threads(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "stream_of", lambda device: 0)
    CupyBackend().launch(DEVICES[0], "some", "first", 1, parameters())
    assert machine.launches[0].stream == 1, "0 could be a stream of this thread alone"


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
    ("make", "reason"),
    [
        (lambda machine: None, "CuPy cannot be imported"),
        (without_devices, "CuPy finds no device"),
        (without_compiler, "CuPy finds no compiler (libnvrtc.so.13 not found)"),
    ],
)
@pytest.mark.parametrize("cuda", ["12.8", "13.0"])
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
    ready = threading.Barrier(4)
    served: list[bool] = []

    def ask() -> None:
        ready.wait(20)
        served.append(kernels.serves(DEVICES[0]))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    with caplog.at_level(logging.WARNING, "dataparallel"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert served == [False] * 4
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
