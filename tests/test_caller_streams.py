"""Callers on streams of their own: numbers are those of the bare module under any schedule.

In strict mode virtual devices do late work when somebody demands it, in one order. Threads that
run some streams at once, as soon as there is something on them, give other orders that are as
legal.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dataparallel as dp
from dataparallel import DataParallel, DistributedDataParallel, collectives, devices, virtual
from dataparallel.virtual import device_module
from tests.models import WRAPPERS, assert_all_close

NUM_DEVICES, STEPS = 3, 2
DEVICES = [torch.device("virtual", index) for index in range(NUM_DEVICES)]
FIRST = [(0, 1, 2), (1, 0, 2)]
SIDES: list[Sequence[int]] = [(), (0,), (1,), (2,), (0, 1, 2)]
Devices = list[torch.device]
#: Wraps a module on the first of some devices.
Wrap = Callable[[nn.Module, Devices], Any]


class Meeting(nn.Module):
    """Replicas meet in forward, and use tensors that were sent to all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(20, 40), nn.Linear(40, 3)

    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        hidden: Tensor = self.first(x) @ shared
        mean = collectives.all_reduce(hidden.mean(0), "avg", "local")
        result: Tensor = self.second(torch.tanh(hidden - mean))
        return result


@functools.cache
def own_stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


class OwnStream(nn.Module):
    """Takes what comes in, and gives what goes out, on a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self._apart(self.net(self._apart(x)))
        return result

    def _apart(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            return x * 2
        own, current = own_stream(x.device), devices.current_stream(x.device)
        devices.wait_stream(own, current)
        with devices.use_stream(own):
            result = x * 2
        devices.record_stream(x, own)
        devices.wait_stream(current, own)
        devices.record_stream(result, current)
        return result


def net() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 3)]
    return nn.Sequential(*layers)


def encoder() -> nn.Module:
    return nn.Linear(20, 20)


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        yield torch.randn(12, 20, generator=generator), torch.randn(12, 3, generator=generator)


def train(models: Sequence[Any], loss_of: Callable[..., Tensor], device: torch.device) -> Any:
    """Losses, gradients and parameters on the host."""
    parameters = [p for model in models for p in model.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    results: list[Tensor] = []
    for x, y in batches():
        optimizer.zero_grad()
        loss = loss_of(*models, x.to(device), y.to(device))
        loss.backward()
        optimizer.step()
        results.append(loss.detach())
        # It would keep nodes that belong to the streams of this step.
        del loss
    return [t.detach().cpu() for t in (*results, *(p.grad for p in parameters), *parameters)]


def mean_square(model: Any, x: Tensor, y: Tensor) -> Tensor:
    output = model(x)
    return nn.functional.mse_loss(output, y.to(output.device))


def by_loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    if not hasattr(model, "loss"):
        return mean_square(model, x, y)
    loss: Tensor = model.loss(nn.MSELoss(), x, y)
    return loss


def behind_encoder(first: Any, model: Any, x: Tensor, y: Tensor) -> Tensor:
    return mean_square(model, first(x), y)


def meeting(model: Any, x: Tensor, y: Tensor) -> Tensor:
    shared = torch.eye(40, device=x.device).requires_grad_()
    sent = dp.Replicate(shared * 2) if hasattr(model, "device_ids") else shared * 2
    loss: Tensor = nn.functional.mse_loss(model(x, sent), y)
    (of_shared,) = torch.autograd.grad(loss, shared, retain_graph=True)
    return loss + of_shared.detach().sum()


def of_two(first: Any, second: Any, x: Tensor, y: Tensor) -> Tensor:
    total: Tensor = mean_square(first, x, y) + second(x).pow(2).mean().to(y.device)
    return total


def captured(module: nn.Module, places: Devices) -> Any:
    return DistributedDataParallel(module, places, capture=True)


def guarded(module: nn.Module, places: Devices) -> Any:
    return DistributedDataParallel(module, places, nonfinite="skip")


def to_the_host(module: nn.Module, places: Devices) -> Any:
    return DataParallel(module, places, output_device=-1)


def turned(wrap: Wrap) -> Wrap:
    """Return a wrapper that begins with another device."""
    return lambda module, places: wrap(module.to(places[1]), places[1:] + places[:1])


def nested(module: nn.Module, places: Devices) -> Any:
    layers = list(module.children())
    inner = DataParallel(nn.Sequential(*layers[2:]), places)
    return DistributedDataParallel(nn.Sequential(*layers[:2], inner), places[:1])


def as_is(module: nn.Module, _: Devices) -> nn.Module:
    return module


#: Per case how modules are wrapped, what makes them, and how a loss is computed with them.
CASES: dict[str, tuple[list[Wrap], list[Callable[[], nn.Module]], Callable[..., Tensor]]] = {
    "DataParallel": ([DataParallel], [net], mean_square),
    "DDP": ([DistributedDataParallel], [net], mean_square),
    "loss": ([DistributedDataParallel], [net], by_loss),
    "encoder": ([as_is, DataParallel], [encoder, net], behind_encoder),
    "own streams DataParallel": ([as_is, DataParallel], [encoder, OwnStream], behind_encoder),
    "own streams DDP": ([as_is, DistributedDataParallel], [encoder, OwnStream], behind_encoder),
    "capture": ([captured], [net], mean_square),
    "nested": ([nested], [net], mean_square),
    "two DataParallel": ([DataParallel, turned(DataParallel)], [net, net], of_two),
    "two DDP": ([DistributedDataParallel, turned(DistributedDataParallel)], [net, net], of_two),
    "meeting DataParallel": ([DataParallel], [Meeting], meeting),
    "meeting DDP": ([DistributedDataParallel], [Meeting], meeting),
}


def default_stream(index: int) -> torch.Stream:
    return device_module.default_stream(index)


def copy_stream(index: int) -> torch.Stream:
    stream = devices.copy_stream(DEVICES[index])
    assert stream is not None
    return stream


#: The streams that do their work at once.
SCHEDULES: dict[str, Callable[[], list[torch.Stream]]] = {
    "none": list,
    "home": lambda: [default_stream(0)],
    "others": lambda: [default_stream(1), default_stream(2)],
    "copies": lambda: [copy_stream(0), default_stream(1), copy_stream(2)],
    "own": lambda: list(map(own_stream, DEVICES)),
}
SCHEDULED = pytest.mark.parametrize("schedule", SCHEDULES)


@contextlib.contextmanager
def strict_but(schedule: str) -> Iterator[None]:
    """All streams defer, but for those of a schedule: a thread runs what comes on them."""
    streams, stop = SCHEDULES[schedule](), threading.Event()

    def run() -> None:
        while not stop.is_set():
            for stream in streams:
                stream.synchronize()
            time.sleep(0)

    thread = threading.Thread(target=run)
    if streams:
        thread.start()
    try:
        with virtual.strict_mode():
            yield
    finally:
        stop.set()
        if streams:
            thread.join()


def enter_streams(sides: Sequence[int]) -> list[torch.Stream]:
    """Make streams current in this thread for good; returns the current ones of all devices."""
    for index in sides:
        stream = torch.Stream(DEVICES[index])
        stream.wait_stream(default_stream(index))
        torch.accelerator.set_stream(stream)
    torch.accelerator.set_device_index(0)
    return [device_module.current_stream(index) for index in range(NUM_DEVICES)]


def in_thread(work: Callable[[], Any]) -> Any:
    """Run in a thread of its own, whose streams nobody has chosen."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@pytest.mark.in_pairs
