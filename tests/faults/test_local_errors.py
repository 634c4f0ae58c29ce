"""Whatever one replica raises comes out as it is, the others are freed, and the next step works."""

from __future__ import annotations

import contextlib
import itertools
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dataparallel as dp
from dataparallel.collectives import LocalGroup, all_reduce
from tests.faults.harness import Figures
from tests.faults.leaks import replica_threads

GROUP = LocalGroup(30)
WRAPPERS: dict[str, Callable[..., Any]] = {
    "dp": dp.DataParallel,
    "ddp": dp.DistributedDataParallel,
}


class AbruptEnd(BaseException):
    """No Exception, and unknown to everybody."""


class Told(Exception):
    """Needs more than a message."""

    def __init__(self, code: int, *, why: str) -> None:
        super().__init__(code, why)
        self.code = code


@dataclass
class Trap:
    """What fails next, where; shared by all replicas."""

    replica: int = -1
    place: str = ""
    error: BaseException | None = None
    sprung: float = 0.0

    def check(self, place: str) -> None:
        replica = dp.current_replica()
        if replica is not None and (replica.index, place) == (self.replica, self.place):
            self.spring()

    def spring(self) -> None:
        error, self.error = self.error, None
        assert error is not None
        self.sprung = time.monotonic()
        raise error

    def on_backward(self, x: Tensor, place: str) -> None:
        replica = dp.current_replica()
        if replica is not None and (replica.index, place) == (self.replica, self.place):
            x.register_hook(lambda grad: self.spring())


TRAP = Trap()


class Net(nn.Module):
    """Fails where the trap is; with ``meets``, its replicas wait for each other in forward."""

    def __init__(self, meets: bool) -> None:
        super().__init__()
        self.meets = meets
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        TRAP.check("first")
        hidden = torch.tanh(self.first(x))
        TRAP.on_backward(hidden, "backward")
        if self.meets and dp.current_replica() is not None:
            all_reduce(hidden.detach().sum(0), "sum", GROUP)
            TRAP.check("between")
            all_reduce(hidden.detach().mean(0), "sum", GROUP)
        TRAP.check("last")
        output: Tensor = self.last(hidden)
        return output


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The gradients of one step."""
    for parameter in model.parameters():
        parameter.grad = None
    model(x).pow(2).mean().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    return [grad.clone() for grad in grads if grad is not None]


def fails_once(
    model: nn.Module, x: Tensor, replica: int, place: str, error: BaseException
) -> tuple[BaseException, float]:
    """What a step raises, and how many seconds after the replica did."""
    TRAP.replica, TRAP.place, TRAP.error = replica, place, error
    try:
        step(model, x)
    except BaseException as caught:
        found = caught
    else:
        pytest.fail(f"nothing was raised in replica {replica} at {place!r}")
    assert type(found) is type(error)
    seconds = time.monotonic() - TRAP.sprung
    TRAP.replica = -1
    return found, seconds


@contextlib.contextmanager
def trained(name: str, slots: list[str], meets: bool) -> Iterator[tuple[Any, Tensor, list[Tensor]]]:
    """A wrapper that has run a step, an input, and the gradients that are right for it."""
    net = Net(meets).to(slots[0])
    x = torch.randn(16, 6).to(slots[0])
    wanted = step(net, x)
    model = WRAPPERS[name](net, slots)
    step(model, x)
    yield model, x, wanted
    model.close()


@pytest.mark.parametrize("name", WRAPPERS)
def test_an_exception_in_a_replica(
    name: str, slots: list[str], repeats: Callable[..., int], figures: Figures
) -> None:
    """Goal 1: in forward others wait for the replica that fails."""
    took, before = [], replica_threads()
    places = itertools.cycle(itertools.product(("first", "between", "last"), range(4)))
    count = repeats(quick=12, long=200)
    with trained(name, slots, meets=True) as (model, x, wanted):
        for number, (place, replica) in zip(range(count), places, strict=False):
            error, seconds = fails_once(model, x, replica, place, ValueError(f"number {number}"))
            took.append(seconds)
            text = f"number {number}\nin replica {replica} on device {slots[replica]}"
            assert str(error) == text
            assert "spring" in "".join(traceback.format_exception(error))
            torch.testing.assert_close(step(model, x), wanted)
    assert replica_threads() <= before
    figures.record(
        goal=1,
        what=f"exception in a replica ({name}, {slots[0]}) to the caller, p100",
        value=max(took),
        unit="s",
        limit=1.0,
        repeats=count,
        baseline="joins without a limit",
        details=f"median {sorted(took)[count // 2]:.4f} s; 0 threads left",
    )


ERRORS: list[Callable[[], BaseException]] = [
    lambda: KeyboardInterrupt(),
    lambda: SystemExit(3),
    lambda: GeneratorExit(),
    lambda: AbruptEnd("bye"),
    lambda: torch.OutOfMemoryError("too big"),
    lambda: MemoryError(),
    lambda: KeyError("name"),
    lambda: StopIteration(1),
    lambda: Told(5, why="because"),
    lambda: RecursionError("deep"),
]


@pytest.mark.parametrize("place", ["first", "last", "backward"])
@pytest.mark.parametrize("name", WRAPPERS)
def test_what_comes_out_is_what_was_raised(
    name: str, place: str, repeats: Callable[..., int], figures: Figures
) -> None:
    """Goal 2: of the same type, the object itself, and the next step is right."""
    count, same = repeats(quick=len(ERRORS), long=100), 0
    with trained(name, ["cpu"] * 4, meets=False) as (model, x, wanted):
        for number, make in zip(range(count), itertools.cycle(ERRORS), strict=False):
            original = make()
            error, _ = fails_once(model, x, number % 4, place, original)
            same += error is original
            if name == "ddp" or place != "backward":
                shown = "".join(traceback.format_exception_only(error))
                assert f"in replica {number % 4} on device cpu" in shown
            torch.testing.assert_close(step(model, x), wanted)
    figures.record(
        goal=2,
        what=f"BaseException or OutOfMemoryError in {place} ({name}): the object itself comes out",
        value=same,
        unit=f"of {count}",
        limit=count,
        at_least=True,
        repeats=count,
        baseline="KeyError: 1 in place of a BaseException",
        details="the next step is right every time",
    )


@pytest.mark.parametrize("name", WRAPPERS)
def test_two_replicas_raise(name: str) -> None:
    class Both(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            replica = dp.current_replica()
            if replica is not None and replica.index in failing:
                raise failing[replica.index]
            return super().forward(x)

    failing: dict[int, BaseException] = {}
    model = WRAPPERS[name](Both(2, 2), ["cpu"] * 4)
    # Where something was compiled before, the replicas of a first call run in turn.
    model(torch.ones(8, 2))
    failing.update({3: ValueError("b"), 1: AbruptEnd("a")})
    with pytest.raises(AbruptEnd, match="a\nin replica 1 on device cpu") as caught:
        model(torch.ones(8, 2))
    shown = "".join(traceback.format_exception(caught.value))
    assert "in replica 3 on device cpu also failed: ValueError: b" in shown
    failing.clear()
    assert model(torch.ones(8, 2)).shape == (8, 2)
    model.close()
