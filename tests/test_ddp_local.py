"""One process with several replicas against the bare module: changes, hooks, errors, memory."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import DebugLevel, get_debug_level, set_debug_level

import dataparallel as dp
from dataparallel.reducer import round as reducer_round
from dataparallel.reducer.buckets import local_sum
from tests.test_ddp_graphs import Net, backward, batch, grads, two_layers

Wrap = Callable[[nn.Module], Any]
Case = Callable[[Wrap, str], Sequence[Tensor | None]]


def step(model: Any, net: nn.Module, device: str, seed: int) -> list[Tensor | None]:
    output = model(batch(device, seed))
    backward(output.pow(2).sum())
    return [output.detach(), *grads(net)]


def other_memory(wrap: Wrap, device: str) -> Sequence[Tensor | None]:
    net = Net(device, two_layers)
    model = wrap(net)
    results = step(model, net, device, 0)
    first: Any = net.layers[0]
    second: Any = net.layers[1]
    weight = first.weight
    weight.data = torch.full_like(weight, 0.1)
    results += step(model, net, device, 1)
    second.bias.data.add_(2)
    results += step(model, net, device, 2)
    net.zero_grad()
    weight.data = weight.data.t()
    return results + step(model, net, device, 3)


def assigned_state(wrap: Wrap, device: str) -> Sequence[Tensor | None]:
    net = Net(device, two_layers)
    model = wrap(net)
    step(model, net, device, 0)
    state = {name: torch.full_like(value, 0.05) for name, value in net.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return step(model, net, device, 1) + step(model, net, device, 2)


def replaced_parts(wrap: Wrap, device: str) -> Sequence[Tensor | None]:
    net = Net(device, two_layers)
    model = wrap(net)
    step(model, net, device, 0)
    net.layers[0].weight = nn.Parameter(torch.full((6, 6), 0.1, dtype=torch.float64).to(device))
    results = step(model, net, device, 1)
    torch.manual_seed(1)
    net.layers[1] = nn.Sequential(nn.Tanh(), nn.Linear(6, 6, dtype=torch.float64).to(device))
    return results + step(model, net, device, 2)


def replaced_module(wrap: Wrap, device: str) -> Sequence[Tensor | None]:
    """As in bagging, where one wrapper trains one network after another."""
    net, other = Net(device, two_layers), Net(device, two_layers)
    model = wrap(net)
    results = step(model, net, device, 0)
    if model is net:
        return results + step(other, other, device, 1)
    model.module = other
    return results + step(model, other, device, 1)


def frozen_and_thawed(wrap: Wrap, device: str) -> Sequence[Tensor | None]:
    net = Net(device, two_layers)
    net.layers[1].requires_grad_(False)
    model = wrap(net)
    results = step(model, net, device, 0)
    net.layers[0].requires_grad_(False)
    results += step(model, net, device, 1)
    net.zero_grad()
    results += step(model, net, device, 2)
    net.requires_grad_(True)
    results += step(model, net, device, 3)
    net.requires_grad_(False)
    output = model(batch(device))
    assert not output.requires_grad
    return [*results, output]


def another_dtype(wrap: Wrap, device: str) -> Sequence[Tensor | None]:
    net = Net(device, two_layers)
    model = wrap(net)
    step(model, net, device, 0)
    model.zero_grad()
    model.float()
    output = model(batch(device).float())
    backward(output.pow(2).sum())
    return [output.detach(), *grads(net)]


def hooks_on_parameters(wrap: Wrap, device: str) -> Sequence[Tensor | None]:
    """Each sees what there is, and nothing of a parameter that was not used."""
    net = Net(device, lambda net, x, k: net.layers[k](x))
    seen: dict[str, list[Tensor]] = {}

    def tripled(name: str) -> Callable[[Tensor], Tensor]:
        def hook(grad: Tensor) -> Tensor:
            seen.setdefault(name, []).append(grad.clone())
            return grad * 3

        return hook

    def accumulated(name: str) -> Callable[[nn.Parameter], None]:
        return lambda p: seen.setdefault(name, []).append(p.grad.clone())  # type: ignore[union-attr]

    for name, parameter in net.named_parameters():
        parameter.register_hook(tripled(f"{name} before"))
        parameter.register_post_accumulate_grad_hook(accumulated(f"{name} after"))
    model = wrap(net)
    for seed, k in enumerate((0, 1, 0, 2)):
        backward(model(batch(device, seed), k).pow(2).sum())
    # The wrapper has nothing to do with these.
    backward(sum((p.pow(2).sum() for p in net.parameters()), torch.zeros((), device=device)))
    assert "scale before" in seen
    return [*grads(net), *(value for name in sorted(seen) for value in seen[name])]


def an_optimizer_in_a_hook(wrap: Wrap, device: str) -> Sequence[Tensor | None]:
    net = Net(device, lambda net, x, k: net.layers[k](x))
    for parameter in net.parameters():
        optimizer = torch.optim.SGD([parameter], 0.1, momentum=0.9)

        def step_it(_: nn.Parameter, optimizer: torch.optim.SGD = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step_it)
    model = wrap(net)
    for seed, k in enumerate((0, 1, 0, 2)):
        backward(model(batch(device, seed), k).pow(2).sum())
    return [*(p.detach() for p in net.parameters()), *grads(net)]


def grad_is_the_users_own(wrap: Wrap, device: str) -> Sequence[Tensor | None]:
    net = Net(device, two_layers)
    model = wrap(net)
    results = step(model, net, device, 0)
    first, second, third, fourth = [p for layer in net.layers[:2] for p in layer.parameters()]
    first.grad, second.grad = torch.ones_like(first), None
    assert third.grad is not None and fourth.grad is not None
    third.grad = third.grad * 2
    fourth.grad.mul_(0.5)
    results += step(model, net, device, 1)
    results += step(model, net, device, 2)
    first.grad, third.grad = third.grad, first.grad
    return results + step(model, net, device, 3)


def small_batches(wrap: Wrap, device: str) -> Sequence[Tensor | None]:
    net = Net(device, two_layers)
    model, results = wrap(net), []
    for size in (7, 1, 2, 5, 0, 3):
        backward(model(batch(device, size, size)).pow(2).sum())
        results += grads(net)
    return results


def other_forwards_between(wrap: Wrap, device: str) -> Sequence[Tensor | None]:
    net = Net(device, two_layers)
    model, results = wrap(net), []
    for seed in range(3):
        output = model(batch(device, seed))
        with torch.no_grad():
            results.append(model(batch(device, 9)))
        with torch.inference_mode():
            results.append(model(batch(device, 8, 3)).clone())
        backward(output.pow(2).sum())
        results += grads(net)
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad * 0.01)
    return results


CASES: list[Case] = [
    other_memory,
    assigned_state,
    replaced_parts,
    replaced_module,
    frozen_and_thawed,
    another_dtype,
    hooks_on_parameters,
    an_optimizer_in_a_hook,
    grad_is_the_users_own,
    small_batches,
    other_forwards_between,
]


@pytest.mark.parametrize(("num_replicas", "view"), [(1, False), (3, True)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_training_is_that_of_the_bare_module(
    case: Case, slots: list[str], num_replicas: int, view: bool
) -> None:
    def wrap(module: nn.Module) -> Any:
        places = slots[:num_replicas]
        return dp.DistributedDataParallel(module, places, gradient_as_bucket_view=view)

    expected = case(lambda module: module, slots[0])
    got = case(wrap, slots[0])
    assert len(got) == len(expected)
    for i, (mine, bare) in enumerate(zip(got, expected, strict=True)):
        assert (mine is None) == (bare is None), i
        if mine is not None and bare is not None:
            torch.testing.assert_close(mine.cpu(), bare.cpu(), msg=f"result {i}")


# --- errors --------------------------------------------------------------------------------------


class FailInBackward(torch.autograd.Function):
    """Raises in backward where the first number of the chunk is above 10."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, error: type[BaseException] | None) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.error is not None:
            raise ctx.error("on purpose")
        return grad, None


