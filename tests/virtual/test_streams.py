"""Streams defer: what nobody waited for has not happened. Events mark a position in a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import dataparallel.virtual
from dataparallel.virtual import check_races, pending, strict_mode
from dataparallel.virtual import device_module as virtual


@pytest.fixture(autouse=True)
def _races_are_allowed() -> Iterator[None]:
    """Allow races: reads that come too early show when something runs."""
    with check_races(False):
        yield


def ones(device: str = "virtual:0") -> Tensor:
    return torch.ones(4, device=device)


def is_unwritten(x: Tensor) -> bool:
    """True if reading now, without any wait, gives the poison of memory never written."""
    return bool(x.cpu().isnan().all())


# --- what defers ---------------------------------------------------------------------------------


def test_side_stream_defers_until_it_is_synchronized(stream: torch.Stream) -> None:
    a = ones()
    factor = torch.tensor(3.0)
    with stream:
        # A number from the host is read at submission.
        b = a * factor
        a.add_(1)
        view = a.view(2, 2).t()[0].detach()
    factor.fill_(9)
    # Views neither defer nor wait.
    assert pending(stream) == 2
    assert is_unwritten(b)
    assert (a.tolist(), view.tolist()) == ([1] * 4, [1, 1])
    stream.synchronize()
    assert pending(stream) == 0
    assert b.tolist() == [3] * 4
    assert (a.tolist(), view.tolist()) == ([2] * 4, [2, 2])


def test_metadata_is_known_at_submission(stream: torch.Stream) -> None:
    x = torch.randn(2, 3, 8, 8, device="virtual:0")
    conv = torch.nn.Conv2d(3, 5, 3).to("virtual:0")
    with stream:
        y = torch.relu(conv(x)).flatten(1).sum(1).long()
        out = torch.empty(0, device="virtual:0")
        torch.matmul(x, x.mT, out=out)
    assert pending(stream) == 5
    assert (y.shape, y.dtype, out.shape) == ((2,), torch.int64, (2, 3, 8, 8))


READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda b: b[0].item(),
    "cpu": lambda b: b.cpu(),
    "nonzero": lambda b: b.nonzero(),
    "masked": lambda b: b[b > 1],
    "equal": lambda b: torch.equal(b, b + 0),
    "tolist": lambda b: b.tolist(),
}


@pytest.mark.parametrize("read", READS)
def test_host_reads_drain_their_own_stream_only(stream: torch.Stream, read: str) -> None:
    other = torch.Stream("virtual:0")
    a = ones()
    with other:
        _ = ones() + 1
    with stream:
        b = a * 2
        READS[read](b)
    assert pending(stream) == 0
    assert b.tolist() == [2] * 4
    assert pending(other) == 2


def test_random_numbers_come_in_order_of_submission(stream: torch.Stream) -> None:
    torch.manual_seed(3)
    wanted = [torch.rand(4, device="virtual:0").cpu() for _ in range(3)]
    torch.manual_seed(3)
    with stream:
        first = torch.rand(4, device="virtual:0")
    second = torch.rand(4, device="virtual:0")
    with stream:
        third = torch.rand(4, device="virtual:0")
    assert is_unwritten(first)
    stream.synchronize()
    for value, expected in zip((first, second, third), wanted, strict=True):
        assert torch.equal(value.cpu(), expected)


def test_errors_about_shapes_come_at_once_and_those_about_values_later(
    stream: torch.Stream,
) -> None:
    table, index = torch.ones(3, 2, device="virtual:0"), torch.tensor([7], device="virtual:0")
    with stream:
        with pytest.raises(RuntimeError, match="must match the size of tensor b"):
            ones() + torch.ones(3, device="virtual:0")
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
            table @ table
        bad = table.index_select(0, index)
        good = table + 1
    with pytest.raises(IndexError, match=r"(?s)out of range.*aten::index_select.*virtual:0"):
        stream.synchronize()
    stream.synchronize()
    assert good.sum().item() == 12
    assert bad.shape == (1, 2)


def test_default_streams_defer_in_strict_mode_alone(stream: torch.Stream) -> None:
    with strict_mode(), check_races(False):
        a = ones()
        with stream:
            wrong = a * 2
        stream.synchronize()
        assert is_unwritten(wrong)
        stream.wait_stream(virtual.current_stream(0))
        with stream:
            right = a * 2
        stream.synchronize()
        assert right.cpu().tolist() == [2] * 4
        there = right.to("virtual:1") + 1
        assert there.tolist() == [3.0] * 4
        left = ones("virtual:2") + 1
        assert pending(2) == 2
    # The thread that leaves strict mode runs them.
    assert pending() == 0
    assert left.sum().item() == 8
    assert not dataparallel.virtual.is_strict()


# --- waiting -------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["virtual:0", "virtual:1"])
@pytest.mark.parametrize("how", ["stream", "event", "nothing"])
def test_one_stream_waits_for_another(stream: torch.Stream, device: str, how: str) -> None:
    other = torch.Stream(device)
    a = ones()
    with stream:
        a.mul_(3)
        event = torch.Event("virtual:0")
        event.record()
        later = a * 10
    with other:
        if how == "stream":
            other.wait_stream(stream)
        elif how == "event":
            other.wait_event(event)
        b = ones(device) + 1
    # Waits and events do not count.
    assert (pending(stream), pending(other)) == (2, 2)
    other.synchronize()
    assert b.sum().item() == 8
    assert pending(stream) == {"stream": 0, "event": 1, "nothing": 2}[how]
    assert a.tolist() == [1.0 if how == "nothing" else 3.0] * 4
    assert is_unwritten(later) == (how != "stream")


def test_an_eager_stream_waits_at_once(stream: torch.Stream) -> None:
    with stream:
        b = ones() + 1
    assert is_unwritten(b * 1)
    virtual.current_stream(0).wait_stream(stream)
    assert pending(stream) == 0
    assert (b + 1).sum().item() == 12
    event = virtual.current_stream(0).record_event()
    assert event.query()
    with strict_mode():
        _ = ones()
        event.record(virtual.current_stream(0))
        assert not event.query()


def test_synchronizing_the_device_runs_all_its_streams(stream: torch.Stream) -> None:
    other, elsewhere = torch.Stream("virtual:0"), torch.Stream("virtual:1")
    for each in (stream, other, elsewhere):
        with each:
            _ = ones(f"virtual:{each.device.index}") + 1
    virtual.synchronize(0)
    assert (pending(0), pending(1), pending()) == (0, 2, 2)


def test_long_chain_of_waits_in_turn(stream: torch.Stream) -> None:
    other = torch.Stream("virtual:0")
    a = torch.zeros(1, device="virtual:0")
    for _ in range(3000):
        with stream:
            stream.wait_stream(other)
            a.add_(1)
        with other:
            other.wait_stream(stream)
            a.add_(1)
    stream.synchronize()
    other.synchronize()
    assert a.item() == 6000


def test_query_is_false_while_pending_and_polling_ends(stream: torch.Stream) -> None:
    assert stream.query() and torch.Event("virtual:0").query()
    with stream:
        a = ones() + 1
        event = stream.record_event()
        b = a + 1
    for each, left in ((event, 1), (stream, 0)):
        assert not each.query()
        assert any(each.query() for _ in range(10_000))
        assert pending(stream) == left
    assert b.sum().item() == 12


def test_waiting_for_an_event_runs_only_the_work_before_it(stream: torch.Stream) -> None:
    a, b = ones(), ones()
    with stream:
        a.add_(1)
        event = stream.record_event()
        b.add_(1)
    assert not event.query()
    event.synchronize()
    assert event.query()
    assert (a.sum().item(), b.sum().item(), pending(stream)) == (8, 4, 1)


def test_recording_again_moves_the_event(stream: torch.Stream) -> None:
    other = torch.Stream("virtual:0")
    a = ones()
    event = torch.Event("virtual:0")
    found = []
    for add in (1, 0):
        with stream:
            event.record(stream)
            a.add_(add)
        event.wait(other)
        with other:
            found.append(a * 1)
        other.synchronize()
    assert [each.tolist() for each in found] == [[1.0] * 4, [2.0] * 4]


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


# Torch's advice about speed; the result is right.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@pytest.mark.parametrize("strict", [False, True])
def test_backward_of_work_on_two_streams(stream: torch.Stream, strict: bool) -> None:
    with strict_mode(strict):
        current = virtual.current_stream(0)
        w = torch.full((4,), 3.0, device="virtual:0", requires_grad=True)
        stream.wait_stream(current)
        with stream:
            a = w * 2
        current.wait_stream(stream)
        torch.autograd.backward((a * w).sum())
        assert w.grad is not None
        assert w.grad.tolist() == [12.0] * 4


# --- copies --------------------------------------------------------------------------------------


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


def test_copies_wait_if_they_are_blocking(stream: torch.Stream) -> None:
    target = torch.zeros(4, pin_memory=True)
    with stream:
        a = torch.ones(4).pin_memory().to("virtual:0")
        assert pending(stream) == 0
        assert (a * 2).to("cpu").tolist() == [2.0] * 4
        target.copy_(a * 5, non_blocking=True)
    assert pending(stream) == 2
    assert target.tolist() == [0.0] * 4
    stream.synchronize()
    assert target.tolist() == [5.0] * 4


def test_copy_between_devices_orders_both_streams() -> None:
    source, target = torch.Stream("virtual:0"), torch.Stream("virtual:1")
    with source, target:
        a = ones() * 2
        b = ones("virtual:1") + 1
        read_before = b + 1
        b.copy_(a)
        c = b * 10
    assert pending(source) > 0
    assert pending(target) > 0
    target.synchronize()
    assert c.tolist() == [20.0] * 4
    assert read_before.tolist() == [3.0] * 4
    assert pending(source) == 0


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


def test_pinned_memory() -> None:
    x = torch.arange(4.0)
    assert not x.is_pinned()
    y = x.pin_memory()
    assert y.is_pinned() and y[2:].is_pinned()
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert torch.equal(x, y)
    assert y.pin_memory() is y
    with pytest.raises(RuntimeError, match=r"[Oo]nly dense CPU tensors can be pinned"):
        torch.empty(3, device="virtual:0", pin_memory=True)
    data = torch.utils.data.TensorDataset(x)
    for (batch,) in torch.utils.data.DataLoader(data, batch_size=2, pin_memory=True):
        assert batch.is_pinned()
        assert batch.to("virtual:0", non_blocking=True).sum().item() == batch.sum().item()
