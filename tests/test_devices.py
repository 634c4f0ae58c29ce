"""Device lists, streams and shares of threads; the four virtual devices are the accelerators."""

from __future__ import annotations

import logging
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import dataparallel as dp
from dataparallel import devices, virtual

CPU = torch.device("cpu")
VIRTUAL = [torch.device("virtual", i) for i in range(4)]
THESE_EXIST = "the devices of this machine are: virtual:0, virtual:1, virtual:2, virtual:3, cpu"


# --- which devices there are -----------------------------------------------------------------


@pytest.mark.usefixtures("no_accelerator")
def test_without_accelerators_there_is_one_cpu_slot() -> None:
    assert devices.accelerators() == ()
    assert devices.parse_devices(None) == (CPU,)
    with pytest.raises(ValueError, match=r'this machine has none: .* device_ids=\["cpu", "cpu"\]'):
        devices.parse_devices([0, 1])
    with pytest.raises(ValueError, match=r"the devices of this machine are: cpu; of"):
        devices.parse_device("nonsense")


def test_a_type_without_index_is_the_current_device() -> None:
    for spec in ("virtual", torch.device("virtual")):
        assert devices.parse_device(spec) == VIRTUAL[0]
        with devices.use_device(VIRTUAL[3]):
            assert devices.parse_device(spec) == VIRTUAL[3]


def test_lists_of_devices() -> None:
    assert devices.accelerators() == devices.parse_devices(None) == tuple(VIRTUAL)
    slots = devices.parse_devices([2, "cpu:0", "virtual:2", torch.device("virtual:0"), 2])
    assert slots == (VIRTUAL[2], CPU, VIRTUAL[2], VIRTUAL[0], VIRTUAL[2])
    assert slots[1].index is None
    assert devices.parse_devices(range(2)) == tuple(VIRTUAL[:2])
    for spec, device in ((None, VIRTUAL[3]), (-1, CPU), (1, VIRTUAL[1]), ("cpu", CPU)):
        assert devices.parse_output_device(spec, VIRTUAL[3]) == device


@pytest.mark.parametrize(
    ("spec", "error", "match"),
    [
        *[
            (spec, ValueError, f"^device {re.escape(repr(spec))} does not exist; {THESE_EXIST}$")
            for spec in (4, -1, "virtual:4", torch.device("virtual", 9), "cuda:77")
        ],
        *[
            (spec, ValueError, f"^{re.escape(repr(spec))} is not a device: .*; {THESE_EXIST}$")
            for spec in ("nonsense", "", "virtual:-1", "virtual:x", "opengl:0", "meta")
        ],
        *[
            (spec, TypeError, f"a str or a torch.device, but got .* {type(spec).__name__}$")
            for spec in (True, 1.0, None, [0], torch.tensor(0))
        ],
    ],
)
def test_what_is_no_device(spec: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        devices.parse_device(spec)
    with pytest.raises(error, match=match):
        devices.parse_devices([0, spec])
    if spec not in (-1, None):
        with pytest.raises(error, match=match):
            devices.parse_output_device(spec, CPU)


def test_what_is_no_list_of_devices() -> None:
    for spec in ("cpu", 2, torch.device("cpu"), 1.5):
        message = f"but got {spec!r}; write [{spec!r}] for one device, range(n) for n of them, "
        with pytest.raises(TypeError, match=re.escape(message)):
            devices.parse_devices(spec)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"device_ids is empty, .*{THESE_EXIST}$"):
        devices.parse_devices([])


# --- what differs between device types -------------------------------------------------------


@given(threads=st.integers(1, 64), slots=st.lists(st.sampled_from([CPU, *VIRTUAL]), max_size=9))
def test_shares_use_all_threads_and_starve_no_slot(threads: int, slots: list[torch.device]) -> None:
    shares = devices.intra_op_shares(tuple(slots), threads)
    pairs = list(zip(shares, slots, strict=True))
    on_cpu = [share for share, device in pairs if device == CPU]
    assert all(share == threads for share, device in pairs if device != CPU)
    assert sum(on_cpu) == (max(threads, len(on_cpu)) if on_cpu else 0)
    assert on_cpu == sorted(on_cpu, reverse=True)
    assert not on_cpu or on_cpu[0] - on_cpu[-1] <= 1


# --- streams ---------------------------------------------------------------------------------


@pytest.mark.parametrize("recorded", [True, False])
def test_memory_is_kept_for_a_recorded_stream(recorded: bool) -> None:
    """Freed memory is poisoned, unless a stream that still reads it was recorded."""
    with virtual.check_races(recorded):
        tensor, stream = torch.ones(4, device=VIRTUAL[0]), torch.Stream(VIRTUAL[0])
        devices.wait_stream(stream, devices.current_stream(VIRTUAL[0]))
        with stream:
            result = tensor + 2
        if recorded:
            devices.record_stream(tensor, stream)
        del tensor
        stream.synchronize()
        assert (result.tolist() == [3.0] * 4) == recorded


def test_threads_within_one_stream_leave_it_as_they_came() -> None:
    shared = devices.copy_stream(VIRTUAL[0])
    assert shared is not None
    # The first thread to come is the first to go.
    both_inside, first_is_out = threading.Barrier(2), threading.Event()
    first_is_in = threading.Event()

    def work(index: int) -> bool:
        own = torch.Stream(VIRTUAL[0])
        with devices.use_device(VIRTUAL[1]):
            torch.accelerator.set_stream(own)
            torch.accelerator.set_device_index(1)
            if index:
                first_is_in.wait(10)
            with devices.use_stream(shared):
                first_is_in.set()
                both_inside.wait(10)
                if index:
                    first_is_out.wait(10)
                assert devices.current_stream(VIRTUAL[0]) == shared
            came_back = devices.current_stream(VIRTUAL[0]) == own
            first_is_out.set()
            return came_back and torch.accelerator.current_device_index() == 1

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2))) == [True, True]


