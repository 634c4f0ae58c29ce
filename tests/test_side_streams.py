"""Modules that compute on streams of their own in forward, as a user of CUDA writes them.

In strict mode the checker of races looks at each use of memory, in backward and across steps.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel, DistributedDataParallel, collectives, devices, virtual
from tests.models import assert_all_close

# The leaves' gradients are for the caller's streams, with and without DDP of torch.
pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")

NUM_DEVICES = 3
EACH = range(NUM_DEVICES)
STREAMS = {index: torch.Stream(torch.device("virtual", index)) for index in EACH}


@pytest.fixture(autouse=True)
def _strict(nothing_compiled: None) -> Iterator[None]:
    with virtual.strict_mode():
        yield
        for index in EACH:
            torch.accelerator.synchronize(index)


class Aside(nn.Module):
    """Computes a part on another stream of some devices, in order with what surrounds it."""

    def __init__(self, part: nn.Module, on: Collection[int], *, fresh: bool) -> None:
        super().__init__()
        self.part, self.on, self.fresh = part, on, fresh

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor
        if x.device.index not in self.on:
            result = self.part(x)
            return result
        current = torch.accelerator.current_stream(x.device)
        side = torch.Stream(x.device) if self.fresh else STREAMS[x.device.index]
        side.wait_stream(current)
        # Threads share the streams that are not fresh.
        with devices.use_stream(side):
            result = self.part(x)
        x.record_stream(side)
        current.wait_stream(side)
        result.record_stream(current)
        return result


class Branches(nn.Module):
    """Two layers side by side, one of them aside, and a layer for both streams."""

    def __init__(self, on: Collection[int], *, fresh: bool) -> None:
        super().__init__()
        self.both, self.here, self.last = nn.Linear(20, 20), nn.Linear(20, 30), nn.Linear(30, 3)
        self.aside = Aside(nn.Sequential(self.both, nn.Tanh(), nn.Linear(20, 30)), on, fresh=fresh)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.aside(x) + self.here(self.both(x)))
        return result


class Meeting(nn.Module):
    """Takes the mean over all replicas away, computed aside."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(0)
        if x.device.type != "cpu":
            mean = collectives.all_reduce(mean, "avg", "local")
        return x - mean


def meeting(on: Collection[int], *, fresh: bool) -> nn.Module:
    """Replicas that meet while some are aside."""
    meeting = Aside(nn.Sequential(nn.Linear(20, 30), Meeting()), on, fresh=fresh)
    return nn.Sequential(meeting, nn.Tanh(), nn.Linear(30, 3))


def layers(aside: Collection[int], on: Collection[int], *, fresh: bool) -> nn.Module:
    """A stack of which some layers are aside."""
    sizes = [20, 300, 30, 3]
    made: list[nn.Module] = []
    for index, pair in enumerate(itertools.pairwise(sizes)):
        layer = nn.Linear(*pair)
        made += [Aside(layer, on, fresh=fresh) if index in aside else layer, nn.Tanh()]
    return nn.Sequential(*made)


def whole(on: Collection[int], *, fresh: bool) -> nn.Module:
    return Aside(layers((), on, fresh=fresh), on, fresh=fresh)


MODULES: dict[str, Callable[..., nn.Module]] = {
    "first layer": lambda on, **how: layers((0,), on, **how),
    "middle layer": lambda on, **how: layers((1,), on, **how),
    "last layer": lambda on, **how: layers((2,), on, **how),
    "all layers": whole,
    "branches": Branches,
    "meeting": meeting,
}


def plain(model: Any, x: Tensor, y: Tensor) -> None:
    output = model(x)
    nn.functional.mse_loss(output, y.to(output.device)).backward()


def by_loss(model: Any, x: Tensor, y: Tensor) -> None:
    if not hasattr(model, "loss"):
        return plain(model, x, y)
    model.loss(nn.MSELoss(), x, y).backward()


def accumulated(model: Any, x: Tensor, y: Tensor) -> None:
    with getattr(model, "no_sync", contextlib.nullcontext)():
        plain(model, x, y)
    plain(model, x * 2, y)


def of_two_forwards(model: Any, x: Tensor, y: Tensor) -> None:
    output = model(x) + model(x * 2)
    nn.functional.mse_loss(output, y.to(output.device)).backward()


def of_inputs_on_the_host(model: Any, x: Tensor, y: Tensor) -> None:
    """Gradients of inputs go to the host, too."""
    given = x.cpu().requires_grad_()
    plain(model, given if hasattr(model, "device_ids") else given.to(x.device), y)
    assert given.grad is not None
    with torch.no_grad():
        next(model.parameters()).grad.add_(given.grad.sum().to(x.device))


STEPS = [plain, by_loss, accumulated, of_two_forwards, of_inputs_on_the_host]


def train(models: list[Any], step: Callable[..., None], device: str) -> list[Tensor]:
    """Parameters on the host after some steps of models, one behind the other."""
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], 0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        x, y = (torch.randn(12, n, generator=generator) for n in (20, 3))
        *inner, outer = models
        x, y = x.to(device), y.to(device)
        for one in inner:
            x = nn.functional.pad(one(x), (0, 17))
        step(outer, x, y)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().cpu() for model in models for p in model.parameters()]


def to_the_host(module: nn.Module, places: list[str]) -> Any:
    return DataParallel(module, places, output_device=-1)


def compare(wrap: Any, modules: list[nn.Module], step: Callable[..., None], first: int) -> None:
    places = [f"virtual:{(first + index) % NUM_DEVICES}" for index in EACH]
    expected = train(copy.deepcopy(modules), step, "cpu")
    models = [wrap(module.to(places[0]), places) for module in modules]
    assert_all_close(train(models, step, places[0]), expected, rtol=1e-3, atol=1e-5)
    for model in models:
        model.close()


@pytest.mark.in_pairs
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("first", "fresh"), [(0, True), (1, False)])
@pytest.mark.parametrize("on", [(0,), (1,), EACH], ids=str)
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("wrap", [DataParallel, to_the_host, DistributedDataParallel])
def test_gradients_of_a_module_that_computes_on_side_streams(
    wrap: Any,
    name: str,
    on: Collection[int],
    first: int,
    fresh: bool,
    step: Callable[..., None],
) -> None:
    compare(wrap, [MODULES[name](on, fresh=fresh)], step, first)


@pytest.mark.parametrize("on", [(0,), (1,), EACH], ids=str)
@pytest.mark.parametrize("wrap", [DataParallel, DistributedDataParallel])
def test_gradients_of_two_wrappers_whose_modules_share_side_streams(
    wrap: Any, on: Collection[int]
) -> None:
    for name in ("first layer", "all layers"):
        make = MODULES[name]
        compare(wrap, [make(on, fresh=False), make(on, fresh=False)], plain, 0)
