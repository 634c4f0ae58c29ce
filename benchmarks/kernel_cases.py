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

KERNELS = ("reduce_add", "flatten", "unflatten", "fingerprint")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

MANY, FEW = 400, 4
_LISTS = (f"{MANY} tensors", f"{FEW} tensors")
_VARIANTS = {"reduce_add": ("2 inputs", "4 inputs", "8 inputs")}
#: The elements of each tensor of a transformer's layer with a width of 100.
_LAYER = (1, 1, 300, 3, 100, 1, 1, 1, 400, 4, 400, 1)
#: Addresses of tensors are multiples of so many bytes where each has memory of its own.
_ALIGNMENT = 512
#: The number of bytes that divides the address of a tensor with memory of its own.
_SCALE = 0.5

Call = Callable[[], object]


@dataclass(frozen=True)
class KernelCase:
    """One call that is measured.

    Attributes:
        kernel: One of :data:`KERNELS`.
        variant: How many inputs or tensors.
        dtype: The name of the elements' type.
        size: Bytes: of each input of reduce_add; of all tensors of a list.
    """

    kernel: str
    variant: str
    dtype: str
    size: int

    @property
    def name(self) -> str:
        """Kernel, variant and type."""
        return f"{self.kernel}, {self.variant}, {self.dtype}"

    @property
    def numel(self) -> int:
        """Return the number of elements that have that size."""
        return self.size // DTYPES[self.dtype].itemsize

    @property
    def count(self) -> int:
        """Return the number of inputs or tensors."""
        return int(self.variant.split()[0])


def plan_cases(
    names: Sequence[str], dtypes: Sequence[str], sizes: Sequence[int]
) -> list[KernelCase]:
    """Return all variants of some kernels, by kernel, type, variant and size."""
    return [
        KernelCase(name, variant, dtype, size)
        for name in names
        for dtype in dtypes
        for variant in _VARIANTS.get(name, _LISTS)
        for size in sizes
    ]


def moved(case: KernelCase) -> int:
    """Bytes; see Note [Bytes that a kernel must move]."""
    size = case.numel * DTYPES[case.dtype].itemsize
    if case.kernel == "reduce_add":
        return (case.count + 1) * size
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


def calls_of(case: KernelCase, device: torch.device) -> tuple[dict[str, Call], bool]:
    """Ours, a copy, and torch's alternatives by name; and whether the result of ours is right."""
    if case.kernel == "reduce_add":
        calls, right = _reduce_add(case, device)
    else:
        tensors = _tensor_list(case, device)
        calls, right = _OF_LISTS[case.kernel](tensors, case.numel)
    source = torch.zeros(moved(case) // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return {"ours": calls.pop("ours"), "copy": lambda: target.copy_(source), **calls}, right


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


def _reduce_add(case: KernelCase, device: torch.device) -> tuple[dict[str, Call], bool]:
    inputs = [_values(case.numel, DTYPES[case.dtype], device) for _ in range(case.count)]
    out = torch.empty_like(inputs[0])
    total = torch.empty_like(out)

    def add() -> Tensor:
        torch.add(inputs[0], inputs[1], out=total)
        for term in inputs[2:]:
            total.add_(term)
        return total

    def foreach_add() -> None:
        # As with buckets that are summed in place: the numbers grow, the time does not.
        for term in inputs[1:]:
            torch_internals.foreach_add_([total], [term])

    expected = torch.stack([term.double() for term in inputs]).sum(0)
    right = _is_close(kernels.reduce_add(inputs, out=out), expected, 4 * case.count)
    calls: dict[str, Call] = {
        "ours": lambda: kernels.reduce_add(inputs, out=out),
        "stack": lambda: torch.stack(inputs).sum(0),
        "foreach": foreach_add,
        "add_": add,
    }
    return calls, right


def _flatten(tensors: list[Tensor], numel: int) -> tuple[dict[str, Call], bool]:
    bucket = tensors[0].new_empty(numel)
    views = list(torch.split(bucket, [each.numel() for each in tensors]))
    layout = kernels.BucketLayout(bucket, views)

    def ours() -> None:
        kernels.flatten(tensors, bucket, _SCALE, views=layout)

    def foreach_copy() -> None:
        torch_internals.foreach_copy_(views, tensors)
        bucket.mul_(_SCALE)

    ours()
    right = _is_close(bucket, torch.cat(tensors) * _SCALE)
    calls: dict[str, Call] = {
        "ours": ours,
        "cat": lambda: torch.cat(tensors, out=bucket).mul_(_SCALE),
        "foreach": foreach_copy,
    }
    return calls, right


def _unflatten(tensors: list[Tensor], numel: int) -> tuple[dict[str, Call], bool]:
    bucket = _values(numel, tensors[0].dtype, tensors[0].device)
    views = list(torch.split(bucket, [each.numel() for each in tensors]))
    layout = kernels.BucketLayout(bucket, views)

    def ours() -> None:
        kernels.unflatten(bucket, tensors, views=layout)

    ours()
    right = _is_close(torch.cat(tensors), bucket)
    calls: dict[str, Call] = {
        "ours": ours,
        "foreach": lambda: torch_internals.foreach_copy_(tensors, views),
    }
    return calls, right


def _fingerprint(tensors: list[Tensor], numel: int) -> tuple[dict[str, Call], bool]:
    right = bool((kernels.fingerprint(tensors) == reference.fingerprint(tensors)).all())
    calls: dict[str, Call] = {
        "ours": lambda: kernels.fingerprint(tensors),
        "reference": lambda: reference.fingerprint(tensors),
    }
    return calls, right


_OF_LISTS: dict[str, Callable[[list[Tensor], int], tuple[dict[str, Call], bool]]] = {
    "flatten": _flatten,
    "unflatten": _unflatten,
    "fingerprint": _fingerprint,
}
