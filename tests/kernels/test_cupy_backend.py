"""How kernels reach CUDA devices, with a CuPy and devices that exist in the test only."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dataparallel.kernels
from dataparallel.kernels import backend, compiler, cupy_backend, sources
from dataparallel.kernels.cupy_backend import CupyBackend
from tests.kernels.fake_cupy import Launch, Machine

DEVICES = [torch.device("cuda", i) for i in range(4)]
SOURCE = "// first and second"


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
    monkeypatch.setattr(sources, "read", lambda name: SOURCE)
    forget()
    yield made
    forget()


def test_a_launch_passes_the_struct_by_value(machine: Machine) -> None:
    given = parameters()
    CupyBackend().launch(DEVICES[2], "some", "first", 5, given)
    stream = machine.stream_of(DEVICES[2])
    assert machine.launches == [Launch(2, stream, "first", (5,), (256,), bytes(given))]
    assert len(bytes(given)) == 16


def test_no_blocks_launch_nothing(machine: Machine) -> None:
    CupyBackend().launch(DEVICES[0], "some", "first", 0, parameters())
    assert not machine.launches and not machine.compiled


def test_a_source_is_compiled_once_and_loaded_on_each_device(machine: Machine) -> None:
    kernels = CupyBackend()
    for _ in range(2):
        for device in DEVICES[:2]:
            kernels.launch(device, "some", "first", 1, parameters())
            kernels.launch(device, "some", "second", 1, parameters())
    assert [text for text, _ in machine.compiled] == [SOURCE]
    assert [device for device, _ in machine.loaded] == [0, 1]
    assert [launch.kernel for launch in machine.launches] == ["first", "second"] * 4


def test_loading_is_all_that_a_launch_would_have_to_wait_for(machine: Machine) -> None:
    kernels = CupyBackend()
    kernels.load(DEVICES[1], "some")
    kernels.load(DEVICES[1], "some")
    assert [device for device, _ in machine.loaded] == [1]
    kernels.launch(DEVICES[1], "some", "second", 1, parameters())
    assert len(machine.compiled) == len(machine.loaded) == 1
    assert set(kernels._kernels) == {(DEVICES[1], "some", name) for name in ("first", "second")}


def test_a_device_without_index_is_the_current_one(machine: Machine) -> None:
    kernels = CupyBackend()
    with torch.cuda.device(DEVICES[2]):
        kernels.load(torch.device("cuda"), "some")
    kernels.launch(DEVICES[2], "some", "first", 1, parameters())
    assert [device for device, _ in machine.loaded] == [2]


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


def test_blocks_fill_the_device(machine: Machine) -> None:
    assert CupyBackend().most_blocks(DEVICES[0]) == 132 * 32


# --- compiling ---------------------------------------------------------------------------------


def test_options_are_ours_alone(machine: Machine) -> None:
    """CuPy's own would flush small numbers to zero."""
    CupyBackend().load(DEVICES[0], "some")
    ((_, options),) = machine.compiled
    assert options == (*sources.COMPILER_OPTIONS, "--gpu-architecture=sm_90")


def test_a_compiled_source_is_kept_for_the_next_process(machine: Machine) -> None:
    CupyBackend().load(DEVICES[0], "some")
    compiler.compile_source.cache_clear()
    CupyBackend().load(DEVICES[0], "some")
    assert len(machine.compiled) == 1
    first, second = (path for _, path in machine.loaded)
    assert first == second


def test_another_text_is_compiled_anew(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    CupyBackend().load(DEVICES[0], "some")
    monkeypatch.setattr(sources, "read", lambda name: f"{SOURCE}, changed")
    compiler.compile_source.cache_clear()
    CupyBackend().load(DEVICES[0], "some")
    assert len(machine.compiled) == 2


def test_a_cache_that_cannot_be_written_is_done_without(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DATAPARALLEL_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    kernels = CupyBackend()
    kernels.launch(DEVICES[0], "some", "first", 1, parameters())
    assert len(machine.launches) == 1


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


def test_what_does_not_compile_shows_what_the_compiler_says(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "read", lambda name: "does not compile")
    kernels = CupyBackend()
    with pytest.raises(RuntimeError, match=r"some\.cu does not compile: .*\nline 7: no such type"):
        kernels.load(DEVICES[0], "some")
    monkeypatch.setattr(sources, "read", lambda name: SOURCE)
    kernels.launch(DEVICES[0], "some", "first", 1, parameters())
    assert len(machine.launches) == 1


def test_where_nothing_compiles_the_references_compute(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sources, "read", lambda name: "does not compile")
    kernels = CupyBackend()
    with caplog.at_level(logging.WARNING, "dataparallel"):
        assert not kernels.serves(DEVICES[0])
        assert not kernels.serves(DEVICES[0])
    (record,) = caplog.records
    assert "kernels cannot be compiled for cuda:0 (reduce_add.cu does not" in record.getMessage()
    assert len(machine.compiled) == 1


def test_a_damaged_file_is_made_anew(machine: Machine, tmp_path: Path) -> None:
    CupyBackend().load(DEVICES[0], "some")
    (path,) = tmp_path.rglob("some.cubin")
    path.write_bytes(b"half of a fi")
    compiler.compile_source.cache_clear()
    kernels = CupyBackend()
    kernels.launch(DEVICES[0], "some", "first", 1, parameters())
    assert len(machine.compiled) == 2
    assert path.read_bytes().startswith(b"\0.text")


def test_a_disk_that_is_full(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    CupyBackend().launch(DEVICES[0], "some", "first", 1, parameters())
    assert len(machine.launches) == 1
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


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


def test_the_reference_computes_what_no_backend_serves(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with backend.registered([CupyBackend()]):
        assert backend.backend_of(DEVICES[0]) is None
        total = dataparallel.kernels.reduce_add([torch.ones(3), torch.ones(3)])
    assert total.tolist() == [2, 2, 2]
    assert not machine.launches
