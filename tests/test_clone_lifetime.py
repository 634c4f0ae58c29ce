"""Clones in time: several forwards at once, what they keep, what comes back to the original.

Each test is a case that went wrong once, or would in an obvious implementation.
"""

from __future__ import annotations

import copy
import gc
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dataparallel import DataParallel, DistributedDataParallel
from tests.models import assert_all_close, grads_of, placed, twins


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.second, self.first(x), use_reentrant=self.reentrant)
        return output


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_forward_without_gradients_does_not_spoil_an_earlier_graph(
    slots: list[str], reentrant: bool
) -> None:
    bare, inner = twins(lambda: Recomputed(reentrant), slots[0])
    model = DataParallel(inner, slots)
    x = torch.randn(9, 4, dtype=torch.double, device=slots[0])
    for module in (bare, model):
        loss = module(x).pow(2).sum()
        with torch.no_grad():
            module(x)
        loss.backward()
    assert_all_close(grads_of(model), grads_of(bare))


@pytest.mark.parametrize("wrapper", [DataParallel, DistributedDataParallel])
def test_what_the_caller_drops_is_gone_without_the_garbage_collector(
    wrapper: Any, slots: list[str]
) -> None:
    class Noted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: Tensor, scale: dict[str, Any]) -> dict[str, Tensor]:
            output = self.inner(x) * scale["by"]
            alive.extend([weakref.ref(x), weakref.ref(output)])
            return {"output": output}

    alive: list[weakref.ref[Tensor]] = []
    model = wrapper(Noted().to(slots[0]), slots)

    def forward(*, backward: bool) -> None:
        x = torch.randn(8, 3, device=slots[0], requires_grad=True)
        by = torch.randn(8, 3, device=slots[0])
        alive.extend([weakref.ref(x), weakref.ref(by)])
        output = model(x, {"by": by})["output"]
        if backward:
            output.sum().backward()

    forward(backward=True)
    alive.clear()
    gc.collect()
    gc.disable()
    try:
        forward(backward=True)
        forward(backward=False)
        with torch.no_grad():
            forward(backward=False)
        assert len(alive) == 3 * (2 + 2 * len(slots))
        assert [tensor() for tensor in alive] == [None] * len(alive)
    finally:
        gc.enable()
    model.close()


def test_nothing_that_a_forward_kept_outlives_its_owner(slots: list[str]) -> None:
    class Keeps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.kept: Tensor | None = super().forward(x)
            alive.append(weakref.ref(self.kept))
            return self.kept * 1

    alive: list[weakref.ref[Tensor]] = []
    module = Keeps(4, 4).to(slots[0])
    model = DataParallel(module, slots)
    model(torch.randn(8, 4, device=slots[0]))
    assert sum(reference() is not None for reference in alive) == 1
    module.kept = None
    assert not any(reference() is not None for reference in alive)


@pytest.mark.parametrize("buffers", ["replica0", "mean", "sync"])
def test_no_cycle_is_left(slots: list[str], buffers: Any) -> None:
    model = DataParallel(nn.BatchNorm1d(4).to(slots[0]), slots, buffers=buffers)
    model(torch.randn(8, 4, device=slots[0])).sum().backward()
    seen = weakref.ref(model.module)
    gc.collect()
    gc.disable()
    try:
        del model
        assert seen() is None
    finally:
        gc.enable()


def test_what_a_hook_writes_to_the_original_stays(slots: list[str]) -> None:
    class Notes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.note = "before"

        def forward(self, x: Tensor) -> Tensor:
            outside.note = "during"
            output: Tensor = self.layer(x)
            return output

    outside = Notes().to(slots[0])
    DataParallel(outside, slots)(torch.randn(8, 4, device=slots[0]))
    assert outside.note == "during"


def test_a_hook_that_closes_over_the_module_sees_the_replica(slots: list[str]) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(slots[0])
    net.seen = None  # type: ignore[assignment]
    net[0].register_forward_hook(lambda module, args, output: setattr(net, "seen", output))
    model = DataParallel(net, slots)
    output = model(torch.randn(8, 4, device=slots[0]))
    assert net.seen is not None and net.seen.shape == (2, 4)
    assert output.shape == (8, 4)


def test_a_deleted_attribute_is_gone(slots: list[str]) -> None:
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fresh = True

        def forward(self, x: Tensor) -> Tensor:
            if hasattr(self, "fresh"):
                del self.fresh
                return x * 0
            return x

    module = Once()
    model = DataParallel(module, slots)
    x = torch.ones(8, 2, device=slots[0])
    assert model(x).eq(0).all()
    assert not hasattr(module, "fresh")
    assert model(x).eq(1).all()


def test_a_plain_tensor_attribute_is_written_once(slots: list[str]) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x + self.calls

    module = Counts()
    module.calls = module.calls.to(slots[0])
    model = DataParallel(module, slots)
    for i in range(1, 4):
        assert model(torch.zeros(8, 2, device=slots[0])).eq(i).all()
        assert module.calls.item() == i


