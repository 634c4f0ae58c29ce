"""Shards on other devices follow what happens to the parameters, and survive failures."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from dataparallel import DataParallel, ShardedOptimizer, virtual
from dataparallel.devices import current_stream, memory_allocated, use_stream, wait_stream
from tests.models import placed
from tests.optimizer_cases import (
    ADAMW,
    Twins,
    assert_same,
    build,
)

# --- changes from outside, and what the wrapper sees ----------------------------------------------


def load(module: nn.Module) -> None:
    module.load_state_dict({name: value * 2 for name, value in module.state_dict().items()})


def clip(module: nn.Module) -> None:
    for p in module.parameters():
        p.data.clamp_(-0.01, 0.01)


def write_one_element(module: nn.Module) -> None:
    module[4].bias.data[1] += 1e-3  # type: ignore[index]


def replace_storage(module: nn.Module) -> None:
    for p in module.parameters():
        p.data = p.data.flip(0).clone()


def change_shape(module: nn.Module) -> None:
    module[0].weight.data = torch.ones_like(module[0].weight)[:5]  # type: ignore[index]


def change_dtype(module: nn.Module) -> None:
    module.double()


CHANGES = [load, clip, write_one_element, replace_storage, change_shape, change_dtype]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("before", [0, 2])
def test_changes_between_steps_are_carried_in(
    slots: list[str], change: Callable[[nn.Module], None], before: int
) -> None:
    twins = Twins(slots, torch.optim.SGD, lr=0.1)
    twins.steps(before)
    for module in (twins.bare, twins.module):
        change(module)
    twins.steps(2)
    twins.assert_equal()


def test_parameters_that_move_to_another_device() -> None:
    twins = Twins(["virtual:0", "virtual:1", "virtual:2"])
    for place in ("virtual:1", "virtual:3"):
        twins.steps(1)
        for p, q in twins.pairs():
            p.grad = q.grad = None
            p.data, q.data = p.data.to(place), q.data.to(place)
        # Its state comes along in this way only.
        twins.plain.load_state_dict(twins.plain.state_dict())
        twins.steps(2)
        twins.assert_equal()


class Spread(nn.Module):
    """Is on several devices by itself, so that a wrapper of it names none."""

    device_ids = None

    def __init__(self, places: list[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(9 + i, 5, device=d) for i, d in enumerate(places))


def test_a_module_that_is_spread_over_devices() -> None:
    twins = Twins(["virtual:0"])
    places = ["virtual:1", "virtual:2", "virtual:1"]
    twins.module = Spread(places)
    twins.bare = copy.deepcopy(twins.module)
    twins.plain = ADAMW(twins.bare.parameters())
    twins.sharded = ShardedOptimizer(ADAMW, twins.module)
    twins.steps(3)
    twins.assert_equal()
    # Some of the parameters have their state on the other device than they are on.
    at = {(str(p.device), str(twins.sharded.device_of(p))) for p in twins.module.parameters()}
    assert {there for _, there in at} == set(places)
    assert len(at) > 2


def test_between_steps_other_devices_hold_nothing_but_state() -> None:
    twins = Twins(["virtual:0", "virtual:1"], torch.optim.SGD, lr=0.1)
    other = torch.device("virtual:1")
    before = memory_allocated(other)
    twins.steps(2)
    assert any(twins.sharded.device_of(p) == other for p in twins.module.parameters())
    assert memory_allocated(other) == before


class DataOptimizer(torch.optim.SGD):
    """Writes through ``.data``, which bumps no version counter."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad, alpha=-group["lr"])


def test_a_step_counts_as_a_change_of_the_parameters(slots: list[str]) -> None:
    twins = Twins(slots, DataOptimizer)
    x = torch.randn(8, 5, device=slots[0])
    for _ in range(3):
        torch.testing.assert_close(twins.model(x), twins.bare(x))
        twins.steps(1)
    assert_same(list(twins.bare.parameters()), list(twins.module.parameters()))


def test_streams_that_defer() -> None:
    slots = [f"virtual:{i}" for i in range(4)]
    twins = Twins(slots)
    with contextlib.ExitStack() as stack:
        stack.enter_context(virtual.strict_mode())
        # Everything of the caller is on side streams, on which the shards have to follow.
        for slot in slots:
            stream = torch.Stream(slot)
            wait_stream(stream, current_stream(torch.device(slot)))
            stack.enter_context(use_stream(stream))
        for _ in range(3):
            twins.steps(1)
        twins.assert_equal()


# --- failures ------------------------------------------------------------------------------------


class Picky(torch.optim.SGD):
    """Refuses a gradient that is not finite; the parameters before it are updated."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if not p.grad.isfinite().all():
                    raise ArithmeticError("not finite")
                p.data.add_(p.grad)


def test_a_failed_shard_and_the_step_after_it(slots: list[str]) -> None:
    twins = Twins(slots, Picky)
    for p, q in twins.pairs():
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    last = list(twins.module.parameters())[-1]
    assert last.grad is not None
    last.grad.fill_(torch.inf)
    before = [p.detach().clone() for p in twins.module.parameters()]
    places = [slots.index(str(twins.sharded.device_of(p))) for p in twins.module.parameters()]
    with pytest.raises(ArithmeticError, match="not finite"):
        twins.sharded.step()
    for p, old, place in zip(twins.module.parameters(), before, places, strict=True):
        # The shards before it have finished, those behind it have not begun.
        if place != places[-1] or place:
            assert torch.equal(p, old + 1 if place < places[-1] else old)
    # It goes on with what the parameters are now.
    twins.bare.load_state_dict(twins.module.state_dict())
    twins.steps(2)
    twins.assert_equal()


class SumOfAll(Optimizer):
    """Nobody knows whether it looks at one parameter at a time."""


def test_what_cannot_be_sharded_is_refused(slots: list[str]) -> None:
    model = DataParallel(placed(build, slots[0], torch.float), slots)
    for optimizer_class in (torch.optim.LBFGS, SumOfAll):
        match = (
            rf"{optimizer_class.__name__}\.step cannot be done in parts: .* such as torch\.optim"
        )
        with pytest.raises(ValueError, match=match):
            ShardedOptimizer(optimizer_class, model)
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        ShardedOptimizer(ADAMW, model, lr=-1)
    with pytest.raises(AttributeError, match="no attribute 'device_ids'"):
        ShardedOptimizer(ADAMW, model.module)
    with pytest.raises(TypeError, match="params argument given to the optimizer"):
        ShardedOptimizer(ADAMW, model, params=torch.ones(2))
    with pytest.raises(KeyError, match="tensor"):
        ShardedOptimizer(ADAMW, model).device_of(torch.ones(3))
