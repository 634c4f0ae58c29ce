"""Arguments of the wrapper: what is split, what goes whole, what cannot be split."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel, DistributedDataParallel, Replicate, current_replica
from tests.models import assert_all_close, grads_of, twins


class Masked(nn.Module):
    def forward(self, x: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
        return x * mask * scale


def test_arguments_that_go_whole_to_each_replica(slots: list[str]) -> None:
    x = torch.randn(6, 3, device=slots[0])
    mask = torch.randn(1, 3, device=slots[0], requires_grad=True)
    expected = x * mask * 2.0
    by_name = DataParallel(Masked(), slots, in_dims={"mask": None})
    torch.testing.assert_close(by_name(x, mask=mask, scale=2.0), expected)
    torch.testing.assert_close(by_name(x, mask, 2.0), expected)
    by_position = DataParallel(Masked(), slots, in_dims={1: None})
    torch.testing.assert_close(by_position(x, mask, 2.0), expected)
    marked = DataParallel(Masked(), slots)
    torch.testing.assert_close(marked(x, Replicate(mask), 2.0), expected)
    marked(x, Replicate(mask)).sum().backward()
    torch.testing.assert_close(mask.grad, x.sum(0, keepdim=True))


def test_an_argument_that_goes_whole_to_each_replica_is_changed_in_place_once(
    slots: list[str],
) -> None:
    class Doubling(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            mask.mul_(2)
            return x * mask

    x = torch.randn(6, 3, device=slots[0])
    for devices in (slots, slots[:1] * 3):
        model = DataParallel(Doubling(), devices, in_dims={"mask": None})
        mask = torch.ones(3, device=slots[0])
        for expected in (2.0, 4.0):
            torch.testing.assert_close(model(x, mask), x * expected)
            assert mask.tolist() == [expected] * 3
        weight = torch.ones(3, device=slots[0], requires_grad=True)
        model(x, weight.clone()).sum().backward()
        torch.testing.assert_close(weight.grad, 2 * x.sum(0))


class Table(nn.Module):
    """Looks at nested arguments of which some are marked."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor, rest: Any, *, table: Tensor) -> Tensor:
        assert type(table) is type(rest["more"][0]) is Tensor
        assert rest["name"] == "digits" and rest["none"] is None and rest["pair"] == (1, [2])
        output: Tensor = self.linear(x) * table.sum(0) + rest["more"][0].sum()
        return output


def _loss(output: Tensor, target: Tensor, table: Tensor) -> Tensor:
    return (output * table.sum(0) - target).pow(2).sum()


@pytest.mark.parametrize("wrapper", [DataParallel, DistributedDataParallel])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("size", [0, 1, 5])
def test_no_replica_gets_to_see_a_marker(wrapper: Any, count: int, size: int) -> None:
    bare, inner = twins(Table, "cpu")
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


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        output: Tensor = self.linear(x)
        output = output if mask is None else output * mask
        return output if shift is None else output + shift


@pytest.mark.parametrize("in_dims", [{"mask": None}, {1: None}, {"mask": None, "shift": None}])
def test_in_dims_is_for_the_arguments_of_the_module_not_for_targets(
    slots: list[str], in_dims: Any
) -> None:
    bare, inner = twins(Optional, slots[0])
    model = DataParallel(inner, slots, in_dims=in_dims)
    x = torch.randn(6, 3, dtype=torch.double, device=slots[0])
    y = torch.randn_like(x)
    mask = torch.rand(6, 1, dtype=torch.double, device=slots[0])[:1]
    criterion = nn.MSELoss()
    calls: list[tuple[Any, Any]] = [(x, (x,)), ((x, mask), (x, mask))]
    if 1 not in in_dims:
        calls.append(({"x": x, "mask": mask}, (x, mask)))
    for inputs, args in calls:
        expected, found = criterion(bare(*args), y), model.loss(criterion, inputs, y)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(model.loss(criterion, inputs, {"target": y}), expected)
        for loss in (expected, found):
            loss.backward()
    assert_all_close(grads_of(model), grads_of(bare))
    # After a loss the forward takes `in_dims` for all of its arguments again.
    torch.testing.assert_close(model(x, mask), bare(x, mask))


