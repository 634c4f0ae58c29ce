"""Inputs that the module writes in place: it gets what the bare module would get."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dataparallel as dp
from tests.cluster import Cluster
from tests.models import assert_all_close

Forward = Callable[..., Any]
Case = Callable[[Callable[[Forward], nn.Module], nn.Module], Sequence[Tensor | None]]


class Net(nn.Module):
    """Two layers, a scale, and a forward that a test gives."""

    def __init__(self, function: Forward) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList([nn.Linear(6, 6, dtype=torch.float64) for _ in range(2)])
        self.scale = nn.Parameter(torch.full((6,), 1.3, dtype=torch.float64))
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def batch(seed: int = 0, *, grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(7, 6, generator=generator, dtype=torch.float64).requires_grad_(grad)


def encoder() -> nn.Module:
    torch.manual_seed(6)
    return nn.Linear(6, 6, dtype=torch.float64)


def grads(*modules: nn.Module) -> list[Tensor | None]:
    found = [p.grad for module in modules for p in module.parameters()]
    return [None if grad is None else grad.clone() for grad in found]


def relu_first(net: Any, h: Tensor) -> Any:
    return net.layers[0](nn.functional.relu(h, inplace=True))


# --- what is computed with a wrapped, and with the bare module ----------------------------------


def a_first_layer_in_place(wrap: Any, front: nn.Module) -> Sequence[Tensor | None]:
    model, results = wrap(relu_first), []
    for step in range(3):
        y = model(front(batch(step)))
        y.pow(2).sum().backward()
        results += [y, *grads(front, model)]
    return results


def an_input_that_grows(wrap: Any, front: nn.Module) -> Sequence[Tensor | None]:
    def forward(net: Any, h: Tensor) -> Tensor:
        h += net.scale
        h += torch.sin(net.layers[0](h.exp())).detach()
        return h

    model = wrap(forward)
    y = model(front(batch()))
    y.pow(2).sum().backward()
    return [y, *grads(front, model)]


def one_tensor_given_twice(wrap: Any, front: nn.Module) -> Sequence[Tensor | None]:
    def forward(net: Any, a: Tensor, *, rest: Any) -> Any:
        assert rest["b"][0] is a
        a.mul_(net.scale)
        return [net.layers[0](a) * rest["b"][0], rest["b"][1].relu_()]

    model, h, other = wrap(forward), front(batch()), front(batch(1))
    first, second = model(h, rest={"b": (h, other)})
    (first.pow(2).sum() + second.exp().sum()).backward()
    return [first, second, *grads(front, model)]


def without_sync(wrap: Any, front: nn.Module) -> Sequence[Tensor | None]:
    model = wrap(relu_first)
    with getattr(model, "no_sync", contextlib.nullcontext)():
        model(front(batch())).pow(2).sum().backward()
    model(front(batch(1))).pow(2).sum().backward()
    return grads(front, model)


def under_checkpoints(wrap: Any, front: nn.Module) -> Sequence[Tensor | None]:
    results: list[Tensor | None] = []
    for reentrant in (False, True):

        def forward(net: Any, h: Tensor, reentrant: bool = reentrant) -> Any:
            h = nn.functional.relu(h, inplace=True)
            h = checkpoint(net.layers[0], h, use_reentrant=reentrant)
            return checkpoint(net.layers[1], h, use_reentrant=reentrant)

        model = wrap(forward)
        model(front(batch())).pow(2).sum().backward()
        results += grads(front, model)
    return results


def returned_gradients(wrap: Any, front: nn.Module) -> Sequence[Tensor | None]:
    model, x = wrap(lambda net, h: net.layers[0](h.mul_(net.scale).sin())), batch(grad=True)
    used = [model.scale, *model.layers[0].parameters()]
    results = [*torch.autograd.grad(model(front(x)).pow(2).sum(), [x, *used])]
    (slope,) = torch.autograd.grad(model(front(x)).sum(), x, create_graph=True)
    return [*results, *torch.autograd.grad(slope.pow(2).sum(), [x, *used], allow_unused=True)]


def without_gradients(wrap: Any, front: nn.Module) -> Sequence[Tensor | None]:
    model = wrap(relu_first)
    with torch.no_grad():
        return [model(front(batch())), model(batch(grad=True))]


COPIED: list[Case] = [
    a_first_layer_in_place,
    an_input_that_grows,
    one_tensor_given_twice,
    without_sync,
    under_checkpoints,
    returned_gradients,
    without_gradients,
]


def the_caller_goes_on_with_it(wrap: Any, front: nn.Module) -> Sequence[Tensor | None]:
    model, h, x = wrap(relu_first), front(batch()), batch(1)
    y = model(h) * h.exp()
    z = model(x) * x.exp()
    (y + z).sum().backward()
    return [h, x, *grads(front, model)]


def the_caller_goes_on_with_a_part(wrap: Any, front: nn.Module) -> Sequence[Tensor | None]:
    model, h = wrap(lambda net, h: net.layers[0](h.mul_(net.scale))), front(batch())
    hidden = front(torch.cat([batch(1), batch(2)], 1)[:, 3:9])
    y = model(hidden.view(6, 7).t().contiguous().view(7, 6)) + model(h[:5]).sum() + h.sin()
    y.pow(2).sum().backward()
    return [h, y, *grads(front, model)]


def what_is_filled(wrap: Any, front: nn.Module) -> Sequence[Tensor | None]:
    """A tensor of the caller's that does not require grad before, and does so then."""

    def forward(net: Any, h: Tensor, memory: Tensor) -> Tensor:
        memory[1:] = net.layers[0](h)[1:]
        output: Tensor = memory * net.scale
        return output

    model, memory = wrap(forward), torch.ones(7, 6, dtype=torch.float64)
    y = model(front(batch()), memory)
    (y.sin().sum() + memory.pow(2).sum()).backward()
    return [y, memory, *grads(front, model)]


