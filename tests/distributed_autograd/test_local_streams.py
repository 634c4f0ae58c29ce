"""Tensors that go from worker to worker are used only when they are there.

The virtual devices defer work in strict mode for as long as they may and poison freed memory, so a
wait that is left out shows in the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from dataparallel import devices, virtual
from dataparallel.distributed_autograd import backward, context, get_gradients, rpc_async, rpc_sync
from dataparallel.distributed_autograd.local_workers import LocalWorkers
from tests.distributed_autograd.local_cases import PATIENCE, Program, call, check
from tests.distributed_autograd.test_local_gradients import PROGRAMS, run_here, to_place_of

PLACES = ["virtual:0", "virtual:1", "virtual:0", "cpu"]
SIZE = 1000


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    with virtual.strict_mode():
        yield
        for device in devices.accelerators():
            devices.synchronize(device)


def is_side(stream: devices.Stream, device: torch.device) -> bool:
    """Whether a stream is not the one that a fresh thread has."""
    return bool(stream != devices.device_module(device).default_stream(device))


@contextmanager
def without(name: str, of_results: bool) -> Iterator[list[int]]:
    """Leave out what orders arguments, or what orders results; counts what was left out.

    Results come to the caller's stream, which is a side stream in these tests.
    """
    real = getattr(devices, name)
    left_out: list[int] = []

    def call(first: Any, second: devices.Stream) -> None:
        waiting = first if name == "wait_stream" else second
        if isinstance(waiting, devices.NullStream):
            real(first, second)
        elif is_side(waiting, waiting.device) == of_results:
            left_out.append(1)
        else:
            real(first, second)

    with mock.patch.object(devices, name, call):
        yield left_out


def plus_one(x: Tensor) -> Tensor:
    return x + 1


def total(x: Tensor) -> float:
    """Reads the tensor on the host, so at once."""
    return x.sum().item()


def write() -> None:
    """Takes memory that is free at the worker and writes it at once."""
    for _ in range(4):
        torch.full((SIZE,), 9.0, device="virtual:0").sum().item()


def results_used_on_a_side_stream() -> bool:
    """Calls over a side stream, on memory that is used again as soon as it is free."""
    right = True
    with LocalWorkers(PLACES, timeout=PATIENCE), devices.use_stream(torch.Stream("virtual:0")):
        for _ in range(3):
            x = torch.ones(SIZE, device="virtual:0") * 3
            futures = [rpc_async(f"worker{index}", plus_one, args=(x,)) for index in range(3)]
            answers = [future.wait() for future in futures]
            del x, futures
            sums = [answer + 1 for answer in answers]
            del answers
            reused = [torch.zeros(SIZE, device=place) for place in PLACES for _ in range(3)]
            rpc_sync("worker0", write)
            right &= all(bool((tensor == 5).all()) for tensor in sums)
            right &= all(bool((tensor == 0).all()) for tensor in reused)
    return right


def results_read_at_once() -> bool:
    """The same without anything in between that might wait for other reasons."""
    with LocalWorkers(PLACES, timeout=PATIENCE), devices.use_stream(torch.Stream("virtual:0")):
        x = torch.ones(SIZE, device="virtual:0") * 3
        answers = [rpc_sync(f"worker{index}", plus_one, args=(x,)) for index in (0, 2)]
        return all(bool((answer + 1 == 5).all()) for answer in answers)


def arguments_read_at_once() -> bool:
    """Workers that read on the host what a side stream makes."""
    with LocalWorkers(PLACES, timeout=PATIENCE), devices.use_stream(torch.Stream("virtual:0")):
        x = torch.ones(SIZE, device="virtual:0") * 3
        totals = [rpc_sync(f"worker{index}", total, args=(x,)) for index in range(3)]
    return totals == [3.0 * SIZE] * 3


def arguments_freed_at_once() -> bool:
    """A worker that has freed its arguments before it has read them."""
    with LocalWorkers(PLACES, timeout=PATIENCE), devices.use_stream(torch.Stream("virtual:0")):
        answers = []
        for _ in range(3):
            x = torch.ones(SIZE, device="virtual:0") * 3
            answers.append(rpc_async("worker0", plus_one, args=(x,)).wait())
            # Of the memory of the side stream, and written at once.
            for _ in range(4):
                torch.full((SIZE,), 9.0, device="virtual:0").sum().item()
        return all(bool((answer == 4).all()) for answer in answers)


SCENARIOS = (
    results_used_on_a_side_stream,
    results_read_at_once,
    arguments_read_at_once,
    arguments_freed_at_once,
)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_arguments_and_results_are_waited_for(scenario: Callable[[], bool]) -> None:
    assert scenario()


@pytest.mark.parametrize("name", ["wait_stream", "record_stream"])
@pytest.mark.parametrize("of_results", [False, True], ids=["arguments", "results"])
def test_each_wait_is_needed(name: str, of_results: bool) -> None:
    with without(name, of_results) as left_out:
        right = {scenario.__name__: scenario() for scenario in SCENARIOS}
    assert left_out
    assert not all(right.values())


def run_on_side_stream(module: nn.Module, x: Tensor) -> Any:
    x = to_place_of(module, x)
    here = devices.current_stream(x.device)
    side = torch.Stream(x.device) if devices.is_accelerator(x.device) else here
    devices.wait_stream(side, here)
    with devices.use_stream(side):
        devices.record_stream(x, side)
        hidden = run_here(module, x)
    devices.wait_stream(here, side)
    devices.record_stream(hidden, here)
    return hidden


def on_own_streams(modules: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    hidden = x
    for _ in range(2):
        for index, module in enumerate(modules):
            hidden = call(f"worker{index}", run_on_side_stream, module, hidden)
            hidden = hidden + hidden.square()
    return [hidden.sum()]


PLACES_OF_CHAINS = [
    ["cpu", "virtual:0", "cpu", "virtual:1"],
    ["virtual:1", "cpu", "virtual:0", "virtual:0"],
]


@pytest.mark.parametrize("places", PLACES_OF_CHAINS, ids=" ".join)
@pytest.mark.parametrize("program", [*PROGRAMS, on_own_streams], ids=lambda it: it.__name__)
def test_gradients_are_waited_for(program: Program, places: list[str]) -> None:
    with (
        devices.use_stream(torch.Stream("virtual:0")),
        devices.use_stream(torch.Stream("virtual:1")),
    ):
        check(program, places)


def test_gradients_are_ready_on_the_stream_that_asks() -> None:
    weight = torch.full((SIZE,), 2.0, device="virtual:0", requires_grad=True)
    devices.synchronize(weight.device)
    with LocalWorkers(PLACES, timeout=PATIENCE), context() as context_id:
        with devices.use_stream(torch.Stream("virtual:0")):
            loss = rpc_sync("worker1", total_there, args=(weight * 3,))
            backward(context_id, [loss])
        with devices.use_stream(torch.Stream("virtual:0")):
            assert bool((get_gradients(context_id)[weight] == 12 * 3).all())


def total_there(x: Tensor) -> Tensor:
    return x.square().sum()
