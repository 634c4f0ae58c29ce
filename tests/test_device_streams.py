"""Streams of devices, and the null stream of the CPU."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from dataparallel import devices
from dataparallel.virtual import pending

CPU = torch.device("cpu")
VIRTUAL = [torch.device("virtual", i) for i in range(4)]
THESE_EXIST = "the devices of this machine are: virtual:0, virtual:1, virtual:2, virtual:3, cpu"


@contextlib.contextmanager
def queued(device: torch.device) -> Iterator[tuple[torch.Stream, torch.Tensor]]:
    """A stream with one operation on it that has not happened: a tensor of ones that becomes 3."""
    stream = torch.Stream(device)
    tensor = torch.ones(4, device=device)
    with stream:
        tensor.add_(2)
    assert pending(stream) == 1
    yield stream, tensor
    stream.synchronize()


def test_the_cpu_has_no_stream() -> None:
    assert devices.current_stream(CPU) is None
    assert devices.copy_stream(CPU) is None
    with devices.use_stream(None):
        assert devices.current_stream(CPU) is None
    devices.wait_stream(None, None)
    devices.record_stream(torch.ones(1), None)
    devices.synchronize(CPU)


def test_current_stream_is_this_threads() -> None:
    side = torch.Stream(VIRTUAL[1])
    default = devices.current_stream(VIRTUAL[1])
    seen: list[Any] = []
    with side:
        assert devices.current_stream(VIRTUAL[1]) == side
        thread = threading.Thread(target=lambda: seen.append(devices.current_stream(VIRTUAL[1])))
        thread.start()
        thread.join(10)
    assert seen == [default]
    assert devices.current_stream(VIRTUAL[1]) == default


def test_one_copy_stream_per_device() -> None:
    streams = [devices.copy_stream(device) for device in VIRTUAL]
    assert [stream and stream.device for stream in streams] == VIRTUAL
    for device, stream in zip(VIRTUAL, streams, strict=True):
        assert devices.copy_stream(device) is stream
        assert stream != devices.current_stream(device)


def test_threads_agree_on_the_copy_stream() -> None:
    with mock.patch.dict(devices._copy_streams, clear=True):
        barrier = threading.Barrier(8, timeout=10)
        found: list[Any] = []

        def ask() -> None:
            barrier.wait()
            found.append(devices.copy_stream(VIRTUAL[0]))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert len(found) == 8
        assert len({id(stream) for stream in found}) == 1


def test_use_stream_is_restored_and_makes_its_device_current() -> None:
    stream = torch.Stream(VIRTUAL[2])
    before = [devices.current_stream(device) for device in VIRTUAL]
    with devices.use_stream(stream):
        assert devices.current_stream(VIRTUAL[2]) == stream
        assert torch.accelerator.current_device_index() == 2
        assert devices.current_stream(VIRTUAL[1]) == before[1]
    with pytest.raises(KeyError, match="inside"), devices.use_stream(stream):
        raise KeyError("inside")
    assert [devices.current_stream(device) for device in VIRTUAL] == before
    assert torch.accelerator.current_device_index() == 0


@pytest.mark.parametrize("waiting_device", [0, 1])
def test_a_stream_waits_for_another_and_the_host_does_not(waiting_device: int) -> None:
    with queued(VIRTUAL[0]) as (awaited, tensor):
        waiting = torch.Stream(VIRTUAL[waiting_device])
        devices.wait_stream(waiting, awaited)
        assert pending(awaited) == 1
        waiting.synchronize()
        assert pending(awaited) == 0
        assert tensor.tolist() == [3.0] * 4


def test_the_awaited_stream_does_not_wait() -> None:
    with queued(VIRTUAL[0]) as (awaited, _), queued(VIRTUAL[0]) as (waiting, _):
        devices.wait_stream(waiting, awaited)
        awaited.synchronize()
        assert (pending(awaited), pending(waiting)) == (0, 1)


def test_work_queued_after_the_wait_is_not_waited_for() -> None:
    with queued(VIRTUAL[0]) as (awaited, tensor):
        waiting = torch.Stream(VIRTUAL[0])
        devices.wait_stream(waiting, awaited)
        with awaited:
            tensor.mul_(10)
        waiting.synchronize()
        assert pending(awaited) == 1


def test_the_cpu_blocks_until_a_device_is_done() -> None:
    with queued(VIRTUAL[1]) as (awaited, tensor):
        devices.wait_stream(devices.current_stream(CPU), awaited)
        assert pending(awaited) == 0
        assert tensor.tolist() == [3.0] * 4


def test_nothing_waits_for_the_cpu_or_for_itself() -> None:
    with queued(VIRTUAL[1]) as (stream, _):
        devices.wait_stream(stream, devices.current_stream(CPU))
        devices.wait_stream(stream, stream)
        assert pending(stream) == 1


def test_synchronize_runs_all_streams_of_one_device() -> None:
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(queued(VIRTUAL[index]))[0] for index in (1, 1, 2)]
        devices.synchronize(VIRTUAL[1])
        assert [pending(stream) for stream in streams] == [0, 0, 1]


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "not recorded"])
def test_memory_is_kept_for_a_recorded_stream(sparse: bool, recorded: bool) -> None:
    """Freed memory is poisoned, unless a stream that still reads it was recorded."""
    tensor = torch.ones(4, device=VIRTUAL[0])
    if sparse:
        tensor = tensor.to_sparse()
    stream = torch.Stream(VIRTUAL[0])
    with stream:
        values = tensor._values() if sparse else tensor
        result = values + 2
        del values
    if recorded:
        devices.record_stream(tensor, stream)
    del tensor
    stream.synchronize()
    assert (result.tolist() == [3.0] * 4) == recorded


def test_all_parts_of_a_sparse_tensor_are_recorded() -> None:
    stream = torch.Stream(VIRTUAL[0])
    tensor = torch.eye(3, device=VIRTUAL[0]).to_sparse()
    recorded: list[int] = []
    with mock.patch.object(
        torch.Tensor, "record_stream", lambda part, _: recorded.append(part.data_ptr())
    ):
        devices.record_stream(tensor, stream)
    assert recorded == [tensor._indices().data_ptr(), tensor._values().data_ptr()]


def test_memory_of_the_cpu_is_not_recorded() -> None:
    with mock.patch.object(torch.Tensor, "record_stream") as record:
        devices.record_stream(torch.ones(1), torch.Stream(VIRTUAL[0]))
        devices.record_stream(torch.ones(1, device=VIRTUAL[0]), devices.current_stream(CPU))
    record.assert_not_called()