@pytest.mark.parametrize("view", [False, True], ids=["steal", "view"])
@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["replica 0", "replica 1", "between"])
def test_the_step_after_a_failed_backward_is_right(
    view: bool, error: type[BaseException], where: str
) -> None:
    fails: dict[str, type[BaseException] | None] = {"error": None}

    def forward(net: Any, x: Tensor) -> Any:
        index = dp.current_replica()
        mine = index is not None and where == f"replica {index.index}"
        hidden = FailInBackward.apply(net.layers[0](x), fails["error"] if mine else None)
        return net.layers[1](hidden)

    net = Net("cpu", forward)
    model = dp.DistributedDataParallel(net, ["cpu", "cpu"], gradient_as_bucket_view=view)

    def loss(model: nn.Module, seed: int, error: type[BaseException] | None) -> Tensor:
        fails["error"] = error
        hidden = FailInBackward.apply(
            model(batch("cpu", seed)), error if where == "between" else None
        )
        result: Tensor = model(hidden).pow(2).sum()
        return result

    for seed in range(2):
        backward(loss(model, seed, None))
    with pytest.raises(error, match="on purpose"):
        backward(loss(model, 2, error))
    net.zero_grad()
    backward(loss(model, 3, None))
    got = grads(net)
    net.zero_grad()
    backward(loss(net, 3, None))
    for mine, bare in zip(got, grads(net), strict=True):
        assert (mine is None) == (bare is None)
        if mine is not None:
            torch.testing.assert_close(mine, bare)


