"""torch.accelerator and torch.virtual."""

from __future__ import annotations

import threading

import pytest
import torch

from dataparallel.virtual import device_module as virtual


def test_accelerator() -> None:
    assert torch.accelerator.is_available()
    assert torch.accelerator.device_count() == 4
    assert torch.accelerator.current_accelerator() == torch.device("virtual")
    torch.accelerator.set_device_index(2)
    assert torch.accelerator.current_device_index() == 2
    with torch.accelerator.device_index(1):
        assert torch.accelerator.current_device_index() == 1
        assert virtual.current_device() == 1
    assert torch.accelerator.current_device_index() == 2
    stream = torch.Stream("virtual:2")
    torch.accelerator.set_stream(stream)
    assert torch.accelerator.current_stream() == stream
    torch.accelerator.set_stream(virtual.default_stream(2))
    torch.accelerator.synchronize()


def test_module() -> None:
    assert torch.get_device_module("virtual") is virtual
    assert virtual.is_available()
    assert virtual.is_initialized()
    assert not virtual._is_in_bad_fork()
    assert virtual.device_count() == 4
    virtual.init()
    virtual.set_device("virtual:3")
    assert virtual.current_device() == 3
    with virtual.device("virtual:1"):
        assert torch.ones(1, device="virtual").device.index == 1
    with virtual.device_of(torch.ones(1, device="virtual:2")):
        assert virtual.current_device() == 2
    with virtual.device_of(torch.ones(1)):
        assert virtual.current_device() == 3
    assert virtual.get_device_properties(1).total_memory > 0
    assert "virtual" in virtual.get_device_name()
    assert virtual.get_device_capability() == (0, 0)
    assert virtual.can_device_access_peer(0, 1)
    assert virtual.is_bf16_supported()
    virtual.synchronize()
    virtual.synchronize("virtual:1")
    event = virtual.Event(enable_timing=True)
    event.record(virtual.Stream(1))
    assert event.query()


def test_wrong_devices() -> None:
    with pytest.raises(ValueError, match=r"cpu .* accelerator"):
        virtual.set_device("cpu")
    with pytest.raises(ValueError, match="expected a virtual device, got cpu"):
        virtual.mem_get_info("cpu")
    with pytest.raises(RuntimeError, match="there is no device virtual:4"):
        virtual.set_device(4)
    with pytest.raises(RuntimeError, match="there is no device virtual:4"):
        torch.Stream("virtual:4")


def test_each_thread_has_its_current_device_and_stream() -> None:
    virtual.set_device(1)
    stream = torch.Stream("virtual:1")
    seen = []

    def look() -> None:
        seen.append(virtual.current_device())
        seen.append(virtual.current_stream(1).stream_id)

    with stream:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert seen == [0, 0]
