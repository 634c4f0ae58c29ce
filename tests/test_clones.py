"""Clones: what they are, what comes back from them to the original, and how long things live."""

from __future__ import annotations

import copy
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

from dataparallel import DataParallel, current_replica, replicate, virtual
from tests.free_threading import settle
from tests.models import WRAPPERS, assert_all_close, compare, grads_of, placed

# --- wrapped equals bare, whatever the module is ---------------------------------------------


class Shared(nn.Module):
    """One layer in two places, and one weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        first = nn.Linear(4, 4)
        self.layers = nn.Sequential(first, nn.Tanh(), nn.Linear(4, 4), first)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = first.weight

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.tied(self.layers(x).tanh())
        return output


class Refers(nn.Module):
    """Has references to its parts in attributes of many kinds, and a class that is hard to make."""

    def __init__(self, size: int) -> None:
        super().__init__()
        first = self.first = nn.Linear(size, size)
        self.calls: list[Callable[..., Tensor]] = [
            first,
            first.forward,
            lambda x: first(x),
            lambda x, layer=first, *, by=first.bias: layer(x) * by,
            functools.partial(nn.functional.linear, weight=first.weight),
        ]
        self.table = torch.ones(size)
        self.scales = {first: 3.0}
        self.callback = weakref.WeakMethod(self.doubled)
        first.register_forward_hook(self.rescale)

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
        assert method is not None
        y = torch.stack([call(x) for call in self.calls]).sum(0) + self.table.to(x.dtype)
        return y.tanh() + method(x) * self.scales[self.first]


@pytest.mark.in_pairs
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    "build",
    [
        Shared,
        lambda: Refers(4),
        lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh())),
    ],
    ids=["shared", "refers", "traced"],
)
@pytest.mark.parametrize("samples", [0, 2, 7])
def test_derivatives_of_both_orders(build: Any, slots: list[str], samples: int) -> None:
    # A traced module cannot be copied together with its hooks.
    bare, inner = placed(build, slots[0]), placed(build, slots[0])
    x = torch.randn(samples, 4, dtype=torch.double, device=slots[0])
    results: list[list[Tensor | None]] = []
    for module in (bare, DataParallel(inner, slots[:3])):
        leaf = x.clone().requires_grad_()
        # On virtual devices, nothing happens before it is waited for.
        with virtual.strict_mode(module is not bare and slots[0] != "cpu"):
            output = module(leaf)
            loss = output.pow(2).sum()
            first = torch.autograd.grad(
                loss, [leaf, *module.parameters()], create_graph=True, allow_unused=True
            )
            sum((g.pow(2).sum() for g in first if g is not None), loss).backward()
        results.append([output, *first, leaf.grad, *grads_of(module)])
    assert_all_close(results[1], results[0])


def test_a_clone_is_built_as_the_original(slots: list[str]) -> None:
    original = placed(Shared, slots[0])
    for clone in replicate(original, slots):
        assert clone.layers[0] is clone.layers[3]  # type: ignore[index]
        assert clone.tied.weight is clone.layers[0].weight  # type: ignore[union-attr, index]
        assert dict(clone.named_parameters()).keys() == dict(original.named_parameters()).keys()
        assert all(isinstance(p, nn.Parameter) for p in clone.parameters())
        again = pickle.loads(pickle.dumps(clone))
        assert_all_close(again.state_dict().values(), clone.state_dict().values())
    lazy = nn.LazyLinear(3, device=slots[0])
    with pytest.raises(ValueError, match="uninitialized parameter"):
        replicate(lazy, slots)


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
        self.register_buffer("first", torch.ones(3))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        seen: list[int] = []
        vars(self.layers[1])["seen"] = seen
        if self.calls == 0:
            self.layers[1].register_forward_hook(lambda layer, i, out: layer.seen.append(len(out)))
        self.calls += 1
        self.count = self.count + 1
        self.active = self.layers[self.calls % 2]
        output: Tensor = self.active(x) + self.count
        assert seen == [len(x)] * (self.calls % 2)
        self.aux = output.sum()
        if hasattr(self, "first"):
            output = output + self.first
            del self.first
        return output


@WRAPPERS
def test_what_replica_0_does_to_itself_is_done_to_the_original(
    wrapper: Any, slots: list[str]
) -> None:
    original = Notes().to(slots[0])
    # A hook's write to the original stays.
    outside = types.SimpleNamespace(net=original)
    original.note = "before"  # type: ignore[assignment]
    original.register_forward_hook(lambda *_: setattr(outside.net, "note", "during"))
    model = wrapper(original, slots)
    x = torch.randn(8, 3, device=slots[0])
    for calls in (1, 2, 3):
        active = original.layers[calls % 2]
        output = model(x)
        torch.testing.assert_close(output, active(x) + calls + (calls == 1))
        assert (original.calls, original.count.item()) == (calls, calls)
        assert original.active is active and original.note == "during"
        # A result of each replica, without what it added to its output later.
        sums = output.view(4, 6).sum(1) - 6 * (calls == 1)
        torch.testing.assert_close(original.aux, sums)
    assert [name for name, _ in original.named_buffers()] == ["count"]
    assert len(original.layers[1]._forward_hooks) == 1
    original.aux.sum().backward()
    assert original.layers[1].weight.grad is not None
    model.close()


class Counting(nn.Linear):
    scale = 1.0
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        # A copy does not take the clones along.
        assert pickle.loads(pickle.dumps(self)).calls == self.calls
        return super().forward(x) * self.scale


@WRAPPERS
def test_an_override_may_change_the_clones_and_return_other_containers(
    wrapper: Any, slots: list[str]
) -> None:
    """The module gets what replica 0 does to itself in the forward, and nothing of other clones."""

    class Doubling(wrapper):  # type: ignore[misc]
        def replicate(self, module: Any, device_ids: Any) -> Any:
            super().replicate(module, device_ids)
            replicas = super().replicate(module, device_ids)
            for replica in replicas:
                replica.scale = 2.0
            return tuple(replicas)

    module = Counting(3, 2).to(slots[0])
    model, x = Doubling(module, slots), torch.randn(8, 3, device=slots[0])
    for calls in (1, 2, 3):
        torch.testing.assert_close(
            model(x), nn.functional.linear(x, 2 * module.weight, 2 * module.bias)
        )
        assert module.calls == calls
        with torch.no_grad():
            module.weight.mul_(1.5)
        if wrapper is DataParallel:
            # Nor from those that no forward uses.
            own = model.replicate(module, slots)
            torch.testing.assert_close(own[-1].weight.to(slots[0]), module.weight)


# --- what a forward must not do, and what it may ---------------------------------------------


class Bad(nn.Linear):
    how = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "clamps":
            with torch.no_grad():
                self.weight.clamp_(-0.01, 0.01)
        if self.how == "creates":
            self.scale = nn.Parameter(torch.ones(x.shape[1], device=x.device))
        return super().forward(x)


@pytest.mark.in_pairs
@WRAPPERS
@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("clamps", "changed parameters in place: weight"),
        ("creates", "forward created parameters: scale"),
    ],
)
def test_a_forward_that_is_refused_leaves_nothing_behind(
    wrapper: Any, slots: list[str], how: str, match: str
) -> None:
    module = Bad(3, 3).to(slots[0])
    module.how = how
    model = wrapper(module, slots)
    x = torch.randn(8, 3, device=slots[0])
    with pytest.raises(RuntimeError, match=match):
        model(x)
    module.how = ""
    compare(model, module, x)
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

    def wait(*_: Any) -> None:
        in_forward.set()
        assert written.wait(60)

    module = nn.Linear(4, 3).to(slots[0])
    model, x = wrapper(module, slots[:2]), torch.ones(4, 4, device=slots[0])
    # From the first forward of the process on, steps of optimizers are known.
    model(x)
    module.register_forward_pre_hook(wait)
    other = threading.Thread(target=Slow(module.parameters(), 0.1).step)
    other.start()
    assert begun.wait(60)
    try:
        with torch.no_grad():
            model(x)
    finally:
        over.set()
        other.join(60)


# --- how long things live --------------------------------------------------------------------


@pytest.mark.in_pairs
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
        x, by = torch.randn(2, 8, 3, device=slots[0], requires_grad=True).unbind(0)
        alive.extend([weakref.ref(x), weakref.ref(by)])
        output = model(x, {"by": by})["output"]
        if backward:
            output.sum().backward()
        del output
        # The module keeps the value of replica 0, which is its owner's to drop.
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
        settle()
        assert [tensor() for tensor in alive] == [None] * len(alive)
        model.close()
        if wrapper is DataParallel:
            del model, forward
            assert module() is None, "a cycle holds the wrapper"
    finally:
        gc.enable()


# --- buffers; see test_replica_buffers.py, too ------------------------------------------------


@pytest.mark.in_pairs
@WRAPPERS
@pytest.mark.parametrize("failing", [0, 2])
def test_a_forward_that_failed_leaves_no_statistics_behind(
    slots: list[str], wrapper: Any, failing: int
) -> None:
    armed = False

    def fail(*_: Any) -> None:
        replica = current_replica()
        if armed and replica is not None and replica.index == failing:
            raise ValueError("not now")

    net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).to(slots[0])
    twin = copy.deepcopy(net)
    net.register_forward_hook(fail)
    model, reference = (wrapper(module, slots[:3], buffers="mean") for module in (net, twin))
    x = torch.randn(24, 6, device=slots[0])
    for armed in (True, False, True, False):
        if armed:
            with pytest.raises(ValueError, match="not now"):
                model(x)
            continue
        model(x)
        reference(x)
        assert_all_close(list(net.buffers())[:2], list(twin.buffers())[:2])


@pytest.mark.parametrize("buffers", ["replica0", "mean", "sync"])
def test_an_empty_batch(slots: list[str], buffers: Any) -> None:
    bare = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).to(slots[0])
    model = DataParallel(copy.deepcopy(bare), slots, buffers=buffers)
    x = torch.randn(0, 2, device=slots[0])
    assert model(x).shape == bare(x).shape == (0, 3)
    assert_all_close(model.buffers(), bare.buffers())
