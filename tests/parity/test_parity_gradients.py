"""What torch promises of a data-parallel backward, against the bare module."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dataparallel import DataParallel, data_parallel
from tests.models import assert_all_close


def test_data_parallel_buffers_requiring_grad(slots: list[str]) -> None:
    class Scale(nn.Module):
        def __init__(self, trained: Tensor) -> None:
            super().__init__()
            self.trained: Tensor
            self.fixed: Tensor
            self.register_buffer("trained", trained)
            self.register_buffer("fixed", trained.detach().clone())

        def forward(self, x: Tensor) -> Tensor:
            return x * self.trained.sin() + self.fixed

    home = slots[0]
    buffer = torch.randn(6, dtype=torch.float64, device=home, requires_grad=True)
    net = Scale(buffer)
    model = DataParallel(net, slots)
    x = torch.randn(5, 6, dtype=torch.float64, device=home)
    assert net.trained.requires_grad
    assert not net.fixed.requires_grad
    for function in (net, model):
        (first,) = torch.autograd.grad(function(x).square().sum(), buffer, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), buffer)
        if function is net:
            expected = first, second
    torch.testing.assert_close((first, second), expected)
    if home == "cpu":
        assert torch.autograd.gradcheck(lambda _: model(x), (buffer,))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_data_parallel_rnn(slots: list[str], bidirectional: bool) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(5, 7, 2, batch_first=True, bidirectional=bidirectional)

        def forward(self, x: Tensor) -> Any:
            self.rnn.flatten_parameters()
            return self.rnn(x)

    def step(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=10)
        output, _ = model(torch.ones(6, 4, 5, device=slots[0], dtype=torch.float64))
        torch.autograd.backward(F.mse_loss(output, torch.zeros_like(output)))
        optimizer.step()

    with torch.no_grad():
        net = Recurrent().to(slots[0], torch.float64)
        model = DataParallel(deepcopy(net), slots)
        model(torch.rand(2, 4, 5, dtype=torch.float64))
    for _ in range(3):
        step(net)
        step(model)
    for bare, wrapped in zip(net.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(wrapped, bare)


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 1, 2, 3)])
def test_data_parallel_sparse(slots: list[str], order: tuple[int, ...]) -> None:
    devices = [slots[i] for i in order]
    net = nn.Embedding(10, 5, sparse=True).to(devices[0])
    index = torch.randint(10, (20, 5), device=slots[1])
    expected = net(index.to(devices[0]))
    expected.sum().backward()
    assert net.weight.grad is not None
    grad = net.weight.grad.clone()
    net.zero_grad()

    out = data_parallel(net, index, devices)
    out.sum().backward()

    torch.testing.assert_close(out, expected)
    assert net.weight.grad.is_sparse
    torch.testing.assert_close(net.weight.grad.to_dense(), grad.to_dense())


def test_data_parallel_function_deletion(slots: list[str]) -> None:
    """A gradient penalty: the graph of the backward outlives the call that made it."""

    def penalty(net: nn.Module, x: Tensor) -> Tensor:
        output = net(x)
        (grad,) = torch.autograd.grad(
            output, x, torch.ones_like(output), create_graph=True, retain_graph=True
        )
        return grad.square().mean()

    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(slots[0], torch.float64)
    x = torch.randn(6, 4, dtype=torch.float64, device=slots[0], requires_grad=True)
    torch.autograd.backward(penalty(net, x))
    expected = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    torch.autograd.backward(penalty(DataParallel(net, slots), x))
    for parameter, grad in zip(net.parameters(), expected, strict=True):
        if grad is None or parameter.grad is None:
            # The last bias has no influence on the penalty: no gradient, or one that is zero.
            assert grad is None or not grad.any()
            assert parameter.grad is None or not parameter.grad.any()
        else:
            torch.testing.assert_close(parameter.grad, grad)


LAST, FIRST = torch.channels_last, torch.contiguous_format


@pytest.mark.parametrize(
    "layouts", [[FIRST] * 4, [LAST, LAST, FIRST, FIRST], [LAST] * 4], ids=["first", "mixed", "last"]
)
@pytest.mark.parametrize(
    "dtypes",
    [[torch.float64] * 4, [torch.float64] * 2 + [torch.float32] * 2],
    ids=["double", "mixed"],
)
def test_strided_grad_layout(
    slots: list[str], layouts: list[torch.memory_format], dtypes: list[torch.dtype]
) -> None:
    class ConvNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = [3, 4, 5, 4, 3]
            self.layers = nn.ModuleList(nn.Conv2d(widths[i], widths[i + 1], 2) for i in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer, dtype in zip(self.layers, dtypes, strict=True):
                x = layer(x.to(dtype))
            return x

    net = ConvNet().to(slots[0])
    for layer, layout, dtype in zip(net.layers, layouts, dtypes, strict=True):
        layer.to(dtype=dtype, memory_format=layout)  # type: ignore[call-overload]
    model = DataParallel(deepcopy(net), slots)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (net, model)]
    x = torch.randn(9, 3, 6, 6, device=slots[0])
    target = torch.randn(9, 3, 2, 2, device=slots[0])
    for _ in range(2):
        for each in (net, model):
            torch.autograd.backward(F.mse_loss(each(x).float(), target))
        for i, (bare, wrapped) in enumerate(zip(net.layers, model.module.layers, strict=True)):
            assert isinstance(bare, nn.Conv2d)
            assert isinstance(wrapped, nn.Conv2d)
            assert bare.weight.grad is not None
            assert wrapped.weight.grad is not None
            assert wrapped.weight.is_contiguous(memory_format=layouts[i])
            assert wrapped.weight.grad.is_contiguous(memory_format=layouts[i])
            torch.testing.assert_close(wrapped.weight.grad, bare.weight.grad, rtol=1e-4, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_parameter_list_dict_replica(slots: list[str]) -> None:
    class Containers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plist = nn.ParameterList([torch.randn(3), torch.randn(3)])
            self.pdict = nn.ParameterDict({"scale": torch.randn(3), "shift": torch.randn(3)})

        def forward(self, x: Tensor) -> Tensor:
            assert len(self.plist) == 2
            assert list(self.pdict) == ["scale", "shift"]
            for parameter in self.plist:
                x = x * parameter
            out: Tensor = x * self.pdict["scale"] + self.pdict["shift"]
            return out

    net = Containers().to(slots[0])
    x = torch.randn(8, 3, device=slots[0])
    expected = net(x)
    grads = torch.autograd.grad(expected.square().sum(), list(net.parameters()))
    out = DataParallel(net, slots)(x)
    torch.testing.assert_close(out, expected)
    found = torch.autograd.grad(out.square().sum(), list(net.parameters()))
    torch.testing.assert_close(found, grads)


def test_parameters_that_do_not_train_and_that_nobody_uses(slots: list[str]) -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(3, 3)
            self.frozen = nn.Linear(3, 3).requires_grad_(False)
            self.unused = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.frozen(self.used(x))
            return found

    net = Partly().to(slots[0])
    model = DataParallel(net, slots)
    x = torch.randn(8, 3, device=slots[0])
    (expected,) = torch.autograd.grad(net(x).sum(), net.used.weight)
    model(x).sum().backward()
    torch.testing.assert_close(net.used.weight.grad, expected)
    assert net.frozen.weight.grad is None
    assert net.unused.weight.grad is None or not net.unused.weight.grad.any()


def test_gradients_accumulate_over_batches(slots: list[str]) -> None:
    net = nn.Linear(3, 2).to(slots[0])
    model = DataParallel(deepcopy(net), slots)
    for _ in range(3):
        x = torch.randn(5, 3, device=slots[0])
        for each in (net, model):
            each(x).square().sum().backward()
    for bare, wrapped in zip(net.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(wrapped.grad, bare.grad)


def test_backward_twice_through_one_graph(slots: list[str]) -> None:
    net = nn.Linear(3, 2).to(slots[0])
    loss = DataParallel(net, slots)(torch.randn(5, 3)).square().sum()
    loss.backward(retain_graph=True)
    assert net.weight.grad is not None
    once = net.weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(net.weight.grad, 2 * once)


def test_hooks_of_parameters_that_get_no_gradient(slots: list[str]) -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.unused = (nn.Linear(3, 3) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            # The backward of this one is a backward of its own, in which only it has gradients.
            output: Tensor = checkpoint(self.second, self.first(x), use_reentrant=True)
            return output

    net = Partly().to(slots[0], torch.float64)
    seen: list[str] = []

    def doubled(grad: Tensor) -> Tensor:
        return grad * 2

    def note(name: str) -> Callable[[Tensor], None]:
        return lambda parameter: seen.append(name)

    for name in ("first", "second", "unused"):
        weight = net.get_parameter(f"{name}.weight")
        weight.register_hook(doubled)
        weight.register_post_accumulate_grad_hook(note(name))
    x = torch.randn(8, 3, dtype=torch.float64, device=slots[0])
    net(x).square().sum().backward()
    expected = [parameter.grad for parameter in net.parameters()]
    assert seen == ["second", "first"]
    seen.clear()
    net.zero_grad()
    DataParallel(net, slots)(x).square().sum().backward()
    # Once for each replica where these have backwards of their own.
    assert seen == ["second"] * len(slots) + ["first"]
    assert_all_close((parameter.grad for parameter in net.parameters()), expected)