# --- memory and copies ---------------------------------------------------------------------------


@pytest.mark.parametrize("view", [False, True], ids=["steal", "view"])
def test_nothing_is_left_of_a_step(slots: list[str], view: bool) -> None:
    net = Net(slots[0], two_layers)
    model = dp.DistributedDataParallel(net, slots[:2], gradient_as_bucket_view=view)

    def count() -> int:
        gc.collect()
        return sum(issubclass(type(obj), Tensor) for obj in gc.get_objects())

    counts = []
    for seed in range(40):
        output = model(batch(slots[0], seed))
        alive = weakref.ref(output.grad_fn)
        backward(output.pow(2).sum() + model(batch(slots[0])).sum())
        net.zero_grad()
        del output
        assert alive() is None
        if seed in (10, 39):
            counts.append(count())
    assert counts[1] <= counts[0]
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_copies_train_apart() -> None:
    net = Net("cpu", two_layers)
    model = dp.DistributedDataParallel(net, ["cpu", "cpu"])
    backward(model(batch("cpu")).sum())
    copied = copy.deepcopy(model)
    copied.zero_grad()
    before = grads(net)
    backward(copied(batch("cpu")).sum())
    for mine, other, now in zip(before, grads(copied.module), grads(net), strict=True):
        assert (mine is None) == (other is None) == (now is None)
        if mine is not None:
            torch.testing.assert_close(other, mine)
            assert now is not None and torch.equal(now, mine)
    plain = nn.Sequential(nn.Linear(6, 6, dtype=torch.float64))
    loaded = pickle.loads(pickle.dumps(dp.DistributedDataParallel(plain, ["cpu", "cpu"])))
    backward(loaded(batch("cpu")).sum())
    backward(plain(batch("cpu")).sum())
    torch.testing.assert_close(grads(loaded.module), grads(plain))


def test_replicas_stay_equal_on_devices_of_their_own() -> None:
    devices = ["virtual:0", "virtual:1", "virtual:2"]
    net = Net(devices[0], two_layers)
    model = dp.DistributedDataParallel(net, devices)
    optimizer = torch.optim.SGD(net.parameters(), 0.001, momentum=0.9)
    for seed in range(60):
        backward(model(batch(devices[0], seed)).pow(2).sum())
        optimizer.step()
        optimizer.zero_grad()
    model.check_replicas()


def test_a_wrapper_that_is_dropped_leaves_nothing_behind(slots: list[str]) -> None:
    model = dp.DistributedDataParallel(Net(slots[0], two_layers), slots[:2])
    for _ in range(3):
        backward(model(batch(slots[0], 0)).sum())
    reducer = weakref.ref(model.reducer)
    leaf = weakref.ref(model._training.leaves.rows[1][0])
    del model
    gc.collect()
    assert reducer() is None
    assert leaf() is None


def test_a_module_without_values_is_refused() -> None:
    with pytest.raises(ValueError, match="uninitialized parameter"):
        dp.DistributedDataParallel(nn.LazyLinear(3), ["cpu", "cpu"])


