"""Modules with collectives over replicas: wrapped equals bare on the whole batch."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dataparallel import DataParallel, DistributedDataParallel
from dataparallel.collectives.local_group import LocalGroup
from dataparallel.collectives.operations import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    ReduceScatter,
)
from tests.models import assert_all_close, grads_of
from tests.replica_cases import PLACES

GROUP = LocalGroup(30)
WRAPPERS: dict[str, Callable[..., Any]] = {"dp": DataParallel, "ddp": DistributedDataParallel}


@pytest.fixture(params=WRAPPERS)
def wrap(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return WRAPPERS[request.param]


@pytest.fixture(params=PLACES)
def places(request: pytest.FixtureRequest) -> list[str]:
    return PLACES[request.param]


def there_and_back(x: Tensor) -> Tensor:
    """Everything to all and back, which is the identity."""
    n = GROUP.size()
    equal = ((x.size(0) // n,) * n,)
    for _ in range(2):
        x = GROUP.run(AllToAll(equal, equal), x)
    return x


class Net(nn.Module):
    """With a group of one on the whole batch it computes the same as with any other on chunks."""

    def __init__(self, kinds: str) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 3)
        self.kinds = kinds

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if "reduce" in self.kinds:
            count = GROUP.run(AllReduce("sum"), torch.tensor(float(len(x)), device=x.device))
            h = h - GROUP.run(AllReduce("sum"), h.sum(0)) / count.double()
        if "extremum" in self.kinds:
            low = h.amin(0) if len(x) else h.new_full((6,), float("inf"))
            h = h / (1 + (h.detach() - GROUP.run(AllReduce("min"), low)).abs())
        if "gather" in self.kinds:
            every = GROUP.run(AllGather(0), h)
            h = h + torch.softmax(h @ every.t(), 1) @ every
        if "all_to_all" in self.kinds:
            h = h * there_and_back(h)
        if "scatter" in self.kinds:
            # What each has for all is the same for all, so the mean of the chunks is no other.
            chunk = GROUP.run(ReduceScatter("avg", 0), self.first.weight.repeat(2, 1))
            every = GROUP.run(AllGather(0), chunk)
            h = h + every.sum() + GROUP.run(Broadcast(0), self.first.bias)
        output: Tensor = self.second(h.tanh())
        return output


KINDS = ["reduce", "extremum", "gather", "all_to_all", "scatter", "reduce gather scatter"]


def pair(wrap: Callable[..., Any], places: list[str], kinds: str) -> tuple[Any, Any, Tensor]:
    torch.manual_seed(1)
    bare = Net(kinds).double().to(places[0])
    x = torch.randn(16, 4, dtype=torch.double, device=places[0])
    return bare, wrap(copy.deepcopy(bare), places), x


@pytest.mark.parametrize("kinds", KINDS)
def test_three_steps(wrap: Callable[..., Any], places: list[str], kinds: str) -> None:
    bare, model, x = pair(wrap, places, kinds)
    for number in range(3):
        results = []
        for module in (bare, model):
            leaf = (x * (number + 1)).requires_grad_()
            module.zero_grad()
            output = module(leaf)
            output.square().sum().backward()
            results.append([output, leaf.grad, *grads_of(module)])
            with torch.no_grad():
                for p in module.parameters():
                    p -= 0.01 * p.grad
        assert_all_close(results[1], results[0])
    assert_all_close(model.parameters(), bare.parameters())


@pytest.mark.parametrize("samples", [9, 3, 1])
def test_uneven_chunks(wrap: Callable[..., Any], places: list[str], samples: int) -> None:
    bare, model, _ = pair(wrap, places, "reduce extremum")
    x = torch.randn(samples, 4, dtype=torch.double, device=places[0])
    results = []
    for module in (bare, model):
        output = module(x)
        output.square().sum().backward()
        results.append([output, *grads_of(module)])
    assert_all_close(results[1], results[0])


def test_torch_autograd_grad_and_second_gradients(
    wrap: Callable[..., Any], places: list[str]
) -> None:
    bare, model, x = pair(wrap, places, "reduce gather")
    results = []
    for module in (bare, model):
        leaf = x.clone().requires_grad_()
        output = module(leaf).square().sum()
        first = torch.autograd.grad(
            output, [leaf, *module.parameters()], create_graph=True, allow_unused=True
        )
        output.backward(retain_graph=True)
        torch.stack([g.square().sum() for g in first]).sum().backward()
        results.append([*first, leaf.grad, *grads_of(module)])
    assert_all_close(results[1], results[0])


def test_a_loss_computed_in_the_replicas(wrap: Callable[..., Any], places: list[str]) -> None:
    bare, model, x = pair(wrap, places, "reduce gather")
    target = torch.randint(0, 3, (16,), device=places[0])
    criterion = nn.CrossEntropyLoss()
    expected = criterion(bare(x), target)
    expected.backward()
    got = model.loss(criterion, x, target)
    got.backward()
    assert_all_close([got, *grads_of(model)], [expected, *grads_of(bare)])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(
    wrap: Callable[..., Any], places: list[str], mode: Callable[[], Any]
) -> None:
    bare, model, x = pair(wrap, places, "reduce extremum gather all_to_all scatter")
    with mode():
        assert_all_close([model(x)], [bare(x)])


def test_autocast(wrap: Callable[..., Any]) -> None:
    bare, model, x = pair(wrap, ["cpu"] * 2, "reduce gather")
    bare, model = bare.float(), wrap(copy.deepcopy(bare).float(), ["cpu"] * 2)
    results = []
    for module in (bare, model):
        with torch.autocast("cpu", torch.bfloat16):
            output = module(x.float())
        assert output.dtype == torch.bfloat16
        output.float().square().sum().backward()
        results.append([output.float(), *grads_of(module)])
    assert_all_close(results[1], results[0], rtol=0.1, atol=0.1)


def test_compiled_modules_in_replicas(wrap: Callable[..., Any]) -> None:
    bare, _, x = pair(wrap, ["cpu"] * 2, "reduce gather")
    inner = copy.deepcopy(bare)
    inner.compile(backend="aot_eager")
    model = wrap(inner, ["cpu"] * 2)
    for number in range(3):
        results = []
        for module in (bare, model):
            module.zero_grad()
            output = module(x * (number + 1))
            output.square().sum().backward()
            results.append([output, *grads_of(module)])
        assert_all_close(results[1], results[0])


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_the_wrapper(
    wrap: Callable[..., Any], places: list[str], reentrant: bool
) -> None:
    bare, model, x = pair(wrap, places, "reduce gather")
    results = []
    for module in (bare, model):
        leaf = x.clone().requires_grad_()
        output = checkpoint(module, leaf, use_reentrant=reentrant)
        output.square().sum().backward()
        results.append([output, leaf.grad, *grads_of(module)])
    assert_all_close(results[1], results[0])


# --- graphs that share a node, and graphs that do not ------------------------------------------


THREADS: set[int] = set()


class Sometimes(nn.Module):
    """Has as many nodes with a collective as without, or more, or less."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor, mode: str) -> Tensor:
        h = self.first(x)
        h.register_hook(lambda _: THREADS.add(threading.get_ident()))
        total = h.sum(0)
        if mode == "apart":
            # As many nodes in all threads as if all of them had met; of another group than ours.
            total = total.clone() if GROUP.rank() == GROUP.size() - 1 else total
        elif mode == "met":
            total = GROUP.run(AllReduce("sum"), total)
        elif mode == "first only":
            total = GROUP.run(AllReduce("sum"), total)
            total = total if GROUP.rank() == 0 else h.sum(0)
        elif mode == "last only":
            total = GROUP.run(AllReduce("sum"), total)
            total = total if GROUP.rank() == GROUP.size() - 1 else h.sum(0)
        elif mode == "without gradient":
            total = GROUP.run(AllReduce("sum"), total.detach()) + total
        elif mode == "twice":
            total = GROUP.run(AllReduce("max"), GROUP.run(AllReduce("sum"), total))
        output: Tensor = self.second((h * total).tanh())
        return output


