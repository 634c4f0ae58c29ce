"""Whole trainings: the same numbers on the CPU, eagerly, and with everything deferred."""

from __future__ import annotations

import copy
import operator
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dataparallel.virtual import device_module as virtual
from dataparallel.virtual import strict_mode


def train(device: str, side_stream: bool = False) -> list[Tensor]:
    """Train for some steps with data of its own; parameters, buffers and losses."""
    generator = torch.Generator().manual_seed(3)
    network = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(64, 3),
    )
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    network.to(device)
    seed_dropout(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    current = None if device == "cpu" else torch.accelerator.current_stream(torch.device(device))
    stream = torch.Stream(device) if side_stream else current
    losses = []
    for _ in range(4):
        x = torch.randn(8, 2, 8, 8, generator=generator).to(device, non_blocking=True)
        y = torch.randint(0, 3, (8,), generator=generator).to(device, non_blocking=True)
        if current is None or stream is None:
            losses.append(step(network, optimizer, x, y))
            continue
        stream.wait_stream(current)
        with stream:
            losses.append(step(network, optimizer, x, y))
        current.wait_stream(stream)
    return [each.cpu() for each in (*network.state_dict().values(), *losses)]


def seed_dropout(device: str) -> None:
    """Seed one device only: others may be training in other threads."""
    where = torch.device(device)
    on_cpu = where.type == "cpu"
    generator = torch.default_generator if on_cpu else virtual.default_generators[where.index]
    generator.manual_seed(0)


def step(network: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(network(x), y)
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("side_stream", [False, True])
def test_strict_training_on_two_devices_from_two_threads(side_stream: bool) -> None:
    expected = train("virtual:0")
    torch.testing.assert_close(expected, train("cpu"))
    with strict_mode(), ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(train, f"virtual:{i}", side_stream) for i in range(2)]
        results = [job.result() for job in jobs]
    for result in results:
        assert all(map(torch.equal, result, expected))


def test_kernels_of_several_threads_run_at_once() -> None:
    """Two backwards meet on two devices; if one waited for the other, they never would."""
    barrier = threading.Barrier(2, timeout=30)

    class Meet(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, *gradients: Tensor) -> Tensor:
            barrier.wait()
            return gradients[0] * 2

    leaves = [torch.ones(3, device=f"virtual:{i}", requires_grad=True) for i in range(2)]
    torch.autograd.backward([Meet.apply(leaf).sum() for leaf in leaves])
    assert [None if leaf.grad is None else leaf.grad.tolist() for leaf in leaves] == [[2.0] * 3] * 2


def test_threads_that_wait_for_each_others_streams() -> None:
    streams = [torch.Stream(f"virtual:{i}") for i in range(2)]
    totals = [torch.zeros(1, device=f"virtual:{i}") for i in range(2)]
    for stream in streams:
        stream.wait_stream(torch.accelerator.current_stream(stream.device))

    def work(index: int) -> None:
        for _ in range(200):
            with streams[index]:
                totals[index].add_(1)
            streams[1 - index].synchronize()
            if torch.rand(1).item() < 0.2:
                torch.accelerator.synchronize(index)

    with ThreadPoolExecutor(4) as pool:
        for job in [pool.submit(work, index % 2) for index in range(4)]:
            job.result()
    for stream in streams:
        stream.synchronize()
    assert [total.item() for total in totals] == [400, 400]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, indices: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(indices))
        return logits


MOVES: dict[str, Callable[[nn.Module], Any]] = {
    "to": lambda module: module.to("virtual:1"),
    "to_dtype": lambda module: module.to(torch.device("virtual"), torch.double),
    "like": lambda module: module.to(torch.empty(1, device="virtual:2")),
    "named": operator.methodcaller("virtual"),
    "back": lambda module: module.to("virtual:0").cpu(),
    "back_by_to": lambda module: module.to("virtual:0").to(device="cpu"),
    "between": lambda module: module.to("virtual:0").to("virtual:1"),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_a_module_that_moves_keeps_its_parameters(move: Callable[[nn.Module], Any]) -> None:
    """As to a GPU: what is shared stays so, and an optimizer made before goes on with it."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.manual_seed(1)
    module = Tied()
    expected = copy.deepcopy(module)
    weight = module.head.weight
    optimizer = torch.optim.SGD(module.parameters(), 0.5)
    module(torch.arange(6)).square().sum().backward()
    assert move(module) is module
    assert module.head.weight is module.embedding.weight is weight
    assert weight.grad is not None and weight.grad.device == weight.device
    for each, steps in (
        (module, optimizer),
        (expected, torch.optim.SGD(expected.parameters(), 0.5)),
    ):
        each.zero_grad()
        each(torch.arange(6, device=each.head.weight.device)).square().sum().backward()
        steps.step()
    torch.testing.assert_close(weight.cpu().float(), expected.head.weight)
    assert torch.__future__.get_swap_module_params_on_conversion() == swaps


def test_other_conversions_of_modules_are_torchs_own() -> None:
    """Torch refuses to swap what somebody refers to weakly; only the move needs that."""
    module = nn.Linear(2, 2)
    reference = weakref.ref(module.weight)
    module.to(torch.double).to("cpu").cpu()
    assert reference() is module.weight and module.weight.dtype == torch.double
    with pytest.raises(TypeError, match=r"to\(\) received"):
        module.to("virtual:0", nowhere=True)  # type: ignore[call-overload]
