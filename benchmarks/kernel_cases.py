"""The cases of the benchmark of kernels: our calls and torch's on the same buffers.

Note [Bytes that a kernel must move]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The count has only what a perfect kernel cannot avoid. It reads each element of each input once and
writes each element of each result once. Tables of addresses and values in registers do not count.
The copy beside a call moves as many bytes, half read and half written: the same time is then the
same rate. The bytes are those of the operation, not of a way to do it. A torch expression that goes
through memory three times has the same count, and a low rate.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dataparallel import kernels, torch_internals
from dataparallel.kernels import reference

KERNELS = ("flatten", "unflatten", "fingerprint")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

MANY, FEW = 400, 4
#: The elements of each tensor of a transformer's layer with a width of 100.
_LAYER = (1, 1, 300, 3, 100, 1, 1, 1, 400, 4, 400, 1)
#: Addresses of tensors are multiples of so many bytes where each has memory of its own.
_ALIGNMENT = 512
#: The number of bytes that divides the address of a tensor with memory of its own.
_SCALE = 0.5

Call = Callable[[], object]
#: True if what ours has returned, or has written, is right.
Check = Callable[[], bool]


@dataclass(frozen=True)
class KernelCase:
    """One call that is measured.

    Attributes:
        kernel: One of :data:`KERNELS`.
        count: The number of tensors.
        dtype: The name of the elements' type.
        kib: The size of all tensors together.
    """

    kernel: str
    count: int
    dtype: str
    kib: int

    @property
    def section(self) -> str:
        """Kernel, number of tensors and type."""
        return f"{self.kernel}, {self.count} tensors, {self.dtype}"

    @property
    def numel(self) -> int:
        """Return the number of elements that have that size."""
        return self.kib * 1024 // DTYPES[self.dtype].itemsize


def plan_cases(names: Sequence[str], dtypes: Sequence[str], kib: Sequence[int]) -> list[KernelCase]:
    """Return all cases of some kernels, by kernel, type, number of tensors and size."""
    return [
        KernelCase(name, number, dtype, size)
        for name in names
        for dtype in dtypes
        for number in (MANY, FEW)
        for size in kib
    ]


def moved(case: KernelCase) -> int:
    """Bytes; see Note [Bytes that a kernel must move]."""
    size = case.kib * 1024
    return size if case.kernel == "fingerprint" else 2 * size


def tensor_sizes(numel: int, count: int) -> list[int]:
    """Elements of each tensor of a list, which sum up to ``numel``.

    :data:`FEW` are equal, and more have the sizes of a transformer's, layer after layer: multiples
    of 16 where there are enough.
    """
    layer = _LAYER if count > FEW else (1,)
    shares = list(itertools.islice(itertools.cycle(layer), count))
    unit = 16 if numel >= 64 * count else 1
    # One for each, and the rest by shares.
    rest = numel // unit - count
    ends = [round(rest * end / sum(shares)) for end in itertools.accumulate(shares)]
    sizes = [unit * (1 + end - begin) for begin, end in itertools.pairwise([0, *ends])]
    sizes[-1] += numel - sum(sizes)
    return sizes


# --- what is called ----------------------------------------------------------------------------


def calls_of(case: KernelCase, device: torch.device) -> tuple[dict[str, Call], Check]:
    """Ours, a copy, and torch's alternatives by name; and the check of what ours has returned."""
    calls, check = _CALLS[case.kernel](_tensor_list(case, device), case.numel)
    source = torch.zeros(moved(case) // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return {"ours": calls.pop("ours"), "copy": lambda: target.copy_(source), **calls}, check


def _values(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random numbers between -1 and 1."""
    return torch.empty(numel, dtype=dtype, device=device).uniform_(-1, 1)


def _tensor_list(case: KernelCase, device: torch.device) -> list[Tensor]:
    """Return the tensors of a case as an allocator would place them, with random numbers."""
    dtype = DTYPES[case.dtype]
    unit = _ALIGNMENT // dtype.itemsize
    sizes = tensor_sizes(case.numel, case.count)
    places = [-(-size // unit) * unit for size in sizes]
    memory = torch.split(_values(sum(places), dtype, device), places)
    return [place[:size] for place, size in zip(memory, sizes, strict=True)]


def _is_close(result: Tensor, expected: Tensor, steps: int = 4) -> bool:
    """True if no element differs by more than some steps between numbers of about 1. NaN does."""
    bound = steps * torch.finfo(result.dtype).eps
    return bool(((result.double() - expected.double()).abs() <= bound).all())


def _flatten(tensors: list[Tensor], numel: int) -> tuple[dict[str, Call], Check]:
    bucket = tensors[0].new_empty(numel)
    views = list(torch.split(bucket, [each.numel() for each in tensors]))
    layout = kernels.BucketLayout(bucket, views)

    def foreach_copy() -> None:
        torch_internals.foreach_copy_(views, tensors)
        bucket.mul_(_SCALE)

    calls: dict[str, Call] = {
        "ours": lambda: kernels.flatten(tensors, bucket, _SCALE, views=layout),
        "cat": lambda: torch.cat(tensors, out=bucket).mul_(_SCALE),
        "foreach": foreach_copy,
    }
    return calls, lambda: _is_close(bucket, torch.cat(tensors) * _SCALE)


def _unflatten(tensors: list[Tensor], numel: int) -> tuple[dict[str, Call], Check]:
    bucket = _values(numel, tensors[0].dtype, tensors[0].device)
    views = list(torch.split(bucket, [each.numel() for each in tensors]))
    layout = kernels.BucketLayout(bucket, views)
    calls: dict[str, Call] = {
        "ours": lambda: kernels.unflatten(bucket, tensors, views=layout),
        "foreach": lambda: torch_internals.foreach_copy_(tensors, views),
    }
    return calls, lambda: _is_close(torch.cat(tensors), bucket)


def _fingerprint(tensors: list[Tensor], numel: int) -> tuple[dict[str, Call], Check]:
    calls: dict[str, Call] = {
        "ours": lambda: kernels.fingerprint(tensors),
        "reference": lambda: reference.fingerprint(tensors),
    }
    return calls, lambda: torch.equal(kernels.fingerprint(tensors), reference.fingerprint(tensors))


_CALLS: dict[str, Callable[[list[Tensor], int], tuple[dict[str, Call], Check]]] = {
    "flatten": _flatten,
    "unflatten": _unflatten,
    "fingerprint": _fingerprint,
}
