"""Training in one process: outputs, gradients and hooks are those of the bare module."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import dataparallel as dp
from tests.ddp_cases import (
    Case,
    Net,
    Results,
    Wrap,
    backward,
    batch,
    encoder,
    grads,
    one_layer,
    two_layers,
)
from tests.models import assert_all_close

# --- autograd's graphs around and inside of the wrapper ------------------------------------------


def around_a_reentrant_checkpoint(wrap: Wrap, device: str) -> Results:
    """The checkpoint's backward runs between those of the other two calls."""
    net = Net(device, two_layers)
    model, results = wrap(net), []
    for step in range(2):
        x = batch(device, step, grad=True)
        inner = checkpoint(model, x * 2, use_reentrant=True).pow(2).sum()
        backward(model(x).sum() + inner + model(x * 3).sin().sum())
        results += [*grads(net), x.grad]
    x = batch(device, 5, grad=True)
    backward(model(checkpoint(model, model(x * 2), use_reentrant=True)).sin().sum())
    return [*results, *grads(net), x.grad]


def odd_outputs(wrap: Wrap, device: str) -> Results:
    """Inputs, views, a parameter, None and numbers among the outputs; not all in the loss."""

    def forward(net: Any, x: Tensor, *, y: Tensor) -> Any:
        hidden = net.layers[0](y)
        row = net.layers[0].weight[:1].expand(x.shape[0], -1)
        return {"x": x, "parts": (hidden[:, :3], None, [row]), "n": 3, "rest": net.layers[2](x)}

    net = Net(device, forward)
    model = wrap(net)
    x, y = batch(device, 1, grad=True), batch(device, 2, grad=True)
    output = model(x * 2, y=y)
    first, nothing, (row,) = output["parts"]
    assert nothing is None
    backward(output["x"].pow(2).sum() + first.sin().sum() + (row * output["x"]).sum())
    return [*grads(net), x.grad, y.grad]


def a_closure_over_a_leaf(wrap: Wrap, device: str) -> Results:
    """Replicas that run backward at the same time would each run what they share."""
    t = torch.full((6,), 1.5, dtype=torch.float64, requires_grad=True)
    seen: list[Tensor] = []
    register: Any = t.register_hook
    register(lambda grad: seen.append(grad.clone()))
    net = Net(device, lambda net, x: net.layers[0](x).cpu() * t.exp())
    model, results = wrap(net), []
    for step in range(3):
        backward(model(batch(device, step)).pow(2).sum())
        results += [*grads(net), t.grad.clone()]  # type: ignore[union-attr]
    results += torch.autograd.grad(model(batch(device)).sum(), [t])
    backward(model(batch(device)).pow(2).sum(), inputs=[t])
    x = batch(device, 7, grad=True)
    y = model(x).pow(2).sum()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    backward(y + slope.cpu().pow(2).sum())
    return [*results, *grads(net), t.grad, *seen]


def a_tensor_that_the_caller_uses_too(wrap: Wrap, device: str) -> Results:
    """Its graph is gone through twice: in the cut, and by the caller's own backward."""
    t = torch.full((6,), 1.5, dtype=torch.float64, requires_grad=True)
    held: dict[str, Tensor] = {}
    net = Net(device, lambda net, x: net.layers[0](x).cpu() * held["h"])
    model = wrap(net)
    for step in range(3):
        held["h"] = t.exp()
        backward(model(batch(device, step)).pow(2).sum() + held["h"].sin().sum())
    return [*grads(net), t.grad]


def attributes_that_require_grad(wrap: Wrap, device: str) -> Results:
    net = Net(device, lambda net, x: net.layers[0](x) * net.factor * net.buffer)
    factor = torch.full((6,), 0.5, dtype=torch.float64, device=device, requires_grad=True)
    net.factor = factor
    buffer = torch.ones_like(factor).requires_grad_()
    net.register_buffer("buffer", buffer)
    model = wrap(net)
    results: list[Tensor | None] = []
    for step in range(3):
        backward(model(batch(device, step)).pow(2).sum())
        results += [*grads(net), factor.grad, buffer.grad]
        results = [None if r is None else r.clone() for r in results]
    return results


