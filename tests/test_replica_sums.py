"""Gradients of replicas are added as all sums are: in order, floats of 16 bits in float32."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import dataparallel as dp
from dataparallel.reducer.buckets import local_sum
from tests.comm_cases import in_order, sparse

CPU = torch.device("cpu")


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


def gradients(module: nn.Module, output: torch.Tensor) -> dict[str, torch.Tensor | None]:
    module.zero_grad()
    output.float().pow(2).sum().backward()
    return {
        name: None if parameter.grad is None else parameter.grad.detach().cpu().clone()
        for name, parameter in module.named_parameters()
    }


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


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
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
    columns: dict[str, list[torch.Tensor]] = {}
    for chunk in chunks:
        for name, grad in gradients(bare, bare(chunk)).items():
            columns.setdefault(name, [])
            if grad is not None:
                columns[name].append(grad)
    expected = {name: in_order(terms) for name, terms in columns.items()}
    if dtype == torch.bfloat16 and len(unused) < 2:
        one_by_one = {name: functools.reduce(torch.add, terms) for name, terms in columns.items()}
        assert any(not torch.equal(expected[name], one_by_one[name]) for name in expected)
    model = WRAPPERS[wrapper](module, slots)
    for _ in range(3):
        got = gradients(module, model(x))
        for name, grad in got.items():
            assert grad is not None and torch.equal(grad, expected[name]), name
    model.close()


def test_sums_take_the_memory_of_the_first_replica() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        rows: list[list[torch.Tensor | None]] = [
            [torch.randn(5).to(dtype), None, torch.randn(3).to(dtype)],
            [torch.randn(5).to(dtype), torch.randn(4).to(dtype), None],
            [torch.randn(5).to(dtype), torch.randn(4).to(dtype), torch.randn(3).to(dtype)],
            [None, torch.randn(4).to(dtype), None],
        ]
        columns = [[g for g in column if g is not None] for column in zip(*rows, strict=True)]
        expected = [in_order(column) for column in columns]
        sums = local_sum(rows, CPU)
        for total, column, wanted in zip(sums, columns, expected, strict=True):
            assert total is column[0]
            assert torch.equal(total, wanted)


def test_sparse_and_dense_gradients_are_added() -> None:
    rows: list[list[torch.Tensor | None]] = [
        [sparse([1.0], [2]), sparse([1.0, 2.0], [0, 3]), torch.ones(5), None],
        [sparse([2.0], [2]), torch.ones(5), sparse([5.0], [1]), None],
        [None, sparse([4.0], [4]), torch.ones(5), sparse([5.0], [1])],
    ]
    both, first, second, alone = local_sum(rows, CPU)
    assert both is not None and first is not None and second is not None and alone is not None
    assert both.is_sparse and both.to_dense().tolist() == [0, 0, 3, 0, 0]
    assert first.tolist() == [2, 1, 1, 3, 5]
    assert second.tolist() == [2, 7, 2, 2, 2]
    assert alone is rows[2][3]
    # Nothing is written over a sparse term.
    kept = rows[0][0]
    assert kept is not None and kept.to_dense().tolist() == [0, 0, 1, 0, 0]


def test_every_replica_has_a_gradient_and_some_are_sparse() -> None:
    def rows() -> list[list[Any]]:
        return [
            [sparse([1.0], [2]), sparse([1.0], [0]), torch.ones(5)],
            [sparse([2.0], [3]), torch.ones(5), sparse([5.0], [1])],
        ]

    kept = rows()
    for both, first, second in (local_sum(kept, CPU), dp.comm.reduce_add_coalesced(rows())):
        assert both is not None and first is not None and second is not None
        assert both.is_sparse and both.to_dense().tolist() == [0, 0, 1, 2, 0]
        assert first.tolist() == [2, 1, 1, 1, 1]
        assert second.tolist() == [1, 6, 1, 1, 1]
    assert kept[0][0].to_dense().tolist() == [0, 0, 1, 0, 0]
