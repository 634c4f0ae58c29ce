"""Rows of the table in docs/guides/migrate.md: what torch's wrapper does, and what ours does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dataparallel as dp
from tests.cluster import Cluster
from tests.models import Calls

CPUS = ["cpu", "cpu"]
Use = Callable[[Any, Tensor], object]


def make(function: Callable[[Any, Tensor], object] | None) -> Calls:
    """Two layers, of which a forward uses the first, or what a function does with them."""
    layers = {"layer": nn.Linear(4, 3), "other": nn.Linear(4, 3)}
    return Calls(function or (lambda net, x: net.layer(x)), **layers)


class TwoTexts(Exception):
    """An error that cannot be made from one text."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one, two)


def fail(net: Any, x: Tensor) -> Tensor:
    raise TwoTexts("one", "two")


def remember(net: Any, x: Tensor) -> Tensor:
    net.seen = len(x)
    return x.mul(net.layer.bias.sum() + net.other.bias.sum())


def freeze(model: Any, x: Tensor) -> str:
    both = nn.Module.parameters(model.module)
    model(x).sum().backward()
    next(both).requires_grad_(False)
    for _ in range(2):
        model(x).sum().backward()
    return "works"


def twice(model: Any, x: Tensor) -> str:
    for _ in range(2):
        model(x).sum().backward()
    return "works"


def use_all(net: Any, x: Tensor) -> Tensor:
    total: Tensor = net.layer(x) + net.other(x)
    return total


def written(model: Any, x: Tensor) -> bool:
    model(x)
    return bool((x == 1).all())


def write_input(net: Any, x: Tensor) -> Tensor:
    return use_all(net, x.fill_(1))


def total_of(net: Any, x: Tensor) -> Tensor:
    return use_all(net, x).sum()


#: The module, the use of the wrapper, and the result in torch and here.
ROWS: dict[str, tuple[Callable[..., object] | None, Use, object, object]] = {
    "names": (None, lambda m, x: min(m.state_dict()), "module.layer.bias", "layer.bias"),
    "attributes": (None, lambda m, x: m.layer.in_features, "AttributeError", 4),
    "isinstance": (None, lambda m, x: isinstance(m, nn.DataParallel), False, True),
    "no torch DDP": (None, lambda m, x: isinstance(m, TorchDDP), True, False),
    "device_ids": (None, lambda m, x: len(m.device_ids or ()), 0, 2),
    "unused": (None, twice, "RuntimeError", "works"),
    "frozen later": (use_all, freeze, "RuntimeError", "works"),
    "0-d outputs": (total_of, lambda m, x: m(x).dim(), 0, 1),
    "numbers": (lambda net, x: (x, len(x)), lambda m, x: m(x)[1], 5, [3, 2]),
    "an exception": (fail, lambda m, x: m(x), "TwoTexts", "TwoTexts"),
    "attributes assigned": (remember, lambda m, x: (m(x), m.module.seen)[1], 5, 3),
    "parameters": (lambda net, x: len(list(net.parameters())), lambda m, x: m(x), 4, 4),
    "input written": (write_input, written, True, False),
    "functional_call": (
        use_all,
        lambda m, x: torch.func.functional_call(m, {}, (x,)).shape,
        torch.Size([5, 3]),
        "RuntimeError",
    ),
    "torch.func.grad": (
        use_all,
        lambda m, x: torch.func.grad(lambda t: m(t).sum())(x).shape,
        torch.Size([5, 4]),
        "RuntimeError",
    ),
    "create_graph": (
        use_all,
        lambda m, x: m(x).pow(2).sum().backward(create_graph=True),
        "RuntimeError",
        None,
    ),
}


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process, which torch's wrapper wants."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def outcome(call: Callable[[], object]) -> object:
    try:
        return call()
    except Exception as error:
        return type(error).__name__


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore:Using backward. with create_graph=True:UserWarning")
@pytest.mark.parametrize("row", ROWS)
def test_a_row(row: str) -> None:
    function, use, theirs, ours = ROWS[row]
    wrapped = TorchDDP(make(function)), dp.DistributedDataParallel(make(function), CPUS)
    found = [outcome(lambda model=model: use(model, torch.randn(5, 4))) for model in wrapped]  # type: ignore[misc]
    assert found == [theirs, ours]
    if row == "create_graph":
        # Gradients that are functions refer to their parameters.
        for model in wrapped:
            model.zero_grad()


def _hooks(rank: int, world_size: int) -> list[dict[str, float]]:
    """The gradient of one parameter as hooks of both wrappers see it, and what remains."""
    found = []
    wrap_ours = lambda net: dp.DistributedDataParallel(net, CPUS)  # noqa: E731
    for wrap in (TorchDDP, wrap_ours):
        net = nn.Linear(1, 1, bias=False)
        seen: dict[str, float] = {}
        net.weight.register_hook(lambda grad, seen=seen: seen.update(hook=grad.item()))
        net.weight.register_post_accumulate_grad_hook(
            lambda p, seen=seen: seen.update(after=p.grad.item())
        )
        model = wrap(net)  # torch's reducer ends with its wrapper
        model(torch.full((2, 1), 1.0 + rank)).sum().backward()
        assert net.weight.grad is not None
        found.append(seen | {"grad": net.weight.grad.item()})
    return found


def test_what_hooks_on_a_parameter_see(cluster: Cluster) -> None:
    for rank, (theirs, ours) in enumerate(cluster.run(_hooks, 2)):
        own = 2.0 * (1 + rank)
        assert theirs == {"hook": own, "after": own, "grad": 3.0}
        assert ours == {"hook": own, "after": 3.0, "grad": 3.0}