def what_is_cut_off(wrap: Any, front: nn.Module) -> Sequence[Tensor | None]:
    def forward(net: Any, h: Tensor) -> Tensor:
        y: Tensor = h * 2 + net.scale
        h.detach_()
        return y

    model, h = wrap(forward), front(batch())
    (model(h).sum() + front(h).sum()).backward()
    assert not h.requires_grad
    return [h, *grads(front, model)]


ONE_REPLICA: list[Case] = [
    the_caller_goes_on_with_it,
    the_caller_goes_on_with_a_part,
    what_is_filled,
    what_is_cut_off,
]


def compare(case: Case, wrap: Callable[[nn.Module], nn.Module]) -> None:
    expected = case(Net, encoder())
    got = case(lambda forward: wrap(Net(forward)), encoder())
    assert_all_close(got, expected)


@pytest.mark.parametrize("case", COPIED, ids=lambda case: case.__name__)
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_a_module_may_write_its_inputs(case: Case, replicas: int, static: bool) -> None:
    def wrap(module: nn.Module) -> nn.Module:
        options: Any = {"nonfinite": "raise", "static_graph": static}
        return dp.DistributedDataParallel(module, ["cpu"] * replicas, **options)

    compare(case, wrap)
    compare(case, functools.partial(dp.DataParallel, device_ids=["cpu"] * replicas))


@pytest.mark.parametrize("case", ONE_REPLICA, ids=lambda case: case.__name__)
def test_the_caller_sees_what_one_replica_writes(case: Case) -> None:
    options: Any = {"device_ids": ["cpu"], "nonfinite": "raise"}
    compare(case, functools.partial(dp.DistributedDataParallel, **options))
    compare(case, functools.partial(dp.DataParallel, device_ids=["cpu"]))


def test_what_several_replicas_write_the_caller_does_not_see() -> None:
    for wrapper in (dp.DataParallel, dp.DistributedDataParallel):
        front, x = encoder(), batch(1)
        h = front(batch())
        before = h.detach().clone()
        model = wrapper(Net(relu_first), ["cpu", "cpu"])
        (model(h).sum() + model(x).sum()).backward()
        assert torch.equal(h, before)
        assert torch.equal(x, batch(1))


def _with_processes(rank: int, world_size: int) -> None:
    def wrap(forward: Forward) -> nn.Module:
        return dp.DistributedDataParallel(Net(forward), ["cpu"])

    def torchs(forward: Forward) -> nn.Module:
        return nn.parallel.DistributedDataParallel(Net(forward), find_unused_parameters=True)

    for case in (a_first_layer_in_place, an_input_that_grows, without_sync, *ONE_REPLICA):
        got, expected = case(wrap, encoder()), case(torchs, encoder())
        assert_all_close(got, expected)
    for wrapped in (wrap(relu_first), torchs(relu_first), Net(relu_first)):
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used"):
            wrapped(batch(grad=True))


def test_with_processes_it_is_as_with_torch(cluster: Cluster) -> None:
    cluster.run(_with_processes, 2)


def _seen(net: Any, tensors: dict[str, Any]) -> Tensor:
    net.saw = [
        (t.is_leaf, t.requires_grad, t.grad_fn is None, t.shape, t.stride(), t._version)
        for t in (tensors["x"], *tensors["more"])
    ]
    output: Tensor = net.layers[0](tensors["x"])
    return output


def test_a_module_sees_the_same_as_the_bare_one() -> None:
    hidden = encoder()(batch())
    more = [batch(grad=True), batch(), hidden.t().t(), hidden[:, ::2]]
    bare = Net(_seen)
    bare({"x": hidden, "more": more})
    net = Net(_seen)
    options: Any = {"nonfinite": "raise"}
    dp.DistributedDataParallel(net, ["cpu"], **options)({"x": hidden, "more": more})
    assert net.saw == bare.saw


def test_a_write_that_the_caller_has_saved_is_an_error() -> None:
    results = []
    for replicas in (0, 1):
        net = Net(relu_first)
        options: Any = {"device_ids": ["cpu"], "nonfinite": "raise"}
        model = dp.DistributedDataParallel(net, **options) if replicas else net
        y = model(torch.sigmoid(encoder()(batch())))
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
            y.sum().backward()
        results.append(str(raised.value).split(";")[1])
    assert results[0] == results[1]


def test_inputs_that_share_memory_with_a_written_one_are_refused() -> None:
    def forward(net: Any, a: Tensor, b: Tensor) -> Any:
        return net.layers[0](a.relu_()) * b

    options: Any = {"device_ids": ["cpu"], "nonfinite": "raise"}
    model = dp.DistributedDataParallel(Net(forward), **options)
    h = encoder()(batch())
    with pytest.raises(RuntimeError, match=r"shares memory with another .*clone\(\)"):
        model(h, h.view(-1).view(7, 6))
    expected = Net(forward)(encoder()(batch()), encoder()(batch()))
    assert_all_close([model(encoder()(batch()), encoder()(batch()))], [expected])


def test_a_view_that_is_filled_is_refused() -> None:
    def forward(net: Any, h: Tensor, memory: Tensor) -> Any:
        memory.copy_(net.layers[0](h))
        return memory * net.scale

    options: Any = {"device_ids": ["cpu"], "nonfinite": "raise"}
    model = dp.DistributedDataParallel(Net(forward), **options)
    table = torch.zeros(7, 2, 6, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="detach views in-place"):
        model(batch(), table[:, 0])
    expected = Net(forward)(batch(), torch.zeros_like(batch()))
    assert_all_close([model(batch(), torch.zeros_like(batch()))], [expected])