def test_a_copy_on_its_way_to_the_host_is_there_after_its_event() -> None:
    with virtual.strict_mode():
        copy, event = devices.to_host_later(torch.ones(4, device=VIRTUAL[1]) * 3)
        # While nobody waits for it, the copy does not happen.
        event.synchronize()
        assert copy.tolist() == [3.0] * 4


def test_a_device_is_capturing_whichever_is_current() -> None:
    with devices.recording(torch.Stream(VIRTUAL[1]), object()), devices.use_device(VIRTUAL[0]):
        assert list(map(devices.is_capturing, VIRTUAL[:2])) == [False, True]
    assert not devices.is_capturing(VIRTUAL[1])


def test_what_is_recorded() -> None:
    stream = torch.Stream(VIRTUAL[0])
    sparse = torch.eye(3, device=VIRTUAL[0]).to_sparse()
    recorded: list[int] = []
    with mock.patch.object(
        torch.Tensor, "record_stream", lambda part, _: recorded.append(part.data_ptr())
    ):
        devices.record_stream(sparse, stream)
        devices.record_stream(torch.ones(1), stream)
        devices.record_stream(sparse, devices.current_stream(CPU))
    assert recorded == [sparse._indices().data_ptr(), sparse._values().data_ptr()]


# --- devices that are not alike, or of no use ------------------------------------------------


def _properties(**attributes: list[float]) -> Any:
    """Give each virtual device properties of its own."""

    def get(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(
            name=f"GPU {device.index}", **{k: v[device.index] for k, v in attributes.items()}
        )

    return mock.patch.object(torch.get_device_module("virtual"), "get_device_properties", get)


@pytest.mark.parametrize(
    ("memory", "processors", "told"),
    [
        ([24, 24, 24], [80, 80, 80], ""),
        ([24, 18, 24], [80, 60, 80], ""),
        ([24, 24, 17], [80, 80, 80], "virtual:2 has 17 GiB of memory, virtual:0 has 24."),
        ([24, 24, 24], [59, 80, 80], "virtual:0 has 59 multiprocessors, virtual:1 has 80."),
    ],
)
def test_devices_that_differ_by_a_quarter_are_named(
    memory: list[float], processors: list[float], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = [size * 2**30 for size in memory]
    with _properties(total_memory=sizes, multi_processor_count=processors):
        with caplog.at_level(logging.WARNING, "dataparallel"):
            dp.DataParallel(nn.Linear(2, 2), VIRTUAL[:3])
        dp.DataParallel(nn.Linear(2, 2), ["cpu", "cpu"])
    assert told in caplog.text
    assert bool(caplog.records) == bool(told)


def test_a_device_without_streams_is_refused() -> None:
    with mock.patch.object(torch.mps, "device_count", return_value=1):
        for slots in (["mps"], ["mps", "mps"], [torch.device("mps", 0)]):
            with pytest.raises(ValueError, match=r"replicas cannot be on .*mps.* no streams"):
                dp.DataParallel(nn.Linear(2, 2), slots)
        with mock.patch.object(
            torch.accelerator, "current_accelerator", return_value=torch.device("mps")
        ):
            assert devices.accelerators() == ()
            assert devices.parse_devices(None) == (torch.device("cpu"),)


@pytest.mark.parametrize(
    ("capabilities", "built_for", "taken"),
    [
        ([(8, 0), (9, 0)], "sm_80 sm_90", [0, 1]),
        ([(8, 6), (8, 9)], "sm_80", [0, 1]),
        ([(8, 0), (7, 5)], "sm_80 sm_90", [0]),
        ([(8, 6), (8, 0)], "sm_86", [0]),
        ([(8, 0), (12, 0)], "sm_80 sm_90", [0]),
        ([(8, 0), (12, 0)], "sm_80 compute_90", [0, 1]),
        ([(9, 0), (10, 0)], "sm_90a compute_90a", [0]),
        ([(10, 3), (10, 0), (6, 1)], "sm_100", [0, 1]),
        # Torch's own errors tell more.
        ([(5, 0), (5, 0)], "sm_80", [0, 1]),
        ([(5, 0), (8, 0)], "", [0, 1]),
    ],
)
def test_all_devices_are_those_that_torch_has_kernels_for(
    capabilities: list[tuple[int, int]],
    built_for: str,
    taken: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    there = tuple(torch.device("cuda", index) for index in range(len(capabilities)))
    with (
        mock.patch.object(devices, "accelerators", return_value=there),
        mock.patch.object(torch.cuda, "get_device_capability", lambda one: capabilities[one.index]),
        mock.patch.object(torch.cuda, "get_arch_list", built_for.split),
        mock.patch.object(
            torch.cuda,
            "get_device_properties",
            lambda one: SimpleNamespace(name=f"GPU {one.index}"),
        ),
        caplog.at_level(logging.WARNING, "dataparallel"),
    ):
        for cached in (devices.lacks_kernels, devices._tell_of_lacking):
            cached.cache_clear()
        try:
            for _ in range(2):
                assert [device.index for device in devices.parse_devices(None)] == taken
        finally:
            devices.lacks_kernels.cache_clear()
    left_out = [f"cuda:{i} (GPU {i})" for i in range(len(there)) if i not in taken]
    assert len(caplog.records) == bool(left_out)
    assert all(name in caplog.text for name in left_out)