MODES = ["apart", "met", "first only", "last only", "without gradient", "twice"]


def test_a_collective_is_noticed_in_every_forward(slots: list[str]) -> None:
    """Whatever was computed in the forwards before: the sizes of their graphs are remembered."""
    one = DataParallel(Sometimes().double().to(slots[0]), slots[:2])
    other = DistributedDataParallel(copy.deepcopy(one.module), slots[:2])
    torch.manual_seed(2)
    order = [MODES[i] for i in torch.randint(0, len(MODES), (40,)).tolist()]
    for number, mode in enumerate([*order, "apart", "apart", "met", "apart", "met"]):
        samples = 2 if number % 3 else 6
        x = torch.randn(samples, 4, dtype=torch.double, device=slots[0])
        results = []
        for model in (one, other):
            model.zero_grad()
            leaf = x.clone().requires_grad_()
            model(leaf, mode).square().sum().backward()
            results.append([leaf.grad, *grads_of(model)])
        assert_all_close(results[1], results[0])


def replica_threads(model: Any, mode: str, x: Tensor) -> int:
    """In how many threads the gradients in the replicas were computed."""
    THREADS.clear()
    model(x, mode).square().sum().backward()
    return len(THREADS)


def test_only_graphs_that_share_a_node_go_into_one_backward() -> None:
    model = DistributedDataParallel(Sometimes().double(), ["cpu"] * 2)
    x = torch.randn(4, 4, dtype=torch.double)
    for _ in range(2):
        found = {mode: replica_threads(model, mode, x) for mode in MODES}
        assert found == {
            "apart": 2,
            "met": 1,
            "first only": 1,
            "last only": 1,
            "without gradient": 2,
            "twice": 1,
        }


class Product(nn.Module):
    """Makes as many nodes whether or not the replicas meet."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.double))

    def forward(self, x: Tensor, meets: bool) -> Tensor:
        h = x * self.weight
        return GROUP.run(AllReduce("product"), h) if meets else h.clone()


def test_graphs_of_the_same_sizes_with_and_without_a_collective() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], dtype=torch.double)
    for quiet in range(1, 6):
        model = DistributedDataParallel(Product(), ["cpu"] * 2)
        for meets in [False] * quiet + [True, False, True]:
            model.zero_grad()
            model(x, meets).sum().backward()
            # Each of two outputs is the product of both rows and of the weight squared.
            wanted = 4 * x.prod(0) if meets else x.sum(0)
            torch.testing.assert_close(model.module.weight.grad, wanted)
        model.close()
