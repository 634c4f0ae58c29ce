"""Arguments of the wrapper: what is split, what goes whole, what cannot be split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel, DistributedDataParallel, Replicate
from tests.models import assert_all_close, grads_of, twins


class Masked(nn.Linear):
    """Takes a mask and a shift, for which a batch is none."""

    def __init__(self) -> None:
        super().__init__(3, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        output = super().forward(x)
        output = output if mask is None else output * mask
        return output if shift is None else output + shift


@pytest.mark.parametrize("in_dims", [{"mask": None}, {1: None}, {"mask": None, "shift": None}, {}])
def test_arguments_that_go_whole_to_each_replica(slots: list[str], in_dims: Any) -> None:
    """Of the module; targets of a loss are split, whatever their place or name is."""
    bare, inner = twins(Masked, slots[0])
    model = DataParallel(inner, slots, in_dims=in_dims)
    x, y = torch.randn(2, 6, 3, dtype=torch.double, device=slots[0]).unbind(0)
    mask = torch.rand(1, 3, dtype=torch.double, device=slots[0]).requires_grad_()
    given = mask if in_dims else Replicate(mask)
    criterion = nn.MSELoss()
    calls: list[tuple[Any, Any]] = [(x, (x,)), ((x, given), (x, mask))]
    if 1 not in in_dims:
        calls.append(({"x": x, "mask": given}, (x, mask)))
    for inputs, args in calls:
        expected, found = criterion(bare(*args), y), model.loss(criterion, inputs, y)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(model.loss(criterion, inputs, {"target": y}), expected)
        for loss in (expected, found):
            loss.backward()
    assert_all_close(grads_of(model), grads_of(bare))
    output, expected = model(x, given), bare(x, mask)
    torch.testing.assert_close(output, expected)
    grads = [torch.autograd.grad(each.square().sum(), mask) for each in (output, expected)]
    torch.testing.assert_close(*grads)


class Table(nn.Linear):
    """Looks at nested arguments of which some are marked."""

    def forward(self, x: Tensor, rest: Any, *, table: Tensor) -> Tensor:  # type: ignore[override]
        assert type(table) is type(rest["more"][0]) is Tensor
        assert rest["name"] == "digits" and rest["none"] is None and rest["pair"] == (1, [2])
        return super().forward(x) * table.sum(0) + rest["more"][0].sum()


def _loss(output: Tensor, target: Tensor, table: Tensor) -> Tensor:
    return (output * table.sum(0) - target).pow(2).sum()


@pytest.mark.parametrize("wrapper", [DataParallel, DistributedDataParallel])
@pytest.mark.parametrize(("count", "size"), [(1, 5), (2, 0), (2, 1), (3, 5)])
def test_no_replica_gets_to_see_a_marker(wrapper: Any, count: int, size: int) -> None:
    bare, inner = twins(lambda: Table(3, 3), "cpu")
    x, target = torch.randn(2, size, 3, dtype=torch.double).unbind(0)
    table, more = torch.randn(2, 4, 3, dtype=torch.double).requires_grad_().unbind(0)

    def results(model: Any, mark: Any) -> list[Tensor | None]:
        rest = {"more": [mark(more)], "name": mark("digits"), "none": mark(None)}
        rest["pair"] = mark((1, mark([2])))
        with torch.no_grad():
            outputs = [model(x, rest, table=mark(table))]
        outputs.append(model(x, rest, table=mark(table)))
        outputs[-1].pow(2).sum().backward(retain_graph=True)
        inputs = {"x": x, "rest": rest, "table": mark(table)}
        if model is bare:
            outputs.append(_loss(bare(**inputs), target, table))
        else:
            chunks = max(min(len(model.device_ids), size), 1)
            loss = model.loss(_loss, inputs, (target, mark(table)), weight=lambda *_: 1.0)
            outputs.append(loss * chunks)
        outputs[-1].backward()
        return [*outputs, *grads_of(model)]

    model = wrapper(inner, ["cpu"] * count)
    expected = results(bare, lambda value: value)
    assert_all_close(results(model, Replicate), expected)
    for _ in range(count - 1):
        model.drop_replica(1)
    model.zero_grad()
    assert_all_close(results(model, Replicate), expected)


class Own(DataParallel[nn.Module]):
    """A scatter of the user, which may leave the targets of a loss out, or not split them."""

    how = "all"

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        if self.how == "all":
            return super().scatter(tuple(value * 2 for value in inputs), kwargs, device_ids)
        kept = kwargs if self.how == "whole targets" else {}
        return [(part,) for part in inputs[0].chunk(2)], [kept] * 2


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_targets_in_a_scatter_of_the_user() -> None:
    model = Own(Masked(), ["cpu", "cpu"], in_dims={1: None, 2: None})
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    expected = nn.functional.mse_loss(model.module(2 * x), y)
    torch.testing.assert_close(model.loss(nn.MSELoss(), x, y), expected)
    for how, error, match in (
        ("no targets", KeyError, "targets of the loss"),
        ("whole targets", RuntimeError, "must match the size of tensor b"),
    ):
        model.how = how
        with pytest.raises(error, match=match):
            model.loss(nn.MSELoss(), x, y)


# Forward mode scripts its formulas, and torch deprecates scripting.
@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_transforms_are_refused_between_several_replicas(slots: list[str]) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to(slots[0])
    model, one = DataParallel(module, slots), DataParallel(module, slots[:1])
    x, y = torch.randn(4, 3, device=slots[0]), torch.zeros(4, 4, device=slots[0])

    def grad_of(call: Any) -> Any:
        return torch.func.grad(lambda x: call(x).sum())

    calls: list[Callable[[], Any]] = [
        lambda: grad_of(model)(x),
        lambda: torch.func.vmap(model)(x[None]),
        lambda: torch.func.jvp(model, (x,), (x,)),
        lambda: grad_of(lambda x: model.loss(nn.MSELoss(), x, y))(x),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="with functorch transforms"):
            call()
        torch.testing.assert_close(model(x), module(x))
    # What the guides advise works, and a single replica is the bare module.
    for allowed in (model.module, one):
        torch.testing.assert_close(grad_of(allowed)(x), grad_of(module)(x))


def test_inputs_that_cannot_be_split(slots: list[str]) -> None:
    model = DataParallel(Masked().to(slots[0]), slots, dim=1)
    for args, match in (((3, "text"), "no tensor"), ((torch.randn(4),), "dim 1 is out of range")):
        with pytest.raises(ValueError, match=match):
            model(*args)
    assert model(torch.ones(2, 4, 3)).shape == (2, 4, 3)
