"""Two uses of memory that nothing orders raise, although everything goes well here."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dataparallel import virtual as virtual_devices
from dataparallel.virtual import check_races, checks_races, strict_mode
from dataparallel.virtual import device_module as virtual
from tests.virtual.oracle import run_python

RACE = r"^race on virtual:\d: nothing orders two uses of the same memory"


@pytest.fixture(autouse=True)
def _checked() -> Iterator[None]:
    with check_races():
        yield
    for index in range(4):
        virtual.synchronize(index)


def ones(device: str = "virtual:0") -> Tensor:
    return torch.ones(4, 4, device=device)


def default() -> torch.Stream:
    return virtual.default_stream(0)


# --- what is a race ------------------------------------------------------------------------------

USES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Any]]] = {
    "write, read": (lambda x: x.add_(1), lambda x: x * 2),
    "read, write": (lambda x: x * 2, lambda x: x.add_(1)),
    "write, write": (lambda x: x.fill_(3), lambda x: x.zero_()),
    "copied to another device": (lambda x: x.add_(1), lambda x: x.to("virtual:1")),
    "copied from another device": (lambda x: x * 2, lambda x: x.copy_(ones("virtual:1"))),
    "copied to the host": (lambda x: x.add_(1), lambda x: x.cpu()),
    "copied from the host": (lambda x: x * 2, lambda x: x.copy_(torch.zeros(4, 4))),
    "read by the host": (lambda x: x.add_(1), lambda x: x[0, 0].item()),
    "an argument of many": (lambda x: x.add_(1), lambda x: torch._foreach_mul([ones(), x], 2)),
    "written as an output": (lambda x: x * 2, lambda x: torch.add(ones(), 1, out=x)),
    "overlapping views": (lambda x: x[1:].add_(1), lambda x: x[:, 1] + 1),
    "values of a sparse tensor": (
        lambda x: x.add_(1),
        lambda x: sparse(x) * 2,
    ),
}


def sparse(values: Tensor) -> Tensor:
    places = torch.arange(4)[None].to(values.device)
    return torch.sparse_coo_tensor(places, values, (4, 4), check_invariants=False)


@pytest.mark.parametrize("uses", USES)
@pytest.mark.parametrize("strict", [False, True])
def test_uses_on_two_streams_race(stream: torch.Stream, uses: str, strict: bool) -> None:
    first, second = USES[uses]
    with strict_mode(strict), check_races():
        x = ones()
        virtual.synchronize(0)
        first(x)
        with stream, pytest.raises(RuntimeError, match=RACE):
            second(x)
        virtual.synchronize(0)
        with stream:
            second(x)
        virtual.synchronize(0)
        virtual.synchronize(1)


def test_message_tells_both_places_and_the_remedy(stream: torch.Stream) -> None:
    def compute(x: Tensor) -> Tensor:
        return x.add_(1)

    x = compute(ones())
    with stream, pytest.raises(RuntimeError, match=RACE) as error:
        x.mul(2)
    number, here = stream.stream_id, re.escape(__file__)
    assert re.search(
        rf"(?s)first: aten::add_\.Tensor writes Float \[4, 4\] on the default stream of virtual:0"
        rf"\n      {here}:\d+ in compute\n.* in test_message.*"
        rf"then:  aten::mul\.Tensor reads Float \[4, 4\] on stream {number} of virtual:0"
        rf"\n      {here}:\d+ in test_message.*"
        rf"Let stream {number} of virtual:0 wait for the default stream of virtual:0",
        str(error.value),
    )
    virtual.synchronize(0)


ORDERED: dict[str, Callable[[torch.Stream], object]] = {
    "wait_stream": lambda stream: stream.wait_stream(default()),
    "wait_event": lambda stream: stream.wait_event(default().record_event()),
    "a stream between": lambda stream: via_another(stream),
    "host waits for stream": lambda _: default().synchronize(),
    "host waits for device": lambda _: virtual.synchronize(0),
    "host waits for event": lambda _: default().record_event().synchronize(),
    "event has happened": lambda _: poll(default().record_event()),
    "stream is idle": lambda _: poll(default()),
    "item": lambda _: ones().sum().item(),
    "copy to the host": lambda _: ones().cpu(),
    "size depends on values": lambda _: ones().nonzero(),
    "host waits in another thread": lambda _: in_thread(default().synchronize),
}


def via_another(stream: torch.Stream) -> None:
    other = torch.Stream("virtual:1")
    other.wait_stream(default())
    stream.wait_stream(other)


def poll(what: Any) -> None:
    while not what.query():
        pass


def in_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


@pytest.mark.parametrize("how", ORDERED)
@pytest.mark.parametrize("strict", [False, True])
def test_what_is_ordered_is_no_race(stream: torch.Stream, how: str, strict: bool) -> None:
    with strict_mode(strict), check_races():
        x = ones()
        x.add_(1)
        ORDERED[how](stream)
        with stream:
            y = x * 2
        default().wait_stream(stream)
        assert y.sum().item() == 64


def test_an_event_covers_what_came_before_it_alone(stream: torch.Stream) -> None:
    x, y = ones(), ones()
    event = default().record_event()
    y.add_(1)
    stream.wait_event(event)
    with stream:
        x.add_(1)
        with pytest.raises(RuntimeError, match=RACE):
            y.add_(1)
    virtual.synchronize(0)


@pytest.mark.parametrize(
    "second",
    [
        lambda x: x[:2].add_(1),
        lambda x: x[:, 1].add_(1),
        lambda x: x.view(-1)[9::4].add_(1),
        lambda x: x.new_empty(3),
        lambda x: torch.zeros_like(x),
        lambda x: x.new_zeros(2),
        lambda x: x.detach().resize_(2, 2),
        lambda x: x.is_set_to(x),
        lambda x: x.detach().view(-1),
    ],
)
def test_other_parts_of_memory_and_its_shape_do_not_race(
    stream: torch.Stream, second: Callable[[Tensor], Tensor]
) -> None:
    x = ones()
    virtual.synchronize(0)
    x[2:, 2:].add_(1)
    x.view(-1)[8::4].add_(1)
    with stream:
        second(x)
    virtual.synchronize(0)


def test_readers_and_indexed_writes_do_not_race_with_each_other(stream: torch.Stream) -> None:
    x, i, j = ones(), torch.tensor([0]).to("virtual:0"), torch.tensor([1]).to("virtual:0")
    virtual.synchronize(0)
    y = x * 2
    with stream:
        z = x * 3
    virtual.synchronize(0)
    x.index_add_(0, i, y[:1])
    with stream:
        x.index_add_(0, j, z[:1])
        with pytest.raises(RuntimeError, match=RACE):
            x.sum()
    virtual.synchronize(0)


# --- memory that is freed ------------------------------------------------------------------------

FREED = (
    r"(?s)^race on virtual:0: memory was freed.*first: aten::mul.*freed: .*test_races\.py.*"
    r"call tensor\.record_stream\(stream\)"
)


@pytest.mark.parametrize(
    "how", ["nothing", "recorded", "behind the recorded", "awaited", "awaited late"]
)
def test_memory_freed_while_a_stream_uses_it(stream: torch.Stream, how: str) -> None:
    x = ones()
    stream.wait_stream(default())
    with stream:
        x * 2
    if how == "recorded":
        x.record_stream(stream)
    if how == "behind the recorded":
        other = torch.Stream("virtual:0")
        other.wait_stream(stream)
        x.record_stream(other)
    if how == "awaited":
        default().wait_stream(stream)
    del x
    if how not in ("nothing", "awaited late"):
        ones()
    else:
        if how == "awaited late":
            default().wait_stream(stream)
        with pytest.raises(RuntimeError, match=FREED):
            ones()
        # Once is enough.
        ones()
    virtual.synchronize(0)


def free_too_early(stream: torch.Stream) -> None:
    """Nothing is launched afterwards on the stream that owns the memory."""
    x = ones()
    stream.wait_stream(default())
    with stream:
        x * 2


TOLD: dict[str, Callable[[torch.Stream], object]] = {
    "launch on the same stream": lambda stream: launch_on(stream),
    "launch on another device": lambda _: ones("virtual:1"),
    "wait for the stream": lambda stream: stream.synchronize(),
    "wait for the device": lambda _: virtual.synchronize(0),
    "wait for an event": lambda stream: stream.record_event().synchronize(),
    "wait for another device": lambda _: virtual.synchronize(1),
}


def launch_on(stream: torch.Stream) -> None:
    with stream:
        torch.zeros(3, device="virtual:0")


@pytest.mark.parametrize("how", TOLD)
@pytest.mark.parametrize("strict", [False, True])
def test_early_free_is_told_wherever_the_program_goes_on(
    stream: torch.Stream, how: str, strict: bool
) -> None:
    with strict_mode(strict), check_races():
        free_too_early(stream)
        with pytest.raises(RuntimeError, match=FREED):
            TOLD[how](stream)
        virtual_devices.set_check_races(True)
        TOLD["wait for the device"](stream)


def test_early_free_is_told_at_the_end_of_a_block_and_of_the_process(stream: torch.Stream) -> None:
    with check_races(False), pytest.raises(RuntimeError, match=FREED), check_races():
        free_too_early(stream)
    ended = run_python(
        """
        import torch, dataparallel.virtual
        dataparallel.virtual.enable(1, races=True)
        x, stream = torch.ones(3, device="virtual:0"), torch.Stream("virtual:0")
        stream.wait_stream(torch.virtual.current_stream())
        with stream:
            x * 2
        del x
        """
    )
    assert "race on virtual:0: memory was freed" in ended.stderr, ended


def test_memory_may_be_in_use_when_it_is_allocated(stream: torch.Stream) -> None:
    ones().add_(1)
    x, y = (torch.empty(4, device="virtual:0") for _ in range(2))
    with stream, pytest.raises(RuntimeError, match=r"(?s)race.*first: the allocation on the def"):
        x.fill_(1)
    stream.wait_stream(default())
    with stream:
        y.fill_(1)
    virtual.synchronize(0)


# --- memory of the host --------------------------------------------------------------------------

ON_HOST: dict[str, tuple[bool, Callable[[Tensor, Tensor], object]]] = {
    # True if it races, where the tensor's memory is written, or read, by a copy on a stream.
    "item": (True, lambda p, x: p[1].item()),
    "an operator": (True, lambda p, x: p + 1),
    "a copy": (True, lambda p, x: torch.empty(4).copy_(p)),
    "an operator of many": (True, lambda p, x: torch._foreach_add([p], 1)),
    "a copy on another stream": (True, lambda p, x: x.copy_(p)),
    "write": (True, lambda p, x: p.fill_(3)),
    "its shape": (False, lambda p, x: (p.view(2, 2)[0].shape, torch.zeros_like(p), p.is_pinned())),
}


@pytest.mark.parametrize("how", ON_HOST)
@pytest.mark.parametrize("writes", [True, False])
def test_host_and_stream_race_in_pinned_memory(
    stream: torch.Stream, how: str, writes: bool
) -> None:
    x, whole = torch.ones(4, device="virtual:0"), torch.zeros(8).pin_memory()
    pinned = whole[2:6]
    virtual.synchronize(0)
    for wait in (None, lambda: stream.record_event().synchronize(), stream.synchronize):
        with stream:
            pinned.copy_(x, non_blocking=True) if writes else x.copy_(pinned, non_blocking=True)
        if wait:
            wait()
        whole[6:].add_(whole[:2])
        races = ON_HOST[how][0] and wait is None and (writes or how == "write")
        if how == "a copy on another stream" and not writes:
            races = wait is None  # In the memory of the device.
        match = r"(?s)^race on .*first: aten::copy_ (writes|reads) Float \[4\] on stream.*then:"
        with pytest.raises(RuntimeError, match=match) if races else contextlib.nullcontext():
            ON_HOST[how][1](pinned, x)
            virtual.synchronize(1)
        virtual.synchronize(0)


def test_copies_on_one_stream_use_pinned_memory_in_turn() -> None:
    x, pinned = ones(), torch.zeros(4, 4).pin_memory()
    pinned.copy_(x, non_blocking=True)
    y = pinned.to("virtual:0", non_blocking=True)
    y.copy_(pinned, non_blocking=True)
    assert torch.equal(y, x)


# --- operators -----------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_writes_its_statistics_in_training_alone(
    stream: torch.Stream, training: bool, strict: bool
) -> None:
    with strict_mode(strict), check_races():
        norm = torch.nn.BatchNorm1d(4).to("virtual:0").train(training)
        norm.num_batches_tracked = None
        x = ones()
        virtual.synchronize(0)
        norm(x)
        races = pytest.raises(RuntimeError, match=RACE + r"(?s:.*batch_norm.* writes Float \[4\])")
        with stream, races if training else contextlib.nullcontext():
            norm(x)
        virtual.synchronize(0)


# --- graphs, threads, backward -------------------------------------------------------------------


def test_a_replay_is_an_access(stream: torch.Stream) -> None:
    x = ones()
    graph = virtual.VirtualGraph()
    with virtual.graph(graph):
        y = x * 2
    virtual.synchronize(0)
    graph.replay()
    with stream:
        with pytest.raises(RuntimeError, match=RACE):
            y.add(1)
        virtual.synchronize(0)
        y.add(1)
    with pytest.raises(RuntimeError, match=RACE):
        graph.replay()
    virtual.synchronize(0)


def test_a_replay_that_races_has_not_happened(stream: torch.Stream) -> None:
    x, y = ones(), ones()
    graph = virtual.VirtualGraph()
    with virtual.graph(graph):
        x.add_(1)
        y.add_(1)
    virtual.synchronize(0)
    with stream:
        y.mul(2)
    with pytest.raises(RuntimeError, match=RACE):
        graph.replay()
    with stream:
        x.add_(1)
    virtual.synchronize(0)
    assert (x.sum().item(), y.sum().item()) == (32, 16)


class OnAnotherStream(torch.autograd.Function):
    """Its backward copies a gradient on a stream that is not behind the one that computed it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stream: torch.Stream) -> Tensor:
        ctx.stream = stream
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with ctx.stream:
            return grad.to("virtual:1").to("virtual:0"), None


