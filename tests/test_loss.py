"""``model.loss``: the criterion in the replicas, against the criterion on the whole output."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dataparallel import DataParallel

CLASSES = 4


def network(device: str) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    return net.to(device, torch.float64)


def inputs(device: str, samples: int) -> Tensor:
    return torch.randn(samples, 3, dtype=torch.float64, device=device)


def labels(device: str, samples: int, ignored: int | None = None) -> Tensor:
    found = torch.randint(0, CLASSES, (samples,), device=device)
    if ignored is not None:
        found[: samples // 2] = ignored
    return found


def assert_same(
    model: DataParallel[Any],
    loss: Callable[[], Tensor],
    expected: Callable[[], Tensor],
    *others: Tensor,
) -> None:
    """Value and gradients, second derivatives included."""
    leaves = [*model.module.parameters(), *others]
    results = []
    for function in (expected, loss):
        value = function().sum()
        first = torch.autograd.grad(value, leaves, create_graph=True)
        penalty = torch.stack([grad.square().sum().cpu() for grad in first]).sum()
        second = torch.autograd.grad(penalty, leaves, allow_unused=True)
        # The second derivative of a bias may be zero by absence or by value.
        results.append(
            [
                value,
                *first,
                *(zero_if(grad, leaf) for grad, leaf in zip(second, leaves, strict=True)),
            ]
        )
    torch.testing.assert_close(results[1], results[0])


def zero_if(grad: Tensor | None, leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if grad is None else grad


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("samples", [1, 3, 4, 9, 13])
def test_class_weights_and_ignored_targets(slots: list[str], samples: int, reduction: str) -> None:
    model = DataParallel(network(slots[0]), slots)
    weight = torch.tensor([0.5, 2.0, 1.0, 3.0], dtype=torch.float64, device=slots[0])
    criterion = nn.CrossEntropyLoss(weight, ignore_index=-1, reduction=reduction)
    x, y = inputs(slots[0], samples), labels(slots[0], samples, -1)
    assert_same(model, lambda: model.loss(criterion, x, y), lambda: criterion(model.module(x), y))


def test_functions_keep_their_tensors(slots: list[str]) -> None:
    model = DataParallel(network(slots[0]), slots)
    weight = torch.rand(CLASSES, dtype=torch.float64, device=slots[0])
    criterion = functools.partial(F.cross_entropy, weight=weight, label_smoothing=0.1)
    x, y = inputs(slots[0], 11), labels(slots[0], 11)
    assert_same(model, lambda: model.loss(criterion, x, y), lambda: criterion(model.module(x), y))


def test_a_criterion_that_learns(slots: list[str]) -> None:
    class Tempered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(output / self.temperature, target)

    model = DataParallel(network(slots[0]), slots)
    criterion = Tempered().to(slots[0])
    x, y = inputs(slots[0], 11), labels(slots[0], 11)
    assert_same(
        model,
        lambda: model.loss(criterion, x, y, weight="samples"),
        lambda: criterion(model.module(x), y),
        criterion.temperature,
    )


def test_several_targets(slots: list[str]) -> None:
    class Embed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 5)

        def forward(self, a: Tensor, *, shift: Tensor) -> Any:
            return self.linear(a) + shift

    net = Embed().to(slots[0], torch.float64)
    model = DataParallel(net, slots)
    a, shift = inputs(slots[0], 7), torch.randn(7, 1, dtype=torch.float64, device=slots[0])
    positive = torch.randn(7, 5, dtype=torch.float64, device=slots[0])
    negative = torch.randn(7, 5, dtype=torch.float64, device=slots[0])
    criterion = nn.TripletMarginLoss()
    expected = criterion(net(a, shift=shift), positive, negative)
    named = {"positive": positive, "negative": negative}
    for targets in ((positive, negative), named):
        found = model.loss(criterion, {"a": a, "shift": shift}, targets)
        torch.testing.assert_close(found, expected)


def test_element_weights_come_with_the_targets(slots: list[str]) -> None:
    model = DataParallel(network(slots[0]), slots)
    x, y = inputs(slots[0], 7), torch.randn(7, CLASSES, dtype=torch.float64, device=slots[0])
    weight = torch.rand(7, CLASSES, dtype=torch.float64, device=slots[0])
    criterion: Callable[..., Tensor] = F.mse_loss
    assert_same(
        model,
        lambda: model.loss(criterion, x, {"target": y, "weight": weight}),
        lambda: criterion(model.module(x), y, weight=weight),
    )


def test_an_own_criterion_on_a_structured_output(slots: list[str]) -> None:
    class Structured(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return {"logits": super().forward(x), "extra": (x,)}

    def masked(output: Any, target: Tensor) -> Tensor:
        losses: Tensor = output["logits"].square().mean(-1)
        return (losses * (target >= 0)).sum() / (target >= 0).sum()

    model = DataParallel(Structured(3, 2).to(slots[0], torch.float64), slots)
    x, y = inputs(slots[0], 10), labels(slots[0], 10, -1)  # two chunks weigh nothing
    assert_same(
        model,
        lambda: model.loss(masked, x, y, weight=lambda output, target: (target >= 0).sum()),
        lambda: masked(model.module(x), y),
    )


@pytest.mark.parametrize("position", [None, 1, -1])
def test_the_loss_is_on_the_output_device(slots: list[str], position: int | None) -> None:
    where = -1 if position == -1 else None if position is None else slots[position]
    model = DataParallel(network(slots[0]), slots, output_device=where)
    x, y = inputs(slots[0], 9), labels(slots[0], 9)
    found = model.loss(F.cross_entropy, x, y)
    wanted = {None: slots[0], 1: slots[1], -1: "cpu"}[position]
    assert found.device == torch.device(wanted)
    torch.testing.assert_close(found.cpu(), F.cross_entropy(model.module(x), y).cpu())


def test_no_grad_and_training_after_an_error(slots: list[str]) -> None:
    class Flattened(nn.Sequential):
        flat = False

        def forward(self, x: Tensor) -> Any:
            for layer in self:
                x = layer(x)
            return x.flatten() if self.flat else x

    net = Flattened(*network(slots[0]))
    model = DataParallel(net, slots)
    x, y = inputs(slots[0], 9), labels(slots[0], 9)
    with pytest.raises(ValueError, match="what <lambda> divides its loss by is not known"):
        model.loss(lambda output, target: output.sum(), x, y)
    net.flat = True
    with pytest.raises(ValueError, match=r"(?s)For 1D input, 1D target.*in replica 0"):
        model.loss(nn.NLLLoss(), x, y)
    net.flat = False
    with torch.no_grad():
        assert not model.loss(F.cross_entropy, x, y).requires_grad
    torch.testing.assert_close(
        model.loss(F.cross_entropy, x, y), F.cross_entropy(model.module(x), y)
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_batch_as_the_second_dimension(slots: list[str], reduction: str) -> None:
    net = nn.Linear(3, 2).to(slots[0], torch.float64)
    model = DataParallel(net, slots, dim=1)
    x = torch.randn(5, 7, 3, dtype=torch.float64, device=slots[0])
    y = torch.randn(5, 7, 2, dtype=torch.float64, device=slots[0])
    criterion = nn.L1Loss(reduction=reduction)
    torch.testing.assert_close(model.loss(criterion, x, y), criterion(net(x), y))


def test_batchmean_needs_the_batch_first(slots: list[str]) -> None:
    model = DataParallel(nn.LogSoftmax(-1), slots, dim=1)
    x = torch.randn(5, 7, 3, device=slots[0])
    with pytest.raises(ValueError, match="the batch is dimension 1"):
        model.loss(nn.KLDivLoss(reduction="batchmean"), x, x.softmax(-1))
