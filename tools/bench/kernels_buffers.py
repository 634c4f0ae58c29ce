"""Buffers on which `bench kernels` calls ours and torch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dataparallel.tools.bench.kernels_cases import DTYPES, KernelCase, tensor_sizes
from dataparallel.tools.bench.kernels_timing import Call

#: Addresses of tensors are multiples of so many bytes where each has memory of its own.
_ALIGNMENT = 512


@dataclass(frozen=True)
class BufferSet:
    """What is called on one set of buffers.

    Attributes:
        ours: Our function.
        others: Torch's alternatives by name.
        is_right: Calls ours and compares its results with torch's.
    """

    ours: Call
    others: dict[str, Call]
    is_right: Callable[[], bool]


def values(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random numbers between -1 and 1."""
    return torch.empty(numel, dtype=dtype, device=device).uniform_(-1, 1)


def tensor_list(case: KernelCase, device: torch.device) -> list[Tensor]:
    """The tensors of a case as an allocator would place them, with random numbers."""
    dtype = DTYPES[case.dtype]
    unit = _ALIGNMENT // dtype.itemsize
    sizes = tensor_sizes(case.numel, case.count)
    places = [-(-size // unit) * unit for size in sizes]
    memory = torch.split(values(sum(places), dtype, device), places)
    return [place[:size] for place, size in zip(memory, sizes, strict=True)]


def is_close(result: Tensor, expected: Tensor, bound: float | None = None) -> bool:
    """Whether no element differs by more than a bound. NaN is close to nothing.

    Args:
        result: What was computed.
        expected: What it should be, of the same shape.
        bound: Default: four steps between neighboring numbers of about 1.
    """
    bound = 4 * torch.finfo(result.dtype).eps if bound is None else bound
    return bool(((result.double() - expected.double()).abs() <= bound).all())