@pytest.mark.parametrize("strict", [False, True])
def test_backward_raises_to_its_caller(stream: torch.Stream, strict: bool) -> None:
    with strict_mode(strict), check_races():
        x = ones().requires_grad_()
        virtual.synchronize(0)
        y = OnAnotherStream.apply(x * 1, stream) * 2
        with pytest.raises(RuntimeError, match=RACE + r"(?s:.*in the backward of .*Mul.*)"):
            y.sum().backward()
        for each in (0, 1):
            virtual.synchronize(each)


def test_stream_of_one_device_only_in_backward() -> None:
    """The engine gives a node the stream of one device; on others it is on default streams."""

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            return x + y.to("virtual:0")

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad, grad.to("virtual:1") * torch.ones(4, 4, device="virtual:1")

    class Use(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.to("virtual:1")

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return (grad * 2).to("virtual:0")

    side = torch.Stream("virtual:1")
    x, y = ones().requires_grad_(), ones("virtual:1").requires_grad_()
    virtual.synchronize(0)
    virtual.synchronize(1)
    with side:
        z = Sum.apply(Use.apply(x).to("virtual:0"), y * 2)
    with pytest.raises(RuntimeError, match=RACE):
        z.sum().backward()
    virtual.synchronize(1)


# --- the switch ----------------------------------------------------------------------------------


def test_switches() -> None:
    with check_races(False):
        assert not checks_races()
        with strict_mode():
            assert checks_races()
            with check_races(False):
                assert not checks_races() and virtual_devices.is_strict()
        assert not checks_races()
        virtual_devices.set_check_races(True)
        with strict_mode(False):
            assert checks_races()


def test_what_nobody_has_looked_at_counts_as_ordered(stream: torch.Stream) -> None:
    x, y = ones(), ones()
    with check_races(False):
        x.add_(1)
        stream.wait_stream(default())
    with stream:
        x.mul(2)
        y.mul(2)
    virtual.synchronize(0)