@SCHEDULED
@pytest.mark.parametrize(
    ("order", "sides"), [(FIRST[i % 2], sides) for i, sides in enumerate(SIDES)], ids=str
)
@pytest.mark.parametrize("name", CASES)
def test_training(name: str, order: Sequence[int], sides: Sequence[int], schedule: str) -> None:
    wraps, makes, loss_of = CASES[name]
    places = [DEVICES[index] for index in order]
    torch.manual_seed(2)
    bare = [make() for make in makes]
    kept = copy.deepcopy(bare)
    expected = train(bare, loss_of, torch.device("cpu"))

    def work() -> Any:
        enter_streams(sides)
        modules = [module.to(places[0]) for module in copy.deepcopy(kept)]
        models = [wrap(module, places) for wrap, module in zip(wraps, modules, strict=True)]
        try:
            return train(models, loss_of, places[0])
        finally:
            for model in models:
                if hasattr(model, "close"):
                    model.close()

    with strict_but(schedule):
        got = in_thread(work)
    assert_all_close(got, expected, rtol=1e-3, atol=1e-5)


@WRAPPERS
def test_gradients_come_on_the_streams_of_their_leaves_in_each_forward(wrapper: Any) -> None:
    """Otherwise torch warns, and a capture of the whole step would fail."""

    def work() -> None:
        model = wrapper(net().to(DEVICES[0]), DEVICES)
        for sides in SIDES:
            enter_streams(sides)
            train([model], mean_square, DEVICES[0])
        model.close()

    torch.set_warn_always(True)
    try:
        in_thread(work)
    finally:
        torch.set_warn_always(False)


@WRAPPERS
def test_a_server_whose_parameters_change(wrapper: Any) -> None:
    """Copies that one thread has made and another one used make room for those of a third."""
    bare = net()
    model = wrapper(copy.deepcopy(bare).to(DEVICES[0]), DEVICES)
    x = next(iter(batches()))[0]

    def answer() -> Tensor:
        # On the home they share a stream, which is in order with the changes.
        enter_streams((1, 2))
        with torch.inference_mode():
            result: Tensor = model(x.to(DEVICES[0]))
        return result

    for step in range(6):
        got = in_thread(answer).cpu()
        torch.testing.assert_close(got, bare(x), rtol=1e-3, atol=1e-5)
        # Without a change another thread uses what the first has made, and may not have ended.
        in_thread(answer)
        for module in (bare, model.module):
            with torch.no_grad():
                next(module.parameters()).mul_(1 + step / 10)
    model.close()


