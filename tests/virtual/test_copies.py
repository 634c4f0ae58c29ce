"""Copies between host and devices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dataparallel.virtual import counters, pending, reset_counters


def test_counters() -> None:
    x = torch.ones(8)
    reset_counters()
    a = x.to("virtual:0")
    b = a.to("virtual:1")
    _ = b.clone()
    b.cpu()
    seen = counters()
    assert (seen["copies_host_to_device"], seen["bytes_host_to_device"]) == (1, 32)
    assert (seen["copies_device_to_device"], seen["bytes_device_to_device"]) == (1, 32)
    assert (seen["copies_device_to_host"], seen["bytes_device_to_host"]) == (1, 32)
    assert (seen["kernels"], seen["allocations"], seen["allocated_bytes"]) == (1, 3, 96)
    assert seen["host_waits"] == 2
    assert counters("virtual:0")["copies_device_to_device"] == 1
    assert counters(1)["kernels"] == 1
    reset_counters(0)
    assert counters(0)["allocations"] == 0
    assert counters(1)["allocations"] == 2


def test_waits_of_the_host_are_counted() -> None:
    device = torch.device("virtual:0")
    x = torch.ones(8, device=device)
    pinned = torch.zeros(8).pin_memory()
    event = torch.Event(device)
    waits: dict[str, Callable[[], object]] = {
        "item": lambda: x.sum().item(),
        "to the host": lambda: x.cpu(),
        "from the host": lambda: x.copy_(pinned),
        "device": lambda: torch.accelerator.synchronize(device),
        "stream": lambda: torch.accelerator.current_stream(device).synchronize(),
        "event": event.synchronize,
    }
    event.record()
    for name, wait in waits.items():
        reset_counters()
        wait()
        assert (counters(0)["host_waits"], counters(1)["host_waits"]) == (1, 0), name
    reset_counters()
    x.mul_(2).sum()
    pinned.copy_(x, non_blocking=True)
    x.copy_(pinned, non_blocking=True)
    x.to("virtual:1")
    torch.Stream(device).wait_event(event)
    assert counters()["host_waits"] == 0


def test_conversion_broadcast_and_strides() -> None:
    x = torch.arange(6).view(2, 3)
    y = torch.zeros(3, 2, 3, device="virtual:0")
    y.copy_(x)
    torch.testing.assert_close(y.cpu(), x.float().expand(3, 2, 3))
    z = torch.zeros(3, 2, dtype=torch.float64).t()
    z.copy_(y[0])
    torch.testing.assert_close(z, x.double())
    y[:, 0].t().copy_(torch.full((3, 1), 7))
    assert (y.cpu()[:, 0] == 7).all()
    with pytest.raises(RuntimeError, match="cannot be broadcast"):
        y.copy_(torch.ones(4))


@pytest.mark.parametrize("pinned", [False, True])
def test_a_source_on_the_host_is_read_when_its_kind_says(
    stream: torch.Stream, pinned: bool
) -> None:
    host = torch.ones(4).pin_memory() if pinned else torch.ones(4)
    with stream:
        a = host.to("virtual:0", non_blocking=True)
    assert pending(stream) == 1
    host.fill_(9)
    # Pinned memory may be dropped, too.
    del host
    junk = [torch.full((4,), 8.0).pin_memory() for _ in range(20)]
    stream.synchronize()
    assert a.tolist() == [9.0 if pinned else 1.0] * 4
    assert len(junk) == 20


def test_blocking_copies_wait(stream: torch.Stream) -> None:
    host = torch.ones(4).pin_memory()
    with stream:
        a = host.to("virtual:0")
        assert pending(stream) == 0
        b = a * 2
        assert b.to("cpu").tolist() == [2.0] * 4
    assert pending(stream) == 0


def test_copy_to_the_host_defers_when_not_blocking(stream: torch.Stream) -> None:
    target = torch.zeros(4, pin_memory=True)
    with stream:
        a = torch.ones(4, device="virtual:0") * 5
        target.copy_(a, non_blocking=True)
    assert target.tolist() == [0.0] * 4
    stream.synchronize()
    assert target.tolist() == [5.0] * 4


def test_copy_between_devices_orders_both_streams() -> None:
    source, target = torch.Stream("virtual:0"), torch.Stream("virtual:1")
    with source, target:
        a = torch.ones(4, device="virtual:0") * 2
        b = torch.zeros(4, device="virtual:1") + 1
        read_before = b + 1
        b.copy_(a)
        c = b * 10
    assert pending(source) > 0
    assert pending(target) > 0
    target.synchronize()
    assert c.tolist() == [20.0] * 4
    assert read_before.tolist() == [2.0] * 4
    assert pending(source) == 0


def test_pinned_memory() -> None:
    x = torch.arange(4.0)
    assert not x.is_pinned()
    y = x.pin_memory()
    assert y.is_pinned()
    assert y[2:].is_pinned()
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert torch.equal(x, y)
    assert y.pin_memory() is y
    with pytest.raises(RuntimeError, match=r"[Oo]nly dense CPU tensors can be pinned"):
        torch.empty(3, device="virtual:0", pin_memory=True)


def test_loader_pins_its_batches() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(6.0))
    loader = torch.utils.data.DataLoader(data, batch_size=3, pin_memory=True)
    for (batch,) in loader:
        assert batch.is_pinned()
        assert batch.to("virtual:0", non_blocking=True).sum().item() == batch.sum().item()
