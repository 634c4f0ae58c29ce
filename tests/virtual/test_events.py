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
    assert not event.query()
    event.synchronize()
    assert event.query()
    assert a.sum().item() == 8
    assert b.sum().item() == 4
    assert pending(stream) == 1


@pytest.mark.parametrize("device", ["virtual:0", "virtual:1"])
def test_a_stream_waits_for_an_event(stream: torch.Stream, device: str) -> None:
    other = torch.Stream(device)
    a = ones()
    with stream:
        a.mul_(3)
        event = torch.Event("virtual:0")
        event.record()
        a.mul_(10)
    other.wait_event(event)
    other.synchronize()
    assert a.tolist() == [3.0] * 4
    assert pending(stream) == 1


def test_recording_again_moves_the_event(stream: torch.Stream) -> None:
    other = torch.Stream("virtual:0")
    a = ones()
    event = torch.Event("virtual:0")
    assert event.query()
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
    start, end = (torch.Event("virtual:0", enable_timing=True) for _ in range(2))
    with stream:
        start.record()
        x = torch.randn(200, 200, device="virtual:0")
        _ = x @ x @ x
        end.record()
    with pytest.raises(RuntimeError, match="must be completed before calculating elapsed time"):
        start.elapsed_time(end)
    end.synchronize()
    assert start.elapsed_time(end) > 0
    with pytest.raises(RuntimeError, match=r"Event device|cannot be recorded"):
        end.record(torch.Stream("virtual:1"))
