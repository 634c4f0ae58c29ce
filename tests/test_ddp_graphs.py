"""Autograd graphs around and inside of the wrapper: all gradients are those of the bare module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dataparallel as dp

Wrap = Callable[[nn.Module], nn.Module]
Case = Callable[[Wrap, str], Sequence[Tensor | None]]


class Net(nn.Module):
    """Three layers, a scale, and a forward that a test gives."""

    def __init__(self, device: str, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList([nn.Linear(6, 6, dtype=torch.float64) for _ in range(3)])
        self.scale = nn.Parameter(torch.tensor(1.3, dtype=torch.float64))
        self.function = function
        self.to(device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def two_layers(net: Any, x: Tensor) -> Tensor:
    output: Tensor = net.layers[1](torch.tanh(net.layers[0](x))) * net.scale
    return output


def batch(device: str, seed: int = 0, size: int = 7, *, grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 6, generator=generator, dtype=torch.float64)
    return x.to(device).requires_grad_(grad)


def grads(*modules: nn.Module) -> list[Tensor | None]:
    found = [p.grad for module in modules for p in module.parameters()]
    return [None if grad is None else grad.detach().cpu().clone() for grad in found]


def backward(loss: Tensor, **kwargs: Any) -> None:
    loss.backward(**kwargs)


@pytest.fixture(params=[1, 2, 3])
def num_replicas(request: pytest.FixtureRequest) -> int:
    return int(request.param)


# --- the cases: what is computed with a wrapped, and with the bare module -----------------------


def several_forwards(wrap: Wrap, device: str) -> Sequence[Tensor | None]:
    net = Net(device, two_layers)
    model, results = wrap(net), []
    for step in range(3):
        y = model(batch(device, step)).pow(2).sum() + model(batch(device, 9, 5)).sin().sum()
        backward(y + model(model(batch(device, 8, 2))).sum())
        results += grads(net)
    return results


def separate_backwards(wrap: Wrap, device: str) -> Sequence[Tensor | None]:
    net = Net(device, two_layers)
    model = wrap(net)
    first, second = model(batch(device, 1)), model(batch(device, 2))
    backward(first.pow(2).sum(), retain_graph=True)
    results = grads(net)
    backward(second.sin().sum())
    results += grads(net)
    backward(first.sum())
    return results + grads(net)


def around_a_reentrant_checkpoint(wrap: Wrap, device: str) -> Sequence[Tensor | None]:
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


def checkpoints_inside(wrap: Wrap, device: str) -> Sequence[Tensor | None]:
    results: list[Tensor | None] = []
    for reentrant in (False, True):

        def forward(net: Any, x: Tensor, reentrant: bool = reentrant) -> Any:
            x = checkpoint(net.layers[0], x, use_reentrant=reentrant)
            x = checkpoint(lambda t: net.layers[1](t.tanh()), x, use_reentrant=reentrant)
            return checkpoint(net.layers[0], x, use_reentrant=reentrant) * net.scale

        net = Net(device, forward)
        model = wrap(net)
        for step in range(3):
            backward(model(batch(device, step, grad=True)).pow(2).sum())
            results += grads(net)
    return results


def only_some_inputs(wrap: Wrap, device: str) -> Sequence[Tensor | None]:
    net = Net(device, two_layers)
    model, parameters = wrap(net), list(net.parameters())
    x = batch(device, grad=True)
    backward(model(x).pow(2).sum(), inputs=[parameters[0], parameters[3]])
    results = [*grads(net), x.grad]
    hidden = x * 2
    hidden.retain_grad()
    backward(model(hidden).pow(2).sum(), inputs=[hidden, parameters[1]])
    return [*results, *grads(net), x.grad, hidden.grad]


def returned_gradients(wrap: Wrap, device: str) -> Sequence[Tensor | None]:
    net = Net(device, two_layers)
    model = wrap(net)
    used = [*net.layers[0].parameters(), *net.layers[1].parameters(), net.scale]
    x = batch(device, grad=True)
    results = [*torch.autograd.grad(model(x).pow(2).sum(), [x, *used])]
    hidden = x * 2
    results += torch.autograd.grad((model(hidden) * hidden).sum(), [hidden, x, used[0]])
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    results += torch.autograd.grad(slope.pow(2).sum() + model(x).sum(), [x, *used])
    assert all(parameter.grad is None for parameter in used) and x.grad is None
    return results


def gradient_penalty(wrap: Wrap, device: str) -> Sequence[Tensor | None]:
    net = Net(device, two_layers)
    model, results = wrap(net), []
    for step in range(2):
        x = batch(device, step, grad=True)
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        backward(y.pow(2).sum() + slope.pow(2).sum())
        results += [*grads(net), x.grad]
    return results


def third_order(wrap: Wrap, device: str) -> Sequence[Tensor | None]:
    net = Net(device, two_layers)
    x = batch(device, grad=True)
    y = wrap(net)(x).sum()
    for _ in range(2):
        (y,) = torch.autograd.grad(y, x, create_graph=True)
        y = y.pow(2).sum()
    backward(y)
    return [*grads(net), x.grad]


def odd_outputs(wrap: Wrap, device: str) -> Sequence[Tensor | None]:
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


def a_closure_over_a_leaf(wrap: Wrap, device: str) -> Sequence[Tensor | None]:
    """Replicas that run backward at the same time would each run what they share."""
    t = torch.full((6,), 1.5, dtype=torch.float64, requires_grad=True)
    seen: list[Tensor] = []
    register: Any = t.register_hook
    register(lambda grad: seen.append(grad.clone()))

    class Outside:
        value = t

    net = Net(device, lambda net, x: net.layers[0](x).cpu() * Outside.value.exp())
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


def attributes_that_require_grad(wrap: Wrap, device: str) -> Sequence[Tensor | None]:
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


def a_tensor_from_outside_that_thaws(wrap: Wrap, device: str) -> Sequence[Tensor | None]:
    """The replicas make as many nodes with it as without it."""
    t = torch.full((6,), 1.5, dtype=torch.float64)
    net = Net(device, lambda net, x: net.layers[0](x).cpu() * held["factor"])
    model, results, held = wrap(net), [], {"factor": t.exp()}
    for step in range(3):
        backward(model(batch(device, step)).pow(2).sum())
        results += grads(net)
    t.requires_grad_()
    for step in range(2):
        held["factor"] = t.exp()
        backward(model(batch(device, step)).pow(2).sum())
    held["factor"] = t.exp()
    x = batch(device, 7, grad=True)
    y = model(x).pow(2).sum()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    results += torch.autograd.grad(slope.pow(2).sum(), [t])
    return [*results, *grads(net), t.grad]


CASES: list[Case] = [
    several_forwards,
    separate_backwards,
    around_a_reentrant_checkpoint,
    checkpoints_inside,
    only_some_inputs,
    returned_gradients,
    gradient_penalty,
    third_order,
    odd_outputs,
    a_closure_over_a_leaf,
    attributes_that_require_grad,
    a_tensor_from_outside_that_thaws,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_gradients_are_those_of_the_bare_module(
    case: Case, slots: list[str], num_replicas: int
) -> None:
    def wrap(module: nn.Module) -> nn.Module:
        places, view = slots[:num_replicas], num_replicas != 2
        return dp.DistributedDataParallel(module, places, gradient_as_bucket_view=view)

    expected = case(lambda module: module, slots[0])
    got = case(wrap, slots[0])
    assert len(got) == len(expected)
    for i, (mine, bare) in enumerate(zip(got, expected, strict=True)):
        assert (mine is None) == (bare is None), i
        if mine is not None and bare is not None:
            torch.testing.assert_close(mine.cpu(), bare.cpu(), msg=f"result {i}")


def test_a_tensor_from_outside_that_the_caller_uses_too(num_replicas: int) -> None:
    """Its graph is gone through twice: in the cut, and by the caller's own backward."""
    results = []
    for wrapped in (False, True):
        t = torch.full((6,), 1.5, dtype=torch.float64, requires_grad=True)
        held: dict[str, Tensor] = {}
        net: nn.Module = Net("cpu", lambda net, x, held=held: net.layers[0](x) * held["h"])
        model = dp.DistributedDataParallel(net, ["cpu"] * num_replicas) if wrapped else net
        for step in range(3):
            held["h"] = t.exp()
            backward(model(batch("cpu", step)).pow(2).sum() + held["h"].sin().sum())
        results.append(t.grad)
    torch.testing.assert_close(*results)


def test_backward_in_another_thread_while_one_runs_is_an_error() -> None:
    import threading

    started, go_on = threading.Event(), threading.Event()

    class Wait(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, wait: bool) -> Tensor:
            ctx.wait = wait
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            if ctx.wait:
                started.set()
                assert go_on.wait(10)
            return grad, None

    net = Net("cpu", lambda net, x, wait: Wait.apply(net.layers[0](x), wait))
    model = dp.DistributedDataParallel(net, ["cpu", "cpu"])
    slow, quick = model(batch("cpu"), True).sum(), model(batch("cpu"), False).sum()
    thread = threading.Thread(target=slow.backward)
    thread.start()
    assert started.wait(10)
    with pytest.raises(RuntimeError, match="another backward of the same wrapper is running"):
        quick.backward()
    go_on.set()
    thread.join(10)
    got = grads(net)
    net.zero_grad()
    net(batch("cpu"), False).sum().backward()
    for mine, bare in zip(got, grads(net), strict=True):
        assert (mine is None) == (bare is None)
        if mine is not None:
            torch.testing.assert_close(mine, bare)
