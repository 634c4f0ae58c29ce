"""Events mark a position in a stream."""

from __future__ import annotations

import pytest
import torch

from dataparallel.virtual import device_module as virtual
from dataparallel.virtual import pending, strict_mode


def ones() -> torch.Tensor:
    return torch.ones(4, device="virtual:0")


def test_waiting_for_an_event_runs_only_the_work_before_it(stream: torch.Stream) -> None:
    a, b = ones(), ones()
    with stream:
        a.add_(1)
        event = stream.record_event()
        b.add_(1)
    event.synchronize()
    assert a.sum().item() == 8
    assert b.sum().item() == 4
    assert pending(stream) == 1


def test_stream_waits_for_an_event(stream: torch.Stream) -> None:
    other = torch.Stream("virtual:0")
    a = ones()
    with stream:
        a.mul_(3)
        event = torch.Event("virtual:0")
        event.record()
        a.mul_(10)
    other.wait_event(event)
    with other:
        b = a + 1
    other.synchronize()
    assert b.tolist() == [4.0] * 4
    assert pending(stream) == 1


def test_recording_again_moves_the_event(stream: torch.Stream) -> None:
    other = torch.Stream("virtual:0")
    a = ones()
    event = torch.Event("virtual:0")
    with stream:
        event.record(stream)
        a.add_(1)
    event.wait(other)
    with stream:
        event.record(stream)
    with other:
        early = a * 1
    other.synchronize()
    assert early.tolist() == [1.0] * 4
    event.wait(other)
    with other:
        late = a * 1
    other.synchronize()
    assert late.tolist() == [2.0] * 4


def test_query(stream: torch.Stream) -> None:
    event = torch.Event("virtual:0")
    assert event.query()
    with stream:
        a = ones()
        event.record()
    assert not event.query()
    event.synchronize()
    assert event.query()
    assert a.sum().item() == 4


def test_polling_an_event_ends(stream: torch.Stream) -> None:
    with stream:
        _ = ones()
        event = stream.record_event()
    assert any(event.query() for _ in range(10_000))


def test_event_on_the_eager_default_stream_is_complete() -> None:
    event = virtual.current_stream(0).record_event()
    assert event.query()
    with strict_mode():
        _ = ones()
        event.record(virtual.current_stream(0))
        assert not event.query()


def test_elapsed_time(stream: torch.Stream) -> None:
    start = torch.Event("virtual:0", enable_timing=True)
    end = torch.Event("virtual:0", enable_timing=True)
    with stream:
        start.record()
        x = torch.randn(200, 200, device="virtual:0")
        _ = x @ x @ x
        end.record()
    with pytest.raises(RuntimeError, match="must be completed before calculating elapsed time"):
        start.elapsed_time(end)
    end.synchronize()
    assert start.elapsed_time(end) > 0


def test_event_of_another_device_cannot_be_recorded(stream: torch.Stream) -> None:
    event = torch.Event("virtual:0")
    event.record(stream)
    with pytest.raises(RuntimeError, match=r"Event device|cannot be recorded"):
        event.record(torch.Stream("virtual:1"))


def test_stream_waits_for_an_event_of_another_device(stream: torch.Stream) -> None:
    other = torch.Stream("virtual:1")
    with stream:
        a = ones() + 1
        event = stream.record_event()
    other.wait_event(event)
    other.synchronize()
    assert a.sum().item() == 8
