"""Streams defer: what nobody waited for has not happened."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import dataparallel.virtual
from dataparallel.virtual import device_module as virtual
from dataparallel.virtual import pending, strict_mode


def ones(device: str = "virtual:0") -> Tensor:
    return torch.ones(4, device=device)


def is_unwritten(x: Tensor) -> bool:
    """Whether reading now, without any wait, gives the poison of memory never written."""
    return bool(x.cpu().isnan().all())


def test_side_stream_defers_until_it_is_synchronized(stream: torch.Stream) -> None:
    a = ones()
    factor = torch.tensor(3.0)
    with stream:
        # A number from the host is read at submission.
        b = a * factor
        a.add_(1)
    factor.fill_(9)
    assert pending(stream) == 2
    assert is_unwritten(b)
    assert a.sum().item() == 4
    stream.synchronize()
    assert pending(stream) == 0
    assert b.sum().item() == 12
    assert a.sum().item() == 8


def test_metadata_is_known_at_submission(stream: torch.Stream) -> None:
    x = torch.randn(2, 3, 8, 8, device="virtual:0")
    conv = torch.nn.Conv2d(3, 5, 3).to("virtual:0")
    with stream:
        y = torch.relu(conv(x)).flatten(1).sum(1).long()
    assert pending(stream) == 4
    assert (y.shape, y.dtype) == ((2,), torch.int64)
    with stream:
        out = torch.empty(0, device="virtual:0")
        torch.matmul(x, x.mT, out=out)
    assert out.shape == (2, 3, 8, 8)


def test_views_neither_defer_nor_wait(stream: torch.Stream) -> None:
    a = ones()
    with stream:
        a.mul_(2)
        view = a.view(2, 2).t()[0].detach()
        assert pending(stream) == 1
    assert view.tolist() == [1, 1]
    stream.synchronize()
    assert view.tolist() == [2, 2]


def test_wait_stream(stream: torch.Stream) -> None:
    other = torch.Stream("virtual:0")
    a = ones()
    with stream:
        b = a + 1
    with other:
        other.wait_stream(stream)
        c = b + 1
    assert (pending(stream), pending(other)) == (1, 1)
    other.synchronize()
    assert c.sum().item() == 12
    assert pending(stream) == 0


def test_forgotten_wait_gives_wrong_values(stream: torch.Stream) -> None:
    other = torch.Stream("virtual:0")
    with stream:
        b = ones() + 1
    with other:
        c = b + 1
    other.synchronize()
    assert c.isnan().all()
    assert pending(stream) == 2
    # The default stream is eager: what it waits for is run.
    virtual.current_stream(0).wait_stream(stream)
    assert pending(stream) == 0
    assert (b + 1).sum().item() == 12


def test_wait_across_devices(stream: torch.Stream) -> None:
    other = torch.Stream("virtual:1")
    with stream:
        a = ones() * 5
    with other:
        other.wait_stream(stream)
        b = ones("virtual:1") * 2
    assert (pending(0), pending(1)) == (2, 2)
    torch.accelerator.synchronize(1)
    assert pending() == 0
    assert a.sum().item() == 20
    assert b.sum().item() == 8


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


def test_synchronizing_the_device_runs_all_its_streams(stream: torch.Stream) -> None:
    other, elsewhere = torch.Stream("virtual:0"), torch.Stream("virtual:1")
    for each in (stream, other, elsewhere):
        with each:
            _ = ones(f"virtual:{each.device.index}") + 1
    virtual.synchronize(0)
    assert (pending(0), pending(1)) == (0, 2)


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
    assert stream.query()
    with stream:
        a = ones() + 1
    assert not stream.query()
    assert pending(stream) == 2
    for _ in range(10_000):
        if stream.query():
            break
    assert pending(stream) == 0
    assert a.sum().item() == 8


def test_stream_contexts_restore() -> None:
    before = virtual.current_stream(1)
    stream = virtual.Stream(1)
    virtual.set_device(0)
    with stream:
        assert virtual.current_stream(1) == stream
        assert virtual.current_device() == 1
    assert virtual.current_stream(1) == before
    assert virtual.current_device() == 0
    with virtual.stream(stream):
        assert torch.accelerator.current_stream(1) == stream
    with virtual.stream(None):
        assert virtual.current_stream(1) == before
    assert virtual.default_stream(1) == before


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


def test_autograd_runs_backward_on_the_stream_of_forward(stream: torch.Stream) -> None:
    w = torch.full((4,), 3.0, device="virtual:0", requires_grad=True)
    with stream:
        loss = (w * w).sum()
        torch.autograd.backward(loss)
    # The engine makes the caller's stream wait for the streams of the leaves.
    virtual.current_stream(0).wait_stream(stream)
    assert w.grad is not None
    assert w.grad.tolist() == [6.0] * 4


# Torch's advice about speed; the result is right.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
def test_backward_of_work_on_two_streams(stream: torch.Stream) -> None:
    for strict in (False, True):
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


def test_the_default_stream_defers_in_strict_mode(stream: torch.Stream) -> None:
    with strict_mode():
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
        assert pending() > 0
        assert there.tolist() == [3.0] * 4


def test_leaving_strict_mode_runs_the_default_streams() -> None:
    with strict_mode():
        a = ones("virtual:2") + 1
        assert pending(2) == 2
    assert pending(2) == 0
    assert a.sum().item() == 8
    assert not dataparallel.virtual.is_strict()


def test_pending_refuses_other_devices() -> None:
    with pytest.raises(ValueError, match="expected a virtual device, got cpu"):
        pending("cpu")
    with pytest.raises(ValueError, match="no device virtual:8: 4 are enabled"):
        pending(8)