def test_parameters_made_in_a_forward_are_refused(slots: list[str]) -> None:
    class Lazy(nn.Module):
        weight: nn.Parameter | None

        def __init__(self) -> None:
            super().__init__()
            self.register_parameter("weight", None)

        def forward(self, x: Tensor) -> Tensor:
            if self.weight is None:
                self.weight = nn.Parameter(torch.ones(x.shape[1], device=x.device))
            return x * self.weight

    module = Lazy()
    model = DataParallel(module, slots)
    x = torch.randn(8, 3, device=slots[0])
    with pytest.raises(RuntimeError, match="forward created parameters: weight"):
        model(x)
    module(x)
    model(x).sum().backward()
    assert module.weight is not None
    torch.testing.assert_close(module.weight.grad, x.sum(0))


def test_classes_that_are_hard_to_clone(slots: list[str]) -> None:
    class Made(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.layer = nn.Linear(size, size)

        def __new__(cls, size: int) -> Made:
            made: Made = super().__new__(cls)
            return made

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.layer(x)
            return output

    bare, inner = Made(4).double().to(slots[0]), Made(4).double().to(slots[0])
    inner.load_state_dict(bare.state_dict())
    x = torch.randn(8, 4, dtype=torch.double, device=slots[0])
    torch.testing.assert_close(DataParallel(inner, slots)(x), bare(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_traced_graph_module_is_cloned(slots: list[str]) -> None:
    bare = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(slots[0])
    traced = torch.fx.symbolic_trace(copy.deepcopy(bare))
    x = torch.randn(8, 4, device=slots[0])
    torch.testing.assert_close(DataParallel(traced, slots)(x), bare(x))


def test_references_that_are_hard_to_follow(slots: list[str]) -> None:
    class Refers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.scales = {self.layer: 3.0}
            self.callback = weakref.WeakMethod(self.doubled)
            self.function = lambda x: self.layer(x)

        def doubled(self, x: Tensor) -> Tensor:
            output: Tensor = self.layer(x) * 2
            return output

        def forward(self, x: Tensor) -> Tensor:
            method = self.callback()
            assert isinstance(method, types.MethodType)
            output: Tensor = method(x) * self.scales[self.layer] + self.function(x)
            return output

    bare, inner = placed(Refers, slots[0]), placed(Refers, slots[0])
    x = torch.randn(8, 4, dtype=torch.double, device=slots[0])
    for module in (bare, DataParallel(inner, slots)):
        module(x).pow(2).sum().backward()
    assert_all_close(grads_of(inner), grads_of(bare))


def test_one_thread_evaluates_while_another_trains(slots: list[str]) -> None:
    module = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 4)).to(slots[0])
    model = DataParallel(module, slots[:2])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    failures: list[BaseException] = []
    x = torch.randn(8, 4, device=slots[0])

    def evaluate() -> None:
        try:
            for _ in range(60):
                with torch.no_grad():
                    model(x)
        except BaseException as error:
            failures.append(error)

    other = threading.Thread(target=evaluate)
    other.start()
    for _ in range(60):
        optimizer.zero_grad()
        # Not through the wrapper: parameters may not change between its forward and backward.
        module(x).pow(2).mean().backward()
        optimizer.step()
    other.join(60)
    assert not failures, failures[0]


def test_gradients_turned_on_inside_a_forward(slots: list[str]) -> None:
    class Inner(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                output = super().forward(x)
                (slope,) = torch.autograd.grad(output.pow(2).sum(), self.weight)
            return x @ slope.T

    module = Inner(4, 4).to(slots[0])
    x = torch.ones(8, 4, device=slots[0])
    with torch.no_grad():
        torch.testing.assert_close(DataParallel(module, slots[:1])(x), module(x))
        assert DataParallel(module, slots)(x).shape == (8, 4)


@pytest.mark.parametrize("wrapper", [DataParallel, DistributedDataParallel])
def test_a_step_that_another_thread_is_taking_is_not_the_replicas_doing(
    wrapper: Callable[..., nn.Module], slots: list[str]
) -> None:
    begun, in_forward, written, over = (threading.Event() for _ in range(4))

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            begun.set()
            assert in_forward.wait(60)
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1)
            written.set()
            assert over.wait(60)

    class Waits(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            in_forward.set()
            assert written.wait(60)
            return super().forward(x)

    module = Waits(4, 3).to(slots[0])
    model = wrapper(module, slots[:2])
    other = threading.Thread(target=Slow(module.parameters(), 0.1).step)
    other.start()
    assert begun.wait(60)
    try:
        with torch.no_grad():
            model(torch.ones(4, 4, device=slots[0]))
    finally:
        over.set()
        other.join(60)
