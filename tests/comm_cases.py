"""Tensors and expectations that the tests of comm share."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from dataparallel.comm import local

MIXED = ["virtual:2", "cpu", "virtual:0", "virtual:2", "cpu"]


DTYPES = [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool]


def make(shape: Sequence[int], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    values = torch.arange(math.prod(shape)).reshape(tuple(shape)) % 7
    if dtype.is_complex:
        return torch.complex(values.float(), -values.float()).to(dtype).to(device)
    return values.to(dtype).to(device)


def same(tensor: torch.Tensor, expected: torch.Tensor, device: str | torch.device) -> bool:
    return (
        tensor.device == torch.device(device)
        and tensor.dtype == expected.dtype
        and tensor.shape == expected.shape
        and torch.equal(tensor.cpu(), expected.cpu())
        and not tensor.requires_grad
    )


def laid_out(device: str) -> list[torch.Tensor]:
    """Tensors whose elements lie in memory in various orders."""
    base = torch.arange(120.0).reshape(2, 3, 4, 5).to(device)
    return [
        base,
        base.contiguous(memory_format=torch.channels_last),
        base.permute(3, 0, 2, 1),
        base[:, :, ::2, 1:3],
        base[0, 0, 0].expand(6, 5),
        base[:0],
        base[0, 0, 0, 0],
    ]


@contextlib.contextmanager
def counting_copies() -> Iterator[list[torch.device]]:
    made: list[torch.device] = []
    arrive = local.arrive

    def counted(device: torch.device, *args: Any) -> torch.Tensor:
        made.append(device)
        return arrive(device, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "arrive", counted)
        yield made


def in_order(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum in replica order; of floats of 16 bits in float32, rounded once."""
    dtype = tensors[0].dtype
    total = tensors[0].float() if dtype.itemsize == 2 else tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total.to(dtype)


def sparse(values: Sequence[float], indices: Sequence[int]) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor([list(indices)]), torch.tensor(list(values)), (5,), check_invariants=True
    )


def queued_work(device: str) -> torch.Tensor:
    """Ones that the current stream of a device still has to compute, in strict mode."""
    return torch.zeros(1000, device=device) + 1


def values(tensor: torch.Tensor) -> set[float]:
    return set(tensor.tolist())
