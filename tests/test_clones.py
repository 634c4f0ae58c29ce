"""Clones: what they are, what comes back from them to the original, and how long things live."""

from __future__ import annotations

import functools
import gc
import pickle
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dataparallel import DataParallel, DistributedDataParallel, current_replica, replicate
from tests.models import Shared, assert_all_close, grads_of, placed, twins

WRAPPERS = pytest.mark.parametrize("wrapper", [DataParallel, DistributedDataParallel])


# --- wrapped equals bare, whatever the module is ---------------------------------------------


class Refers(nn.Module):
    """Has references to its parts in attributes of many kinds, and a class that is hard to make."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.first = nn.Linear(size, size)
        self.plain_list = [self.first]
        self.bound = self.first.forward
        self.partial = functools.partial(torch.mul, self.first.weight)
        self.table = torch.ones(size)
        self.by_default = lambda x, first=self.first, *, by=self.first.bias: first(x) * by
        self.scales = {self.first: 3.0}
        self.callback = weakref.WeakMethod(self.doubled)
        self.function = lambda x: self.first(x)
        self.first.register_forward_hook(self.rescale)

    def __new__(cls, size: int) -> Refers:
        made: Refers = super().__new__(cls)
        return made

    def rescale(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * self.first.bias

    def doubled(self, x: Tensor) -> Tensor:
        output: Tensor = self.first(x) * 2
        return output

    def forward(self, x: Tensor) -> Tensor:
        method = self.callback()
        assert isinstance(method, types.MethodType)
        y = self.plain_list[0](x) + self.bound(x) + self.by_default(x) + self.function(x)
        y = y + self.partial(self.first.weight).sum() + self.table.to(x.dtype)
        output: Tensor = y + method(x) * self.scales[self.first]
        return output


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    "build",
    [
        lambda: Shared([0, 1, 0]),
        lambda: Refers(4),
        lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU())),
    ],
    ids=["shared", "refers", "traced"],
)
def test_kinds_of_modules(build: Any, slots: list[str]) -> None:
    bare, inner = placed(build, slots[0]), placed(build, slots[0])
    model = DataParallel(inner, slots[:3])
    x = torch.randn(6, 4, dtype=torch.double, device=slots[0])
    for module in (bare, model):
        module(x).pow(2).sum().backward()
    torch.testing.assert_close(model(x), bare(x))
    assert_all_close(grads_of(inner), grads_of(bare))


def test_a_clone_is_built_as_the_original(slots: list[str]) -> None:
    original = placed(lambda: Shared([0, 1, 0]), slots[0])
    for clone in replicate(original, slots):
        assert clone.layers[0] is clone.layers[2]  # type: ignore[index]
        assert clone.tied.weight is clone.layers[0].weight  # type: ignore[union-attr, index]
        assert dict(clone.named_parameters()).keys() == dict(original.named_parameters()).keys()
        assert all(isinstance(p, nn.Parameter) for p in clone.parameters())
        again = pickle.loads(pickle.dumps(clone))
        assert_all_close(again.state_dict().values(), clone.state_dict().values())
    lazy = nn.LazyLinear(3, device=slots[0])
    with pytest.raises(ValueError, match="uninitialized parameter"):
        replicate(lazy, slots)


@WRAPPERS
def test_replicas_that_the_user_has_taken_are_no_concern_of_a_forward(wrapper: Any) -> None:
    net = nn.Linear(3, 2)
    model = wrapper(net, ["cpu"])
    taken = model.replicate(net, model.device_ids)
    with torch.no_grad():
        net.weight.add_(1)
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    assert_all_close([model.loss(nn.MSELoss(), x, y)], [nn.functional.mse_loss(net(x), y)])
    assert_all_close([taken[0](x)], [net(x)])


# --- what comes back to the original ---------------------------------------------------------


class Notes(nn.Module):
    """Assigns, deletes, and writes plain attributes in its forward, and registers a hook."""

    aux: Tensor
    first: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.calls = 0
        self.active: nn.Module = self.layers[0]
        self.total = torch.zeros(())
        self.start = "now"
        self.handle: Any = None
        self.register_buffer("first", torch.ones(3))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        counted: list[int] = []
        if self.handle is None:
            self.handle = self.layers[1].register_forward_hook(
                lambda layer, inputs, output: layer.counted.append(len(output))
            )
        vars(self.layers[1])["counted"] = counted
        self.calls += 1
        self.total += 1
        self.count = self.count + 1
        self.active = self.layers[self.calls % 2]
        output: Tensor = self.active(x) + self.total
        replica = current_replica()
        assert replica is not None
        self.aux = output.sum() + replica.index * 1000
        assert counted == [len(x)] * (self.calls % 2)
        if hasattr(self, "start"):
            output = output + self.first
            del self.first, self.start
        return output


@WRAPPERS
def test_what_replica_0_does_to_itself_is_done_to_the_original(
    wrapper: Any, slots: list[str]
) -> None:
    original = Notes().to(slots[0])
    original.total = original.total.to(slots[0])
    model = wrapper(original, slots)
    x = torch.randn(8, 3, device=slots[0])
    for calls in (1, 2, 3):
        active = original.layers[calls % 2]
        output = model(x)
        torch.testing.assert_close(output, active(x) + calls + (calls == 1))
        assert (original.calls, original.total.item(), original.count.item()) == (calls,) * 3
        assert original.active is active
        torch.testing.assert_close(original.aux, output[:2].sum() - 6 * (calls == 1))
    assert [name for name, _ in original.named_buffers()] == ["count"]
    assert not hasattr(original, "start")
    assert len(original.layers[1]._forward_hooks) == 1
    if wrapper is DataParallel:
        original.aux.backward()
        assert original.layers[1].weight.grad is not None
    model.close()


def test_what_a_hook_writes_to_the_original_stays(slots: list[str]) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(slots[0])
    outside = types.SimpleNamespace()
    net.seen, net.note = None, "before"  # type: ignore[assignment]

    def write(module: nn.Module, args: Any, output: Tensor) -> None:
        outside.net.note = "during"
        net.seen = output

    outside.net = net
    net[0].register_forward_hook(write)
    assert DataParallel(net, slots)(torch.randn(8, 4, device=slots[0])).shape == (8, 4)
    assert net.note == "during"
    assert net.seen is not None and net.seen.shape == (2, 4), "it closes over the module: a replica"


# --- what a forward must not do, and what it may ---------------------------------------------


class Bad(nn.Linear):
    how = ""

    def forward(self, x: Tensor) -> Tensor:
        replica = current_replica()
        if self.how == "clamps":
            with torch.no_grad():
                self.weight.clamp_(-0.01, 0.01)
        if self.how == "creates":
            self.scale = nn.Parameter(torch.ones(x.shape[1], device=x.device))
        if self.how == "fails" and replica is not None and replica.index == 1:
            raise KeyError("lost")
        return super().forward(x)


@WRAPPERS
@pytest.mark.parametrize(
    ("how", "error", "match"),
    [
        ("clamps", RuntimeError, "changed parameters in place: weight"),
        ("creates", RuntimeError, "forward created parameters: scale"),
        ("fails", KeyError, r"(?s)lost.*in replica 1 on device"),
    ],
)
def test_a_forward_that_fails_leaves_nothing_behind(
    wrapper: Any, slots: list[str], how: str, error: type[Exception], match: str
) -> None:
    module = Bad(3, 3).to(slots[0])
    module.how = how
    model = wrapper(module, slots)
    x = torch.randn(8, 3, device=slots[0])
    with pytest.raises(error, match=match):
        model(x)
    module.how = ""
    model(x).sum().backward()
    found = grads_of(module)
    module.zero_grad()
    torch.testing.assert_close(model(x), module(x))
    module(x).sum().backward()
    assert_all_close(found, grads_of(module))
    model.close()


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


@WRAPPERS
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


# --- how long things live --------------------------------------------------------------------


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
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


@WRAPPERS
@pytest.mark.parametrize("buffers", ["replica0", "mean", "sync"])
def test_what_the_caller_drops_is_gone_without_the_garbage_collector(
    wrapper: Any, slots: list[str], buffers: Any
) -> None:
    class Noted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

        def forward(self, x: Tensor, scale: dict[str, Any]) -> dict[str, Tensor]:
            self.kept: Tensor | None = self.inner(x)
            output = self.kept * scale["by"]
            alive.extend([weakref.ref(x), weakref.ref(self.kept), weakref.ref(output)])
            return {"output": output}

    alive: list[weakref.ref[Tensor]] = []
    model = wrapper(Noted().to(slots[0]), slots, buffers=buffers)
    module = weakref.ref(model.module)

    def forward(*, backward: bool) -> None:
        x = torch.randn(8, 3, device=slots[0], requires_grad=True)
        by = torch.randn(8, 3, device=slots[0])
        alive.extend([weakref.ref(x), weakref.ref(by)])
        output = model(x, {"by": by})["output"]
        if backward:
            output.sum().backward()
        del output
        # What the module keeps is that of replica 0, and its owner's to drop.
        assert model.module.kept is not None
        model.module.kept = None

    forward(backward=True)
    alive.clear()
    gc.collect()
    gc.disable()
    try:
        forward(backward=True)
        forward(backward=False)
        with torch.no_grad():
            forward(backward=False)
        assert len(alive) == 3 * (2 + 3 * len(slots))
        assert [tensor() for tensor in alive] == [None] * len(alive)
        model.close()
        if wrapper is DataParallel:
            del model, forward
            assert module() is None, "a cycle holds the wrapper"
    finally:
        gc.enable()
