"""Whatever one replica raises comes out as it is, the others are freed, and the next step works."""

from __future__ import annotations

import itertools
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dataparallel as dp
from dataparallel.collectives import LocalGroup, all_reduce
from tests.faults.harness import Figures
from tests.faults.leaks import replica_threads
from tests.models import grads_of

GROUP = LocalGroup(30)
WRAPPERS: dict[str, Callable[..., Any]] = {
    "dp": dp.DataParallel,
    "ddp": dp.DistributedDataParallel,
}
PLACES = ("first", "between", "last", "backward")


class AbruptEnd(BaseException):
    """No Exception, and unknown to everybody."""


class Told(Exception):
    """Needs more than a message."""

    def __init__(self, code: int, *, why: str) -> None:
        super().__init__(code, why)


ERRORS: list[Callable[[], BaseException]] = [
    lambda: ValueError("bad"),
    lambda: KeyboardInterrupt(),
    lambda: SystemExit(3),
    lambda: GeneratorExit(),
    lambda: AbruptEnd("bye"),
    lambda: torch.OutOfMemoryError("too big"),
    lambda: StopIteration(1),
    lambda: Told(5, why="because"),
]

# The next failure: its kind, its replica, its place, and True once it has happened.
trap: dict[str, Any] = {}


def spring(*_: object) -> None:
    trap["sprung"] = time.monotonic()
    raise trap.pop("error")


def check(place: str, x: Tensor) -> None:
    replica = dp.current_replica()
    if replica is not None and (replica.index, place) == trap.get("where"):
        if place == "backward":
            x.register_hook(spring)
        else:
            spring()


class Net(nn.Module):
    """Fails where the trap is; with ``meets``, its replicas wait for each other in forward."""

    def __init__(self, meets: bool) -> None:
        super().__init__()
        self.meets = meets
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        check("first", x)
        hidden = torch.tanh(self.first(x))
        check("backward", hidden)
        if self.meets and dp.current_replica() is not None:
            all_reduce(hidden.detach().sum(0), "sum", GROUP)
            check("between", x)
            all_reduce(hidden.detach().mean(0), "sum", GROUP)
        check("last", x)
        output: Tensor = self.last(hidden)
        return output


def step(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    """Return the gradients of one step."""
    model.zero_grad()
    model(x).pow(2).mean().backward()
    return [each if each is None else each.clone() for each in grads_of(model)]


@pytest.mark.parametrize("meets", [True, False])
@pytest.mark.parametrize("name", WRAPPERS)
def test_what_a_replica_raises_comes_out_at_once(
    name: str, slots: list[str], meets: bool, repeats: Callable[..., int], figures: Figures
) -> None:
    """In forward others may wait for the replica that fails."""
    took, same, before = [], 0, replica_threads()
    places = [place for place in PLACES if meets or place != "between"]
    if slots[0] != "cpu":
        # On a device it is a thread of autograd that raises.
        places.remove("backward")
    cases = itertools.product(ERRORS, places)
    count = repeats(quick=len(ERRORS) * len(places), long=200)
    net = Net(meets).to(slots[0])
    x = torch.randn(16, 6).to(slots[0])
    wanted = step(net, x)
    model = WRAPPERS[name](net, slots)
    step(model, x)
    for number, (make, place) in zip(range(count), itertools.cycle(cases), strict=False):
        original, replica = make(), number % 4
        trap.update(where=(replica, place), error=original)
        with pytest.raises(type(original)) as caught:
            step(model, x)
        took.append(time.monotonic() - trap["sprung"])
        trap.pop("where")
        same += caught.value is original
        shown = "".join(traceback.format_exception(caught.value))
        assert "spring" in shown
        if name == "ddp" or place != "backward":
            assert f"in replica {replica} on device {slots[replica]}" in shown
        torch.testing.assert_close(step(model, x), wanted)
    model.close()
    assert replica_threads() <= before
    what = f"exception in a replica ({name}, {slots[0]}, meetings: {meets}) to the caller"
    figures.record(f"{what}, p100", max(took), "s", 1.0, repeats=count)
    what = f"{what}: the object itself"
    figures.record(what, same, "errors", count, repeats=count, at_least=True)