def test_in_dims_beside_targets_in_a_scatter_of_the_user(slots: list[str]) -> None:
    class Own(DataParallel[Optional]):
        def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
            return super().scatter(tuple(value * 2 for value in inputs), kwargs, device_ids)

    inner = Optional().to(slots[0])
    model = Own(inner, slots, in_dims={1: None, 2: None})
    x, y = torch.randn(6, 3, device=slots[0]), torch.randn(6, 3, device=slots[0])
    expected = nn.functional.mse_loss(inner(2 * x), y)
    torch.testing.assert_close(model.loss(nn.MSELoss(), x, y), expected)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    ("keeps", "error", "message"),
    [
        (False, KeyError, "targets of the loss"),
        (True, RuntimeError, "must match the size of tensor b"),
    ],
)
def test_a_scatter_of_the_user_that_does_not_split_targets(
    keeps: bool, error: type[Exception], message: str
) -> None:
    class Own(DataParallel[nn.Linear]):
        def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
            return [(part,) for part in inputs[0].chunk(2)], [kwargs if keeps else {}] * 2

    model = Own(nn.Linear(3, 2), ["cpu", "cpu"])
    with pytest.raises(error, match=message):
        model.loss(nn.MSELoss(), torch.randn(4, 3), torch.randn(4, 2))


# Forward mode scripts its formulas, and torch deprecates scripting.
@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_transforms_are_refused_between_several_replicas(slots: list[str]) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to(slots[0])
    model, one = DataParallel(module, slots), DataParallel(module, slots[:1])
    x, y = torch.randn(4, 3, device=slots[0]), torch.zeros(4, 4, device=slots[0])

    def grad_of(call: Any) -> Any:
        def total(x: Tensor) -> Any:
            return call(x).sum()

        return torch.func.grad(total)

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


@pytest.mark.parametrize(
    ("args", "kwargs", "match"),
    [
        ((torch.randn(4, 3), torch.randn(5, 3)), {}, r"4.*5|5.*4"),
        ((torch.randn(4, 3),), {"mask": torch.randn(2, 3)}, "mask"),
        ((3,), {"mask": "text"}, "no tensor"),
    ],
)
def test_inputs_that_cannot_be_split(
    slots: list[str], args: tuple[Any, ...], kwargs: dict[str, Any], match: str
) -> None:
    model = DataParallel(Masked(), slots)
    with pytest.raises(ValueError, match=match):
        model(*args, **kwargs)
    good = torch.ones(4, 3)
    assert model(good, good).eq(1).all()


def test_a_struct_sequence_beside_the_batch(slots: list[str]) -> None:
    """Their types refuse to be made as other tuples are."""

    class Dated(nn.Module):
        def forward(self, x: Tensor, when: time.struct_time) -> tuple[Tensor, time.struct_time]:
            return x * when.tm_year, when

    x, when = torch.randn(4, 3), time.gmtime(0)
    result, returned = DataParallel(Dated(), slots)(x, when)
    torch.testing.assert_close(result.cpu(), x * 1970)
    assert type(returned) is time.struct_time
    assert returned == when


def test_a_dimension_out_of_range(slots: list[str]) -> None:
    model = DataParallel(nn.Identity(), slots, dim=2)
    with pytest.raises(ValueError, match=r"dim"):
        model(torch.randn(4, 3))
    assert model(torch.randn(4, 3, 5)).shape == (4, 3, 5)


@pytest.mark.parametrize("batch", [0, 1, 2, 3, 5])
def test_small_batches_run_on_fewer_replicas(slots: list[str], batch: int) -> None:
    seen = []

    class Notes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            replica = current_replica()
            assert replica is not None
            seen.append((replica.index, replica.num_replicas, len(x)))
            return x

    assert DataParallel(Notes(), slots)(torch.randn(batch, 3)).shape == (batch, 3)
    chunks = [len(c) for c in torch.randn(batch, 3).chunk(4)] if batch else [0]
    assert sorted(seen) == [(i, len(chunks), size) for i, size in enumerate(chunks)]


@pytest.mark.parametrize("batch", [5, 8])
def test_scalars(slots: list[str], batch: int) -> None:
    class Loss(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean()

    x = torch.randn(batch, 3, dtype=torch.double, device=slots[0], requires_grad=True)
    mean = DataParallel(Loss(), slots, scalars="mean")(x)
    torch.testing.assert_close(mean, x.mean())
    (grad,) = torch.autograd.grad(mean, x)
    torch.testing.assert_close(grad, torch.full_like(x, 1 / x.numel()))
    stacked = DataParallel(Loss(), slots)(x)
    torch.testing.assert_close(stacked, torch.stack([c.mean() for c in x.chunk(4)]))
    total = DataParallel(Loss(), slots, scalars="sum")(x)
    torch.testing.assert_close(total, stacked.sum())
