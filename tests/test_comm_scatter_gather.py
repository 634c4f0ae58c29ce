"""Scatter and gather of one tensor, against torch.chunk and torch.cat."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dataparallel import comm
from tests.comm_cases import (
    same,
)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 9, 17])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_scatter_divides_as_torch_chunk(slots: list[str], size: int, dim: int) -> None:
    shape = [2, 3, 4]
    shape[dim] = size
    tensor = torch.randn(shape)
    for origin in ("cpu", slots[1]):
        chunks = comm.scatter(tensor.to(origin), slots, dim=dim)
        expected = tensor.chunk(4, dim)
        assert len(chunks) == len(expected)
        for chunk, model, slot in zip(chunks, expected, slots, strict=False):
            assert same(chunk, model, slot)
        assert torch.equal(comm.gather(chunks, dim, origin).cpu(), tensor)


def test_scatter_by_chunk_sizes(slots: list[str]) -> None:
    tensor = torch.randn(2, 9)
    chunks = comm.scatter(tensor, slots, [4, 0, 3, 2], dim=1)
    for chunk, model, slot in zip(chunks, torch.split(tensor, [4, 0, 3, 2], 1), slots, strict=True):
        assert same(chunk, model, slot)


def test_scatter_of_an_empty_batch_is_one_chunk(slots: list[str]) -> None:
    (chunk,) = comm.scatter(torch.empty(3, 0, 2), slots, dim=1)
    assert same(chunk, torch.empty(3, 0, 2), slots[0])


def test_gather_promotes_dtypes_and_keeps_channels_last(slots: list[str]) -> None:
    image = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    parts = [image.to(slots[0]), image.double().to(slots[1])]
    expected = torch.cat([image, image.double()])
    for destination in ("cpu", slots[1], "virtual:3"):
        gathered = comm.gather(parts, 0, destination)
        assert same(gathered, expected, destination)
        assert gathered.stride() == expected.stride()


def test_gather_stacks_tensors_without_dimensions(slots: list[str]) -> None:
    gathered = comm.gather([torch.tensor(float(i), device=s) for i, s in enumerate(slots)], 0, -1)
    assert same(gathered, torch.arange(4.0), "cpu")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: comm.scatter(t, ["cpu"], dim=2), r"dim 2 is out of range .*\(4, 2\).* -2 to 1"),
        (lambda t: comm.scatter(t[0, 0], ["cpu"]), r"dim 0 is out of range .*no dimension"),
        (lambda t: comm.scatter(t, ["cpu"] * 2, [1, 2]), r"has 4 along dim 0, but got \(1, 2\)"),
        (lambda t: comm.scatter(t, ["cpu"] * 2, [5, -1]), r"but got \(5, -1\)"),
        (lambda t: comm.scatter(t, ["cpu"] * 2, [4]), r"each of the 2 devices .* \(4,\)"),
        (lambda t: comm.gather([]), "at least one tensor"),
        (lambda t: comm.gather([t, t[:, :1]]), r"tensor 1 has shape \(4, 1\) and .* \(4, 2\)"),
        (lambda t: comm.gather([t, t[0]]), r"tensor 1 has shape \(2,\) and"),
        (lambda t: comm.gather([t], 3), "dim 3 is out of range"),
        (lambda t: comm.gather([t], destination="virtual:8"), "'virtual:8' does not exist"),
    ],
)
def test_scatter_and_gather_refuse(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.ones(4, 2))