# The compiler itself warns of what it does.
@pytest.mark.filterwarnings("ignore")
def test_compiled_autograd() -> None:
    net, bare = Net("cpu", two_layers), Net("cpu", two_layers)
    model = dp.DistributedDataParallel(net, ["cpu", "cpu"])
    backward(bare(batch("cpu", 0)).pow(2).sum())
    from torch._dynamo import compiled_autograd

    with compiled_autograd._enable(torch.compile(backend="eager")):
        for _ in range(3):
            net.zero_grad()
            backward(model(batch("cpu", 0)).pow(2).sum())
    for mine, other in zip(net.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


# Of torch 2.11 itself, whenever a profile begins.
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")
def test_profilers_show_each_reduction() -> None:
    model = dp.DistributedDataParallel(Net("cpu", two_layers), ["cpu", "cpu"])
    # The first backward tells the order in which the buckets are made anew.
    backward(model(batch("cpu", 0)).sum())
    experimental = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(experimental_config=experimental) as profile:
        backward(model(batch("cpu", 0)).sum())
    names = {event.key for event in profile.key_averages()}
    assert {f"reduce {bucket.name}" for bucket in model.reducer.buckets.all} <= names


class WaitInBackward(torch.autograd.Function):
    """Goes on in backward when an event is set."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, event: threading.Event) -> Tensor:
        ctx.event = event
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        assert ctx.event.wait(20)
        return grad, None


def test_buckets_are_summed_in_order_by_one_thread_at_a_time() -> None:
    summing, seen = threading.Event(), list[str]()
    summing.set()

    def forward(net: Any, x: Tensor) -> Any:
        return net.layers[1](WaitInBackward.apply(net.layers[0](x), summing))

    def slowly(rows: Any, home: torch.device) -> Any:
        summing.set()
        seen.append("begin")
        # The replica that has waited comes to the next buckets meanwhile.
        time.sleep(0.1)
        seen.append("end")
        return local_sum(rows, home)

    net, bare = Net("cpu", forward), Net("cpu", forward)
    model = dp.DistributedDataParallel(net, ["cpu", "cpu"], bucket_cap_mb=0.0001)
    # The first backward tells the order.
    backward(model(batch("cpu", 0)).sum())
    net.zero_grad()
    backward(bare(batch("cpu", 1)).sum())
    summing.clear()
    with mock.patch.object(reducer_round, "local_sum", slowly):
        backward(model(batch("cpu", 1)).sum())
    assert seen == ["begin", "end"] * len(model.reducer.buckets.all)
    torch.testing.assert_close(grads(net), grads(bare))


class OnlyFirst(nn.ModuleList):
    """Uses one of its layers."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self[0](x)
        return output


@pytest.mark.parametrize("level", [DebugLevel.OFF, DebugLevel.DETAIL])
def test_messages_name_three_parameters_or_all(level: DebugLevel) -> None:
    before = get_debug_level()
    net = OnlyFirst([nn.Linear(2, 2) for _ in range(4)])
    model = dp.DistributedDataParallel(net, ["cpu"] * 2, find_unused_parameters=False)
    shown = "1.weight, 1.bias, 2.weight and 3 more (TORCH_DISTRIBUTED_DEBUG=DETAIL names all)"
    if level == DebugLevel.DETAIL:
        shown = "1.weight, 1.bias, 2.weight, 2.bias, 3.weight, 3.bias"
    set_debug_level(level)
    try:
        with pytest.raises(RuntimeError, match=re.escape(f": {shown}. Leave")):
            model(torch.ones(2, 2)).sum().backward()
    finally:
        set_debug_level(before)
    model.close()


class ReplacesAParameter(dp.DistributedDataParallel[nn.Linear]):
    """Does at the last moment what belongs between two forwards."""

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        self.module.weight = nn.Parameter(torch.ones(1, 2))
        return super().scatter(inputs, kwargs, device_ids)


def test_a_parameter_that_is_replaced_within_the_forward_is_refused() -> None:
    model = ReplacesAParameter(nn.Linear(2, 1), ["cpu", "cpu"])
    with pytest.raises(RuntimeError, match="replaced while its forward was being prepared"):
        model(torch.ones(4, 2))
    model.close()


class _Added(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.ones(shape).flatten()) for _ in range(2))
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0] == 0:
            return x.sum().requires_grad_().reshape(1, 1).expand(len(x), self.shape[1])
        return x @ (self.first.view(self.shape) + self.second.view(self.shape))


@pytest.mark.parametrize("unused", [False, True], ids=["used", "unused on the first replica"])
@pytest.mark.parametrize("cap", [25, 1e-6], ids=["one bucket", "two buckets"])
def test_parameters_whose_views_are_added(cap: float, unused: bool) -> None:
    """The engine gives both one gradient, in one memory."""
    bare = _Added(3, 2)
    net = copy.deepcopy(bare)
    model = dp.DistributedDataParallel(net, ["cpu"] * 3, bucket_cap_mb=cap)
    x = torch.randn(7, 3)
    x[0, 0] *= not unused
    for _ in range(3):
        model(x).pow(2).sum().backward()
        # The first of three chunks.
        bare(x[3:] if unused else x).pow(2).sum().backward()
        for mine, expected in zip(net.parameters(), bare.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, expected.grad)
        net.zero_grad()
        bare.zero_grad()
