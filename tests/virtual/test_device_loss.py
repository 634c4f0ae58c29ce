"""Devices that are lost, and work again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dataparallel import virtual

LOST = r"virtual:1 is lost"


@pytest.fixture(autouse=True)
def _all_work() -> Iterator[None]:
    yield
    virtual.restore_device()


def test_everything_fails_on_it() -> None:
    x = torch.ones(3, device="virtual:1")
    there = torch.ones(3, device="virtual:0")
    stream = torch.Stream("virtual:1")
    with stream:
        event = stream.record_event()
    virtual.lose_device("virtual:1")
    attempts: list[Callable[[], Any]] = [
        lambda: x + 1,
        lambda: x.add_(1),
        lambda: x.sum().item(),
        lambda: x[0].item(),
        lambda: x.cpu(),
        lambda: x.to("virtual:0"),
        lambda: there.to("virtual:1"),
        lambda: x.copy_(torch.zeros(3)),
        lambda: torch.empty(3, device="virtual:1"),
        lambda: torch.randn(3, device="virtual:1"),
        lambda: x.resize_(100),
        lambda: x.to_sparse(),
        lambda: torch.accelerator.synchronize("virtual:1"),
        stream.synchronize,
        stream.query,
        stream.record_event,
        event.query,
        event.synchronize,
        lambda: torch.accelerator.current_stream(0).wait_event(event),
        lambda: torch.virtual.mem_get_info(1),  # type: ignore[attr-defined]
    ]
    for attempt in attempts:
        with pytest.raises(torch.AcceleratorError, match=LOST):
            attempt()
    assert virtual.is_lost("virtual:1") and not virtual.is_lost(0)
    assert (there + 1).tolist() == [2.0] * 3
    # What is known without the device stays.
    assert x.view(1, 3).shape == (1, 3)


def test_tensors_can_be_deleted() -> None:
    x = torch.ones(3, device="virtual:1")
    virtual.lose_device(1)
    before = torch.accelerator.memory_allocated(1)
    del x
    assert torch.accelerator.memory_allocated(1) < before


def test_contents_are_gone_afterwards() -> None:
    x = torch.ones(3, device="virtual:1")
    sparse = torch.eye(3, device="virtual:1").to_sparse()
    virtual.lose_device(1)
    virtual.restore_device(1)
    new = torch.ones(3, device="virtual:1")
    assert (new + 1).tolist() == [2.0] * 3
    for attempt in (
        lambda: x + 1,
        lambda: x.fill_(2),
        lambda: x.cpu(),
        lambda: x.sum().item(),
        lambda: new.copy_(x),
        lambda: torch.stack([new, x]),
        lambda: x.resize_(100),
        lambda: sparse + sparse,
    ):
        with pytest.raises(torch.AcceleratorError, match=r"virtual:1 was lost.* Make new ones"):
            attempt()


@pytest.mark.parametrize("after", [0, 1, 3])
def test_after_some_operations(after: int) -> None:
    x, there = torch.ones(3, device="virtual:1"), torch.ones(3, device="virtual:0")
    virtual.lose_device(1, after=after)
    done = 0
    with pytest.raises(torch.AcceleratorError, match=LOST):
        for operation in (lambda: x + 1, x.cpu, lambda: x.to("virtual:0"), lambda: x.copy_(there)):
            operation()
            done += 1
    assert done == after


def test_queued_work_never_runs() -> None:
    side = torch.Stream("virtual:1")
    x = torch.ones(3, device="virtual:1")
    with side:
        (x * 2).add_(1)
    assert virtual.pending(1) == 2
    virtual.lose_device(1)
    assert virtual.pending(1) == 0
    with pytest.raises(torch.AcceleratorError, match=LOST):
        side.synchronize()
    virtual.restore_device(1)
    side.synchronize()


def test_who_waits_for_it_is_told_once() -> None:
    with virtual.strict_mode():
        x = torch.ones(3, device="virtual:1") * 2
        arrived = x.to("virtual:0")
        virtual.lose_device(1)
        with pytest.raises(torch.AcceleratorError, match=LOST):
            arrived.cpu()
        torch.accelerator.synchronize("virtual:0")
        virtual.restore_device(1)
        # What comes after has nothing to do with it.
        again = (torch.ones(3, device="virtual:1") * 2).to("virtual:0")
        assert again.cpu().tolist() == [2.0] * 3


def test_default_streams_can_stop_deferring() -> None:
    with virtual.strict_mode():
        torch.ones(3, device="virtual:1")
        virtual.lose_device(1)
    assert not virtual.is_strict()


def test_backward_fails_and_others_go_on() -> None:
    weight = torch.ones(3, device="virtual:1", requires_grad=True)
    loss = (weight * weight).sum()
    virtual.lose_device(1)
    with pytest.raises(torch.AcceleratorError, match=LOST):
        loss.backward()
    other = torch.ones(3, device="virtual:0", requires_grad=True)
    (other * other).sum().backward()
    assert other.grad is not None and other.grad.tolist() == [2.0] * 3


def test_all_devices_at_once() -> None:
    virtual.lose_device(None)
    assert all(virtual.is_lost(i) for i in range(virtual.device_count()))
    virtual.restore_device()
    assert not any(virtual.is_lost(i) for i in range(virtual.device_count()))


def test_wrong_arguments() -> None:
    wrong: Any = 1.5
    with pytest.raises(TypeError, match=r"after is a number of operations, but got 1\.5"):
        virtual.lose_device(1, after=wrong)
    with pytest.raises(TypeError, match="but got True"):
        virtual.lose_device(1, after=True)
    with pytest.raises(ValueError, match="at least 0, but got -1"):
        virtual.lose_device(1, after=-1)
    for function in (virtual.lose_device, virtual.restore_device, virtual.is_lost):
        with pytest.raises(ValueError, match="there is no device virtual:77"):
            function(77)
        with pytest.raises(ValueError, match="expected a virtual device, got cpu"):
            function("cpu")