def a_tensor_from_outside_that_thaws(wrap: Wrap, device: str) -> Results:
    """The replicas make as many nodes with it as without it."""
    t = torch.full((6,), 1.5, dtype=torch.float64)
    held = {"factor": t.exp()}
    net = Net(device, lambda net, x: net.layers[0](x).cpu() * held["factor"])
    model, results = wrap(net), []
    for step in range(4):
        backward(model(batch(device, step)).pow(2).sum())
        results += grads(net)
        if step == 2:
            t.requires_grad_()
        held["factor"] = t.exp()
    x = batch(device, 7, grad=True)
    (slope,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
    results += torch.autograd.grad(slope.pow(2).sum(), [t])
    return [*results, *grads(net), t.grad]


# --- changes between steps ----------------------------------------------------------------------


def step(model: Any, net: nn.Module, device: str, seed: int) -> list[Tensor | None]:
    output = model(batch(device, seed))
    if output.requires_grad:
        backward(output.pow(2).sum())
    return [output.detach(), *grads(net)]


def _changes(model: Any, net: Any, device: str) -> Iterator[None]:
    weight = net.layers[0].weight
    yield
    weight.data = torch.full_like(weight, 0.1)
    yield
    net.layers[1].bias.data.add_(2)
    yield
    net.zero_grad()
    weight.data = weight.data.t()
    yield
    state = {name: torch.full_like(value, 0.05) for name, value in net.state_dict().items()}
    model.load_state_dict(state, assign=True)
    yield
    net.layers[0].weight = nn.Parameter(torch.full((6, 6), 0.1, dtype=torch.float64).to(device))
    yield
    torch.manual_seed(1)
    net.layers[1] = nn.Sequential(nn.Tanh(), nn.Linear(6, 6, dtype=torch.float64).to(device))
    for frozen in (net.layers[1], net.layers[0], net):
        frozen.requires_grad_(False)
        yield
        net.zero_grad()
        yield
    net.requires_grad_(True)
    yield


def changes_between_steps(wrap: Wrap, device: str) -> Results:
    net = Net(device, two_layers)
    model, results = wrap(net), []
    for seed, _ in enumerate(_changes(model, net, device)):
        results += step(model, net, device, seed)
    other = Net(device, two_layers)
    if model is net:
        return results + step(other, other, device, 1)
    # As in bagging, where one wrapper trains one network after another.
    model.module = other
    return results + step(model, other, device, 1)


def an_optimizer_in_a_hook(wrap: Wrap, device: str) -> Results:
    net = Net(device, one_layer)
    for parameter in net.parameters():
        optimizer = torch.optim.SGD([parameter], 0.1, momentum=0.9)

        def step_it(_: nn.Parameter, optimizer: torch.optim.SGD = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step_it)
    model = wrap(net)
    for seed, number in enumerate((0, 1, 0, 2)):
        backward(model(batch(device, seed), number).pow(2).sum())
    return [*(p.detach() for p in net.parameters()), *grads(net)]


def other_forwards_between(wrap: Wrap, device: str) -> Results:
    net = Net(device, two_layers)
    model, results = wrap(net), []
    for size in (7, 1, 2, 0, 3):
        output = model(batch(device, size, size))
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


def parameters_that_hold_tensors(wrap: Wrap, device: str) -> Results:
    net = Net(device, two_layers)
    for layer in net.layers[:2]:
        weight = layer.weight.detach()
        layer.weight = nn.Parameter(TwoTensor(weight.clone(), weight.clone()))
    model = wrap(net)
    for seed in range(3):
        net.zero_grad()
        backward(model(batch(device, seed)).pow(2).sum())
        torch.optim.SGD(net.parameters(), lr=0.01).step()
    assert isinstance(net.layers[0].weight.grad, TwoTensor)
    return [part.detach() for layer in net.layers[:2] for part in (layer.weight.a, layer.weight.b)]


# --- inputs that the module writes in place -----------------------------------------------------


def relu_first(net: Any, h: Tensor) -> Any:
    return net.layers[0](nn.functional.relu(h, inplace=True))


def an_input_that_grows(wrap: Wrap, device: str) -> Results:
    def forward(net: Any, h: Tensor) -> Tensor:
        h += net.scale
        h += torch.sin(net.layers[0](h.exp())).detach()
        return h

    front, net = encoder(device), Net(device, forward)
    y = wrap(net)(front(batch(device)))
    backward(y.pow(2).sum())
    return [y, *grads(front, net)]


def one_tensor_given_twice(wrap: Wrap, device: str) -> Results:
    def forward(net: Any, a: Tensor, *, rest: Any) -> Any:
        assert rest["b"][0] is a
        a.mul_(net.scale)
        return [net.layers[0](a) * rest["b"][0], rest["b"][1].relu_()]

    front, net = encoder(device), Net(device, forward)
    h, other = front(batch(device)), front(batch(device, 1))
    first, second = wrap(net)(h, rest={"b": (h, other)})
    backward(first.pow(2).sum() + second.exp().sum())
    return [first, second, *grads(front, net)]


# --- what one replica writes is the caller's -----------------------------------------------------


def the_caller_goes_on_with_it(wrap: Wrap, device: str) -> Results:
    front, net, x = encoder(device), Net(device, relu_first), batch(device, 1)
    model, h = wrap(net), front(batch(device))
    y = model(h) * h.exp()
    z = model(x) * x.exp()
    backward((y + z).sum())
    return [h, x, *grads(front, net)]


def what_is_filled(wrap: Wrap, device: str) -> Results:
    """A tensor of the caller's that does not require grad before, and does so then."""

    def forward(net: Any, h: Tensor, memory: Tensor) -> Tensor:
        memory[1:] = net.layers[0](h)[1:]
        output: Tensor = memory * net.scale
        return output

    front, net = encoder(device), Net(device, forward)
    memory = torch.ones(7, 6, dtype=torch.float64)
    y = wrap(net)(front(batch(device)), memory)
    backward(y.sin().sum() + memory.pow(2).sum())
    return [y, memory, *grads(front, net)]


def what_is_cut_off(wrap: Wrap, device: str) -> Results:
    def forward(net: Any, h: Tensor) -> Tensor:
        y: Tensor = h * 2 + net.scale
        h.detach_()
        return y

    front, net = encoder(device), Net(device, forward)
    h = front(batch(device))
    backward(wrap(net)(h).sum() + front(h).sum())
    assert not h.requires_grad
    return [h, *grads(front, net)]


# --- against the bare module ---------------------------------------------------------------------

CASES: list[Case] = [
    around_a_reentrant_checkpoint,
    odd_outputs,
    a_closure_over_a_leaf,
    attributes_that_require_grad,
    a_tensor_from_outside_that_thaws,
    changes_between_steps,
    an_optimizer_in_a_hook,
    other_forwards_between,
]
#: On devices, the caller's backward may come to nodes that the replicas' backward still needs,
#: which torch says. A subclass that holds tensors cannot be copied there.
ON_THE_CPU: list[Case] = [a_tensor_that_the_caller_uses_too, parameters_that_hold_tensors]
WRITTEN: list[Case] = [an_input_that_grows, one_tensor_given_twice]
ONE_REPLICA: list[Case] = [the_caller_goes_on_with_it, what_is_filled, what_is_cut_off]

_ONE: dict[str, Any] = {"nonfinite": "raise", "gradient_as_bucket_view": True}
_SPREAD: dict[str, Any] = {"originals": "spread"}
#: With nothing to look for, one replica is the module itself.
WRAPPERS: dict[str, tuple[Any, list[str], dict[str, Any]]] = {
    "one replica": (dp.DistributedDataParallel, ["cpu"], _ONE),
    "CPU": (dp.DistributedDataParallel, ["cpu"] * 3, {"gradient_as_bucket_view": True}),
    "devices": (dp.DistributedDataParallel, [f"virtual:{i}" for i in range(3)], {}),
    "spread": (dp.DistributedDataParallel, [f"virtual:{i}" for i in range(3)], _SPREAD),
    "DataParallel": (dp.DataParallel, ["cpu"], {}),
    "DataParallel, two": (dp.DataParallel, ["cpu"] * 2, {}),
}
RUNS = [
    *itertools.product([*CASES, *WRITTEN], ["one replica", "CPU", "devices", "spread"]),
    *itertools.product(ON_THE_CPU, ["one replica", "CPU"]),
    *itertools.product(WRITTEN, ["DataParallel", "DataParallel, two"]),
    *itertools.product(ONE_REPLICA, ["one replica", "DataParallel"]),
]


@pytest.mark.parametrize(("case", "name"), RUNS, ids=lambda each: getattr(each, "__name__", each))
def test_training_is_that_of_the_bare_module(case: Case, name: str) -> None:
    wrapper, devices, options = WRAPPERS[name]
    expected = case(lambda module: module, devices[0])
    got = case(lambda module: wrapper(module, devices, **options), devices[0])
    moved = [[None if r is None else r.detach().cpu() for r in each] for each in (got, expected)]
    assert_all_close(*moved)


# --- what a module sees and writes ---------------------------------------------------------------


def one_replica(module: nn.Module) -> Any:
    return dp.DistributedDataParallel(module, ["cpu"], nonfinite="raise")


@pytest.mark.parametrize("wrapper", [dp.DataParallel, dp.DistributedDataParallel])
def test_what_several_replicas_write_the_caller_does_not_see(wrapper: Any) -> None:
    h, x = encoder("cpu")(batch()), batch()
    before = h.detach().clone()
    model = wrapper(Net("cpu", relu_first), ["cpu", "cpu"])
    backward(model(h).sum() + model(x).sum())
    assert torch.equal(h, before) and torch.equal(x, batch())


def test_a_module_sees_the_same_as_the_bare_one() -> None:
    def forward(net: Any, tensors: dict[str, Any]) -> Tensor:
        net.saw = [
            (t.is_leaf, t.requires_grad, t.grad_fn is None, t.shape, t.stride(), t._version)
            for t in (tensors["x"], *tensors["more"])
        ]
        output: Tensor = net.layers[0](tensors["x"])
        return output

    hidden = encoder("cpu")(batch())
    more = [batch(grad=True), batch(), hidden.t().t(), hidden[:, ::2]]
    bare, net = Net("cpu", forward), Net("cpu", forward)
    for module in (bare, one_replica(net)):
        module({"x": hidden, "more": more})
    assert net.saw == bare.saw


def _of_shared_memory() -> tuple[Tensor, ...]:
    h = encoder("cpu")(batch())
    return h, h.view(-1).view(7, 6)


@pytest.mark.parametrize(
    ("forward", "inputs", "message"),
    [
        # As the bare module refuses these two.
        (relu_first, lambda: (batch(grad=True),), "a leaf Variable that requires grad is being"),
        (
            relu_first,
            lambda: (torch.sigmoid(encoder("cpu")(batch())),),
            "modified by an inplace operation",
        ),
        (
            lambda net, a, b: net.layers[0](a.relu_()) * b,
            _of_shared_memory,
            r"shares memory with another .*clone\(\)",
        ),
        (
            lambda net, a, b: b.copy_(net.layers[0](a)) * net.scale,
            lambda: (batch(), torch.zeros(7, 2, 6, dtype=torch.float64)[:, 0]),
            "detach views in-place",
        ),
    ],
)
def test_writes_that_are_refused(
    forward: Callable[..., Any], inputs: Callable[[], tuple[Tensor, ...]], message: str
) -> None:
    """The wrapper goes on afterwards."""
    net = Net("cpu", forward)
    model = one_replica(net)
    with pytest.raises(RuntimeError, match=message):
        backward(model(*inputs()).sum())
    net.function = relu_first
    expected = Net("cpu", relu_first)(encoder("cpu")(batch()))
    assert_all_close([model(encoder("cpu")(batch()))], [expected])
