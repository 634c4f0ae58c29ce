"""Gradients of replicas are added as all sums are: in order, floats of 16 bits in float32."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import dataparallel as dp
from tests.test_comm import in_order


class SometimesUsed(nn.Module):
    """The second layer has no part in the output of samples that begin with a negative number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.always = nn.Linear(6, 5)
        self.sometimes = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.always(x).tanh()
        return self.sometimes(y) if x[0, 0] > 0 else y


def gradients(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    module.zero_grad()
    module(x).float().pow(2).sum().backward()
    return [None if p.grad is None else p.grad.detach().cpu() for p in module.parameters()]


PLACES = {
    "cpu": ["cpu"] * 4,
    "one device": ["virtual:0"] * 4,
    "devices": [f"virtual:{i}" for i in range(4)],
    "mixed": ["virtual:0", "cpu", "virtual:0", "virtual:1"],
}


WRAPPERS: dict[str, Any] = {
    "DataParallel": dp.DataParallel,
    "DistributedDataParallel": dp.DistributedDataParallel,
    "views": partial(dp.DistributedDataParallel, gradient_as_bucket_view=True),
}


@pytest.mark.in_pairs
@pytest.mark.parametrize(
    ("place", "dtype"), [*zip(PLACES, [torch.bfloat16, torch.float16] * 2, strict=True)]
)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("unused", [(), (2,), (1, 3)])
def test_gradients_are_kept_in_float32_until_all_are_added(
    wrapper: str, dtype: torch.dtype, place: str, unused: tuple[int, ...]
) -> None:
    slots = PLACES[place]
    bare = SometimesUsed().to(dtype)
    module = SometimesUsed().to(dtype).to(slots[0])
    x = (torch.randn(10, 6).abs() * 2.0 ** torch.arange(10)[:, None] / 30).to(dtype)
    chunks = x.chunk(4)
    for i in unused:
        chunks[i][0, 0] *= -1
    columns = zip(*(gradients(bare, chunk) for chunk in chunks), strict=True)
    terms = [[grad for grad in column if grad is not None] for column in columns]
    expected = list(map(in_order, terms))
    if dtype == torch.bfloat16 and len(unused) < 2:
        one_by_one = [functools.reduce(torch.add, each) for each in terms]
        assert not all(map(torch.equal, expected, one_by_one))
    model = WRAPPERS[wrapper](module, slots)
    for _ in range(3):
        for grad, right in zip(gradients(model, x), expected, strict=True):
            assert grad is not None and torch.equal(grad, right)
    model.close()


class Tables(nn.Module):
    """Two tables, of which some replicas have sparse gradients, and others dense ones or none."""

    def __init__(self, kinds: list[list[str]]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(5, 1) for _ in kinds[0])
        self.kinds = kinds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        replica = dp.current_replica()
        kinds = self.kinds[0 if replica is None else replica.index]
        total = torch.zeros(len(x))
        for table, kind in zip(self.tables, kinds, strict=True):
            if kind != "unused":
                weight: Any = table.weight
                found = nn.functional.embedding(x, weight, sparse=kind == "sparse")
                total = total + found.sum((1, 2))
        return total


@pytest.mark.in_pairs
@pytest.mark.parametrize("wrapper", ["DataParallel", "DistributedDataParallel"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "kinds",
    [
        [["sparse", "sparse"], ["sparse", "sparse"], ["sparse", "unused"]],
        [["sparse", "dense"], ["dense", "sparse"], ["dense", "dense"]],
        [["unused", "sparse"], ["unused", "sparse"], ["sparse", "dense"]],
    ],
)
def test_sparse_and_dense_gradients_are_added(
    wrapper: str, batch: int, kinds: list[list[str]]
) -> None:
    net = Tables(kinds)
    model = WRAPPERS[wrapper](net, ["cpu"] * 3)
    x = torch.randint(5, (batch, 4))
    for _ in range(2):
        model.zero_grad()
        model(x).sum().backward()
        for table, *column in zip(net.tables, *kinds[:batch], strict=True):
            used = [row for row, kind in zip(x, column, strict=False) if kind != "unused"]
            if not used:
                continue
            is_sparse = {kind for kind in column if kind != "unused"} == {"sparse"}
            assert table.weight.grad.is_sparse == is_sparse
            counts = torch.cat(used).bincount(minlength=5)
            assert table.weight.grad.to_dense().flatten().tolist() == counts.tolist()
    model.close()


class Turned(torch.autograd.Function):
    """A weight whose gradient has its elements in another order in memory."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.mT.contiguous().mT


class Layouts(nn.Module):
    """Weights of some layouts, of which the gradients in some replicas have others."""

    def __init__(self, turned: tuple[int, ...]) -> None:
        super().__init__()
        self.turned = turned
        image = torch.arange(24.0).view(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)
        # A dimension of size 1 may have any stride.
        thin = torch.arange(4.0).view(1, 4).as_strided((4, 1), (1, 7))
        shapes = [torch.arange(12.0).view(3, 4), image, thin, torch.zeros(0, 2)]
        self.weights = nn.ParameterList(map(nn.Parameter, shapes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        replica = dp.current_replica()
        weight, image, thin, empty = self.weights
        if replica is not None and replica.index in self.turned:
            weight = Turned.apply(weight)
        images = x[:, 0, None, None, None, None] * image
        y = (x @ weight.mT).sum(1) + images.flatten(1).sum(1)
        total: torch.Tensor = y + (x @ thin).sum(1) + empty.sum()
        return total


@pytest.mark.in_pairs
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("turned", [(), (0, 1, 2, 3), (1, 3)])
def test_gradients_of_other_layouts_are_added(
    wrapper: str, place: str, turned: tuple[int, ...]
) -> None:
    x = torch.arange(32.0).view(8, 4)
    model = WRAPPERS[wrapper](Layouts(turned).to(PLACES[place][0]), PLACES[place])
    expected = gradients(Layouts(()), x)
    for _ in range(3):
        for grad, right in zip(gradients(model, x), expected, strict=True):
            assert grad is not None and right is not None and torch.equal(grad, right)
    model.close()
