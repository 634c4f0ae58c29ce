"""Modules with collectives over replicas: wrapped equals bare on the whole batch."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dataparallel import DataParallel, DistributedDataParallel
from dataparallel.collectives import functional
from tests.collective_cases import GROUP, PLACES
from tests.models import assert_all_close, grads_of

WRAPPERS: dict[str, Callable[..., Any]] = {"dp": DataParallel, "ddp": DistributedDataParallel}


@pytest.fixture(params=WRAPPERS)
def wrap(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return WRAPPERS[request.param]


@pytest.fixture(params=PLACES)
def places(request: pytest.FixtureRequest) -> list[str]:
    return PLACES[request.param]


def total(x: Tensor) -> Tensor:
    return functional.all_reduce(x, "sum", GROUP)


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
            count = total(torch.tensor(float(len(x)), device=x.device))
            h = h - total(h.sum(0)) / count.double()
        if "extremum" in self.kinds:
            low = h.amin(0) if len(x) else h.new_full((6,), float("inf"))
            h = h / (1 + (h.detach() - functional.all_reduce(low, "min", GROUP)).abs())
        if "gather" in self.kinds:
            every = functional.all_gather_tensor(h, 0, GROUP)
            h = h + torch.softmax(h @ every.t(), 1) @ every
        if "rows" in self.kinds:
            # There and back.
            back = functional.all_to_all_single(h, None, None, GROUP)
            h = h * functional.all_to_all_single(back, None, None, GROUP)
        if "scatter" in self.kinds:
            # What each has for all is the same for all, so the mean of the chunks is no other.
            chunk = functional.reduce_scatter_tensor(
                self.first.weight.repeat(2, 1), "avg", 0, GROUP
            )
            every = functional.all_gather_tensor(chunk, 0, GROUP)
            h = h + every.sum() + functional.broadcast(self.first.bias, 0, GROUP)
        output: Tensor = self.second(h.tanh())
        return output


KINDS = ["reduce extremum", "gather rows", "scatter", "reduce gather scatter"]


def pair(wrap: Callable[..., Any], places: list[str], kinds: str) -> tuple[Any, Any, Tensor]:
    torch.manual_seed(1)
    bare = Net(kinds).double().to(places[0])
    x = torch.randn(16, 4, dtype=torch.double, device=places[0])
    return bare, wrap(copy.deepcopy(bare), places), x


def compare(
    models: tuple[Any, Any], x: Tensor, run: Callable[[Any, Tensor], Any] = lambda m, x: m(x)
) -> None:
    """Outputs and gradients of both, of the input too."""
    results = []
    for module in models:
        leaf = x.clone().requires_grad_()
        module.zero_grad()
        output = run(module, leaf)
        output.square().sum().backward()
        results.append([output, leaf.grad, *grads_of(module)])
    assert_all_close(results[1], results[0])


@pytest.mark.parametrize("kinds", KINDS)
def test_three_steps(wrap: Callable[..., Any], places: list[str], kinds: str) -> None:
    bare, model, x = pair(wrap, places, kinds)
    for number in range(3):
        compare((bare, model), x * (number + 1))
        for module in (bare, model):
            with torch.no_grad():
                for p in module.parameters():
                    p -= 0.01 * p.grad
    assert_all_close(model.parameters(), bare.parameters())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_all_close([model(x)], [bare(x)])


@pytest.mark.parametrize("samples", [9, 3, 1])
def test_uneven_chunks(wrap: Callable[..., Any], places: list[str], samples: int) -> None:
    bare, model, x = pair(wrap, places, "reduce extremum")
    compare((bare, model), x[:samples])


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


def test_compiled_modules_in_replicas(wrap: Callable[..., Any]) -> None:
    bare, _, x = pair(wrap, ["cpu"] * 2, "reduce gather")
    inner = copy.deepcopy(bare)
    inner.compile(backend="aot_eager")
    model = wrap(inner, ["cpu"] * 2)
    for number in range(2):
        compare((bare, model), x * (number + 1))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_the_wrapper(
    wrap: Callable[..., Any], places: list[str], reentrant: bool
) -> None:
    bare, model, x = pair(wrap, places, "reduce gather")
    compare((bare, model), x, lambda m, leaf: checkpoint(m, leaf, use_reentrant=reentrant))


def test_an_interrupted_module_works_in_the_next_call(slots: list[str]) -> None:
    class Failing(nn.Linear):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fails and GROUP.rank() == 1:
                raise ValueError("broken")
            return total(super().forward(x))

    net = Failing(3, 3).to(slots[0])
    model = DistributedDataParallel(net, slots[:2])
    x = torch.randn(4, 3, device=slots[0])
    expected = model(x)
    for _ in range(3):
        net.fails = True
        with pytest.raises(ValueError, match="broken\nin replica 1"):
            model(x)
        net.fails = False
        output = model(x)
        assert_all_close([output], [expected])
        output.sum().backward()


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
        own = h.sum(0)
        rank, last = GROUP.rank(), GROUP.size() - 1
        met = own if mode == "apart" else total(own.detach() if mode == "without gradient" else own)
        if mode == "apart":
            # As many nodes in all threads as if all of them had met; of another group than ours.
            met = own.clone() if rank == last else own
        elif mode == "without gradient":
            met = met + own
        elif mode == "twice":
            met = functional.all_reduce(met, "max", GROUP)
        elif (mode == "first only" and rank != 0) or (mode == "last only" and rank != last):
            met = h.sum(0)
        output: Tensor = self.second((h * met).tanh())
        return output


#: And in how many threads backward runs: graphs that share a node go into one.
MODES = {"apart": 2, "met": 1, "first only": 1, "last only": 1, "without gradient": 2, "twice": 1}


def call_in(mode: str, model: Any, x: Tensor) -> Any:
    return model(x, mode)


def test_a_collective_is_noticed_in_every_forward(slots: list[str]) -> None:
    """Whatever was computed in the forwards before: the sizes of their graphs are remembered."""
    one = DataParallel(Sometimes().double().to(slots[0]), slots[:2])
    other = DistributedDataParallel(copy.deepcopy(one.module), slots[:2])
    torch.manual_seed(2)
    order = [list(MODES)[i] for i in torch.randint(0, len(MODES), (40,)).tolist()]
    for number, mode in enumerate([*order, "apart", "apart", "met", "apart", "met"]):
        samples = 2 if number % 3 else 6
        x = torch.randn(samples, 4, dtype=torch.double, device=slots[0])
        compare((one, other), x, functools.partial(call_in, mode))


def test_only_graphs_that_share_a_node_go_into_one_backward() -> None:
    model = DistributedDataParallel(Sometimes().double(), ["cpu"] * 2)
    x = torch.randn(4, 4, dtype=torch.double)
    for _ in range(2):
        for mode, threads in MODES.items():
            THREADS.clear()
            model(x, mode).square().sum().backward()
            assert len(THREADS) == threads, mode