@pytest.mark.in_pairs
@SCHEDULED
@WRAPPERS
@pytest.mark.parametrize("sides", SIDES, ids=str)
def test_threads_of_a_server(wrapper: Any, sides: Sequence[int], schedule: str) -> None:
    """Each request has a thread with streams of its own, and leaves it as it was."""
    bare = net()
    model = wrapper(copy.deepcopy(bare).to(DEVICES[0]), DEVICES)
    requests = [x for x, _ in batches()] * 4

    def answer(x: Tensor) -> Tensor:
        streams = enter_streams(sides)
        with torch.inference_mode():
            result: Tensor = model(x.to(DEVICES[0])).cpu()
        assert [device_module.current_stream(i) for i in range(NUM_DEVICES)] == streams
        return result

    with strict_but(schedule), ThreadPoolExecutor(4) as pool:
        got = list(pool.map(answer, requests))
    assert_all_close(got, map(bare, requests), rtol=1e-3, atol=1e-5)
    model.close()


@contextlib.contextmanager
def on_others(sides: Sequence[int]) -> Iterator[list[torch.Stream]]:
    """Be on other streams, in order with the current ones."""
    before = [device_module.current_stream(index) for index in sides]
    streams = [torch.Stream(DEVICES[index]) for index in sides]
    for stream, current in zip(streams, before, strict=True):
        stream.wait_stream(current)
    with devices.use_streams(streams):
        yield streams
    for stream, current in zip(streams, before, strict=True):
        current.wait_stream(stream)


def twice_gradients(model: nn.Module) -> list[Tensor]:
    """Use gradients, which were allocated on other streams, and are freed on others."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    for grad in grads:
        devices.record_stream(grad, devices.current_stream(grad.device))
    return [grad * 2 for grad in grads]


@pytest.mark.in_pairs
@SCHEDULED
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
@pytest.mark.parametrize(
    "wrap", [as_is, DataParallel, to_the_host, DistributedDataParallel, guarded]
)
@pytest.mark.parametrize("sides", SIDES, ids=str)
def test_a_backward_on_other_streams_than_its_forward(
    wrap: Wrap, sides: Sequence[int], schedule: str
) -> None:
    bare = net()

    def work(wrap: Wrap, places: Devices, sides: Sequence[int]) -> list[Tensor]:
        model = wrap(copy.deepcopy(bare).to(places[0]), places)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        results: list[Tensor] = []
        for x, y in batches():
            optimizer.zero_grad()
            for scale in (1, 2):
                with on_others(sides) as streams:
                    penalty = sum(p.square().sum() for p in model.parameters())
                loss = mean_square(model, x.to(places[0]) * scale, y.to(places[0]))
                loss = loss + penalty.to(loss.device)
                with on_others(sides):
                    loss.backward()
                    # Gradients are ready where backward was called.
                    results += twice_gradients(model)
                del loss, penalty
                # Memory that was freed too early shows where its stream goes on.
                with devices.use_streams(streams):
                    for stream in streams:
                        torch.ones(1, device=stream.device)
            with on_others(sides):
                optimizer.step()
                results += twice_gradients(model)
        getattr(model, "close", int)()
        return [t.detach().cpu() for t in (*results, *model.parameters())]

    expected = work(as_is, [torch.device("cpu")], ())
    with strict_but(schedule):
        got = in_thread(functools.partial(work, wrap, DEVICES, sides))
    assert_all_close(got, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("sides", SIDES[1:], ids=str)
def test_graphs_are_replayed_on_other_streams_in_each_step(
    sides: Sequence[int], outside: bool
) -> None:
    """Replays use the same memory; a backward may be called ``outside`` of the streams."""
    bare = net()
    module = copy.deepcopy(bare).to(DEVICES[0])
    model = captured(module, DEVICES)

    def train_some(forward: Any, trained: nn.Module, device: torch.device) -> list[Tensor]:
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        for step in range(5):
            optimizer.zero_grad()
            x = torch.randn(12, 20, generator=torch.Generator().manual_seed(step)).to(device)
            with on_others(sides if forward is model else ()):
                loss = forward(x).square().mean()
                if not outside:
                    loss.backward()
            if outside:
                loss.backward()
            for parameter in trained.parameters() if forward is model else ():
                assert parameter.grad is not None
                devices.record_stream(parameter.grad, devices.current_stream(device))
            optimizer.step()
            del loss
        return [p.detach().cpu() for p in trained.parameters()]

    expected = train_some(bare, bare, torch.device("cpu"))
    with virtual.strict_mode():
        got = train_some(model, module, DEVICES[0])
        model.close()
    assert_all_close(got, expected, rtol=1e-3, atol=1e-5)
